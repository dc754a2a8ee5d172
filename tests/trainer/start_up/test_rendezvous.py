"""The store of a job that a launcher starts again."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.trainer.start_up import initialize


def test_each_start_has_a_part_of_the_store(monkeypatch):
    """Three ranks, of which one is killed at the first start before it takes part: no start finds keys of another. A
    process that is started again alone finds the part of the latest start."""
    store = torch.distributed.HashStore()

    def started(ranks: range) -> list:
        with ThreadPoolExecutor(3) as pool:
            return [pool.submit(initialize.of_this_start, store, rank=rank, world_size=3) for rank in ranks]

    with monkeypatch.context() as patched:
        patched.setattr(initialize, "RENDEZVOUS_TIMEOUT", timedelta(seconds=0.5))
        with pytest.raises(RuntimeError, match="no word of rank 2"):
            started(range(2))[0].result()
    for _ in range(2):
        parts = [each.result() for each in started(range(3))]
        assert not any(part.check(["start/0"]) for part in parts)
        parts[0].set("start/0", "here")
        assert all(part.check(["start/0"]) for part in parts)
    monkeypatch.setattr(initialize, "_launchers_store", lambda: store)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert initialize.running_job(lambda part: True) is None  # a first process
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert initialize.running_job(lambda part: part.check(["start/0"])).check(["start/0"])
    assert initialize.running_job(lambda part: False) is None  # all are started again
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert initialize.running_job(lambda part: False) is store  # our launcher, which starts single ranks again
