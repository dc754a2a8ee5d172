"""What CUDA does in which order: whoever needs what another stream has not finished waits for it.

The same claims are checked on a CPU by a stand-in for CUDA (test_recorded.py), which also shows that they fail without
the waits. Here a kernel that sleeps stands in the way of what has to be waited for. Where a CPU runs the same case, it
shows that the case computes what it says.
"""

import pytest
import torch

from tests import workers
from tests.pipeline.runtime.stages.module.reference import Training

EVERYWHERE = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Kernels of a GPU may add up in another order from run to run; gradients that were taken too early turn steps round,
each of which is a hundredth."""


def run(case, num_ranks=1, place="cuda:0", **options):
    device = "cpu" if place == "cpu" else "cuda"
    case = f"tests.pipeline.runtime.cuda.cuda_cases:{case}"
    return workers.run(num_ranks, case, timeout=240, device=device, place=place, **options)


def difference(one, other):
    """The largest of any weight."""
    assert one.keys() == other.keys()
    return max((tensor - other[name]).abs().max().item() for name, tensor in one.items())


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], **CLOSE)


@pytest.mark.gpu
def test_what_follows_a_milestone_waits_for_the_stream():
    """A stream that waits for a milestone reads what the other thread's stream writes late; the host does not wait."""
    [(least, is_ahead)] = run("behind_a_milestone")
    assert least == 1.0 and is_ahead


@pytest.mark.gpu
def test_a_buffer_is_not_written_before_it_was_read():
    """A buffer whose last kernel waits behind one that sleeps is handed on at once, to a stream that waits for it."""
    [(is_same, largest, is_ahead)] = run("buffer_that_is_taken_again")
    assert is_same and largest == 1.0 and is_ahead


@pytest.mark.gpu
def test_what_arrives_late_holds_up_the_stream_alone():
    """The stream waits for a receive, and the host goes on; while it is overdue that is told, with who waits for whom;
    and of many receives none is held, though nobody polls.
    """
    [found] = run("late_arrivals", count=20)
    assert found["means"] == [index + 1 for index in range(20)]
    assert found["is_ahead"]
    assert "rank 1 (stage 1) waited" in found["overdue"] and "for 1RECV_F0 from rank 0 (stage 0)" in found["overdue"]
    assert found["overdue_at_last"] == ""
    assert found["growth"] == 0


@pytest.mark.sample(1)
@EVERYWHERE
@pytest.mark.parametrize(
    ("num_ranks", "kept", "moved"),
    [(4, {"preset": "flush"}, {"preset": "bpipe"}), (5, {"preset": "2bw"}, {"preset": "2bw", "balance": True})],
)
def test_loaded_buffers_outlive_the_backward_that_is_queued(num_ranks, kept, moved, place):
    """Ranks on one GPU that move activations through host memory, where the kernels of every backward wait behind one
    that sleeps, compute bit by bit the gradients of ranks that move nothing: no buffer was filled again too early.
    """
    training = Training(batches=(2 * num_ranks,) * 2)
    expected, found = (
        run("train_with_slow_backwards", num_ranks, place, training=training, moves=moves, drains=(0,), **options)
        for moves, options in ((False, kept), (True, moved))
    )
    assert any(outcome.num_buffers[-1] for outcome in found), "nothing was moved"
    for one, other in zip(expected, found, strict=True):
        assert len(one.gradients) == 2
        assert all(torch.equal(a, b) for a, b in zip(one.gradients, other.gradients, strict=True))


@EVERYWHERE
def test_early_gradients_are_those_that_the_chain_has_reduced(place):
    """With one gradient buffer a batch is applied when the chain's thread has come by, and its stream has not: the
    weights are those of a chain that was quick. One rank shows it, with another operation in the place of the
    all-reduce; left out, it changes the weights.
    """
    [quick], [late] = (run("weights_after_a_reduction", place=place, seconds=seconds) for seconds in (0.0, 0.5))
    assert_close(late, quick)
    [without] = run("weights_after_a_reduction", place=place, seconds=0.0, reduces=False)
    assert difference(without, quick) > 0.01


@pytest.mark.parametrize("place", ["cpu", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_early_gradients_are_those_of_all_replicas(place):
    """Two replicas with one gradient buffer have equal weights at the end, though all-reduces begin late and one of
    them reads nothing that would have it wait. Through host memory they have so by themselves: the chain's host waits.
    """
    if place == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: NCCL does not join two ranks on one")
    first, second = run("weights_of_replicas", 2, place, seconds=0.3)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
