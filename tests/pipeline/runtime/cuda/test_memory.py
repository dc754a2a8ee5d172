"""What a run takes of the devices, and gives back."""

import pytest
import torch

from megatron.pipeline.communicators import COMMUNICATOR_CTAS
from megatron.planner.memory.memory import CONNECTION_BYTES
from tests import workers

CASES = "tests.pipeline.runtime.cuda.memory_cases"
MIB = 1 << 20


def needs_two_gpus(why):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices: {why}")


def assert_steady(found):
    """A thread may hold something a moment longer, so the least of each half counts; the first three batches make
    optimizer states and the second weight version.
    """
    assert 0 < min(found[10:]) <= min(found[3:10]), found


@pytest.mark.parametrize("preset", [pytest.param("flush", marks=pytest.mark.full), "2bw"])
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_what_was_received_goes_with_its_backward(place, preset):
    """Two ranks that receive through host memory hold no more bytes after the last ten of twenty drains than after
    those before, though no guard polls.
    """
    device = "cpu" if place == "cpu" else "cuda"
    options = {"device": device, "place": place, "preset": preset, "num_batches": 20}
    for found in workers.run(2, f"{CASES}:bytes_after_drains", **options):
        assert_steady(found)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["flush", "2bw"])
def test_what_was_received_over_nccl_goes_with_its_backward(preset):
    """The same over NCCL, where the stream and not the host waits for a receive."""
    needs_two_gpus("NCCL does not join two ranks on one")
    options = {"place": "each", "preset": preset, "num_batches": 20, "backend": "nccl"}
    for found in workers.run(2, f"{CASES}:bytes_after_drains", device="cuda", **options):
        assert_steady(found)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_communicators_take_what_the_planner_counts(num_ranks, record_property):
    """A communicator of each use takes no more of a GPU than the planner counts for its CTAs, half of that again, and
    32 MiB; one of a single rank, for which it counts nothing, no more than 32 MiB. What they take is in the report.
    """
    if num_ranks == 2:
        needs_two_gpus("NCCL does not join two ranks on one")
    for rank, found in enumerate(workers.run(num_ranks, f"{CASES}:bytes_of_communicators", device="cuda")):
        for use, num_bytes in found.items():
            counted = (num_ranks - 1) * COMMUNICATOR_CTAS[use] * CONNECTION_BYTES
            words = f"{num_bytes / MIB:.1f} MiB, counted {counted / MIB:.1f}"
            record_property(f"communicator: {use}, rank {rank} of {num_ranks}", words)
            print(f"communicator: {use}, rank {rank} of {num_ranks}: {words}")
            assert num_bytes <= 1.5 * counted + 32 * MIB, f"{use}: {words}"


@pytest.mark.gpu
def test_threads_make_no_context_on_the_first_gpu():
    """Four ranks that compute, send and move activations on the second GPU have a context there and nowhere else:
    links, chain and moves have threads of their own, each of which has to be told its device.
    """
    needs_two_gpus("a context on the first one is told from that of the device in use")
    workers.close_all()  # processes of other tests may have one
    for contexts in workers.run(4, f"{CASES}:contexts_of_a_run", device="cuda", place="cuda:1"):
        assert [number for number, is_there in enumerate(contexts) if is_there] == [1]
