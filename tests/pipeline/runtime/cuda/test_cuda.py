"""The runtime on CUDA: transfers over NCCL and through host memory, the chain on its own stream."""

import importlib.metadata
import importlib.util

import pytest
import torch

from megatron.pipeline.runtime.contract import trace
from megatron.pipeline.start_up.late_weights import engine_keeps_main_grad
from tests import workers
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.reference import Training

CASE = "tests.pipeline.runtime.stages.module.module_cases:run_on_cuda"
TRAINING = Training(batches=(4, 4, 8, 4, 4, 4, 4, 4), clip_grad=0.05)


def assert_like_the_reference(outcomes, *, delay):
    expected = reference.train(TRAINING, delay=delay)
    for outcome in outcomes:
        assert [report.losses["loss"] for report in outcome.reports] == pytest.approx(expected.losses, rel=1e-4)
        assert outcome.num_unread_sends == 0
        for name, tensor in outcome.parameters.items():
            torch.testing.assert_close(tensor, expected.parameters[name], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("preset", "delay"), [("gpipe", 0), ("flush", 0), ("zb-h1", 0), ("2bw", 1)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_that_share_a_gpu_go_through_host_memory(preset, delay, num_ranks):
    """Several ranks on one GPU, staged through pinned memory with gloo, train as one process on the CPU does."""
    outcomes = workers.run(num_ranks, CASE, device="cuda", preset=preset, training=TRAINING, backend="gloo")
    assert_like_the_reference(outcomes, delay=delay)
    assert trace.timeline(outcomes[0].traces).makespan > 0


@pytest.mark.gpu
def test_activations_travel_through_host_memory():
    """Two microbatches that leave the GPU for the pair and come back change no bit of a gradient."""
    case = "tests.pipeline.runtime.activations.transfer_cases:gradients_on_cuda"
    kept, moved = (workers.run(2, case, device="cuda", moves=moves, num_batches=3) for moves in (False, True))
    for one, other in zip(kept, moved, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one["gradients"], other["gradients"], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_bpipe_on_a_shared_gpu_changes_no_bit(recompute):
    """Four stages on one GPU that move activations beside their kernels compute what flush computes, batch by batch, in
    buffers that are used again.
    """
    training = Training(batches=(8, 8, 12, 8), dropout=0.2)
    kept, moved = (
        workers.run(
            4,
            "tests.pipeline.runtime.activations.balance_cases:train_on_cuda",
            device="cuda",
            preset=preset,
            training=training,
            moves=preset == "bpipe",
            drains=(1, 3),
            recompute=recompute,
        )
        for preset in ("flush", "bpipe")
    )
    for one, other in zip(kept, moved, strict=True):
        assert one.reports == other.reports
        assert all(torch.equal(a, b) for a, b in zip(one.gradients, other.gradients, strict=True))
        assert all(torch.equal(tensor, other.parameters[name]) for name, tensor in one.parameters.items())
        assert other.peak_on_rank <= 3 and len(set(other.num_buffers)) == 1


@pytest.mark.gpu
def test_two_gpus_over_nccl():
    """2bw over NCCL on two GPUs trains as one process on the CPU does."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: NCCL does not join two ranks on one")
    outcomes = workers.run(2, CASE, device="cuda", preset="2bw", training=TRAINING, backend="nccl")
    assert_like_the_reference(outcomes, delay=1)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", [False, True], ids=["local", "Transformer Engine"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fused_gradient_accumulation_equals_unfused(num_ranks, engine):
    """2bw computes the same losses and norms whether products add to the gradient buffer themselves, in Apex's kernel
    (a stand-in where it is not installed) and in Transformer Engine's.
    """
    if engine and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine, which is not installed")
    if engine and engine_keeps_main_grad(version := importlib.metadata.version("transformer_engine")):
        pytest.skip(f"Transformer Engine {version} cannot be fused under 2bw, so training turns it off")
    fused, plain = (
        workers.run(
            num_ranks, "tests.pipeline.runtime.stages.megatron.fused_accumulation:train_on_cuda", device="cuda",
            schedule="2bw", p=num_ranks, batches=(4,) * 6, fused=fuses, engine=engine,
        )
        for fuses in (True, False)
    )  # fmt: skip
    for ours, theirs in zip(fused, plain, strict=True):  # without the repair the second norm is a third of it
        assert ours == [pytest.approx(pair, rel=1e-2) for pair in theirs]
