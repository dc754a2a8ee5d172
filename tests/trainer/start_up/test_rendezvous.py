"""The store of a job that a launcher starts again."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.trainer.start_up import initialize


def test_each_start_has_a_part_of_the_store(monkeypatch):
    """Three ranks, of which one is killed at the first start before it takes part: no start finds keys of another."""
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
