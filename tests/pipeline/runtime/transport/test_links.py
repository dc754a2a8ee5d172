"""Links between two real processes: what is sent arrives, and who is at fault is told apart."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.transport.links import GlooLink
from tests import workers

SPEC = TensorSpec((1 << 16,))
SECOND = timedelta(seconds=1)


def link(name: str) -> GlooLink:
    """One end of a link from rank 0 to rank 1."""
    store = distributed_c10d._get_default_store()
    errors: list[Exception] = []
    end = GlooLink(
        name, store, sends=dist.get_rank() == 0, timeout=SECOND, device=torch.device("cpu"), on_error=errors.append
    )
    end.errors = errors
    return end


def many_sends_case() -> list[float]:
    """20 sends at once, each dropped by the sender when it is posted; the receiver returns what came."""
    end = link("many")
    if dist.get_rank() == 0:
        for number in range(20):
            end.send(torch.full(SPEC.shape, float(number)), number)
        dist.barrier()
        deadline = time.monotonic() + 10
        while end.num_unread() and time.monotonic() < deadline:
            time.sleep(0.01)
        found = [float(end.num_unread())]
    else:
        dist.barrier()  # all are posted before the first receive
        receives = [end.receive(SPEC, number) for number in range(20)]
        found = [receive.wait(10 * SECOND).unique().item() for receive in receives]
    end.close(1.0)
    return found


def test_sends_are_kept_until_they_are_read():
    """A tensor that its owner drops after posting arrives whole and in order; then nothing is held."""
    held, received = workers.run(2, "tests.pipeline.runtime.transport.test_links:many_sends_case")
    assert received == [float(number) for number in range(20)]
    assert held == [0.0]


def faults_case() -> list[str]:
    """The names of what two receives raise on rank 1: one that nobody sends, one without memory for it."""
    end, found = link("faults"), []
    if dist.get_rank() == 1:
        for spec in (SPEC, TensorSpec((1 << 55,))):
            try:
                end.receive(spec, 0).wait(SECOND)
            except (RuntimeError, MemoryError) as error:
                found.append(type(error).__name__)
    dist.barrier()
    end.close(1.0)
    return found


def test_a_receive_without_memory_is_no_lost_peer():
    """What never comes is a RuntimeError in time; too little memory is this rank's own error."""
    assert workers.run(2, "tests.pipeline.runtime.transport.test_links:faults_case") == [
        [],
        ["RuntimeError", "MemoryError"],
    ]
