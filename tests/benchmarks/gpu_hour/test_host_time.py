"""The part `host_time` as far as a CPU goes, and how it counts calls that wait."""

import tempfile
import threading
import warnings
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.gpu_hour import host_time
from benchmarks.gpu_hour.result import Result
from tests import workers


@pytest.fixture(scope="module")
def found() -> dict:
    [found] = workers.run(1, "tests.benchmarks.gpu_hour.part_cases:rehearse", part="host_time")
    return found


@pytest.mark.full
def test_the_executors_part_is_a_small_part_of_a_batch(found):
    """All figures are there; the executor's own time, of five instructions and some of a batch, is less than the
    whole."""
    figures = found["figures"]
    for name in ("flush", "2bw"):
        own, whole = figures[f"{name}_executor_seconds_per_instruction"], figures[f"{name}_host_cpu_seconds_per_batch"]
        assert 0 < 5 * own < max(whole)
        calls = {each: figures[f"{name}_host_seconds_of_a_{each}"] for each in ("forward", "backward", "step")}
        assert {each: len(seconds) for each, seconds in calls.items()} == {"forward": 2, "backward": 2, "step": 1}
        assert all(min(seconds) > 0 for seconds in calls.values())
    assert min(figures["loop_host_wall_seconds_per_batch"]) > 0


@pytest.mark.full
def test_a_cpu_is_never_ahead(found):
    """Two forwards, two backwards and a step, none of them ahead of a CPU's work, which no call waits for."""
    figures = found["figures"]
    assert [figures[f"{name}_calls_ahead_of_a_sleep"] for name in ("flush", "2bw")] == [[0, 5], [0, 5]]
    assert [figures[f"{name}_waits_in_three_batches"] for name in ("flush", "2bw", "loop")] == [0, 0, 0]
    assert figures["large_2bw_seconds_of_three_batches"] > figures["large_2bw_lead_seconds"] >= 0


def test_waits_are_counted_by_thread():
    """torch's warnings of the computing thread are counted, those of another thread apart, and the watch ends."""
    [(content, modes)] = workers.run(1, "tests.benchmarks.gpu_hour.test_host_time:_counted")
    assert content["figures"] == {"flush_waits_in_three_batches": 3}
    assert "3 in the computing thread, 6 in others" in content["lines"][0]
    assert modes == ["warn", "default"]


def _counted() -> tuple[dict, list[str]]:
    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    class Waiting:
        name = "flush"

        def run(self, num_microbatches: int) -> None:
            wait()
            for _ in range(2):
                other = threading.Thread(target=wait)
                other.start()
                other.join()

    modes: list[str] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("megatron.backend.is_cuda", lambda: True),
        mock.patch.object(torch.cuda, "set_sync_debug_mode", modes.append),
    ):
        result = Result(Namespace(json=Path(folder) / "found.json", rehearse=True))
        host_time.count_waits(result, Waiting(), 2)
    return result.content, modes
