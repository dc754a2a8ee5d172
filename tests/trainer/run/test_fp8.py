"""Runs in FP8, with Transformer Engine's layers of tests/stand_ins: over pipelines, from checkpoints, with experts.

What the layers compute, against a plain loop, is tested in tests/pipeline/runtime/stages/megatron/test_engine.py.
"""

import pytest
import torch

from tests.trainer.run.lost_rank_jobs import MODEL, Trained, assert_nothing_lost, run
from tests.trainer.run.run_case import data_flags, joined_weights, table
from tests.trainer.run.test_engine import ENGINE, of_engine
from tests.trainer.run.test_virtual_stages import EXACT, P2, V2, values
from tests.trainer.run.test_what_loses_ranks import LOST_AND_BACK

DELAYED = "--fp8-format hybrid --fp8-amax-history-len 64 --fp8-amax-compute-algo max"
TENSORWISE = "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16"
SHARED = "--context-parallel-size 2"
EXPERTS = (
    "--fp8-format e4m3 --fp8-recipe blockwise --num-experts 4 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --swiglu"
)
PADDED = f"{EXPERTS} --moe-router-padding-for-fp8"


def check(found: list[dict], expected: list[dict], last: int = 6) -> None:
    """The same losses of the `last` iterations, bit for bit, and the same weights."""
    ours, theirs = (values(each) for each in (found, expected))
    assert ours["lm_loss"][-last:] == theirs["lm_loss"][-last:] and len(ours["lm_loss"]) >= last
    assert ours["grad_norm"][-last:] == pytest.approx(theirs["grad_norm"][-last:], rel=1e-12)
    weights = joined_weights(expected)
    assert not [name for name, tensor in joined_weights(found).items() if not torch.equal(tensor, weights[name])]


RUNS = {
    "delayed, interleaved": (DELAYED, f"{P2} --pipeline-schedule interleaved {V2}"),
    "experts, blockwise": (EXPERTS, f"{P2} --pipeline-schedule flush"),
    "tensorwise, zero bubble": (TENSORWISE, f"{P2} --pipeline-schedule zb-h1"),
    "padded experts, zero bubble": (PADDED, f"{P2} --pipeline-schedule zb-h1"),
}


@table("model, layout", RUNS, usual=1)
def test_pipelines_equal_one_process(model, layout):
    """Bit-equal."""
    expected = of_engine(1, f"{EXACT} {model}")
    assert values(expected)["lm_loss"][5] < values(expected)["lm_loss"][0]
    check(of_engine(2, f"{EXACT} {model} {layout}"), expected)


@table(
    "schedule",
    {
        "2bw": ("2bw",),
        "flush": ("flush",),
        "provisional": ("2bw --2bw-provisional stage",),
        "shared sequences": (f"2bw {SHARED}",),
    },
    usual=1,
)
def test_a_run_goes_on_with_its_scales(tmp_path, schedule):
    """Histories of delayed scaling come from the checkpoint of each stage, and the run continues with the same bits.
    Without them it does not.
    """
    flags = f"{EXACT} {DELAYED} {P2} --pipeline-schedule {schedule}"
    ranks = 4 if SHARED in flags else 2
    whole = of_engine(ranks, f"{flags} --save {tmp_path} --save-interval 3")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    check(of_engine(ranks, f"{flags} --load {tmp_path}"), whole, last=3)


def in_fp8() -> Trained:
    return Trained("pretrain_gpt", f"{MODEL} {ENGINE} --clip-grad 0", data_flags(), engine=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("depth", "flags"),
    [
        (2, f"{TENSORWISE} --pipeline-schedule flush"),
        (2, "--fp8-format e4m3 --fp8-recipe mxfp8 --seq-length 32 --max-position-embeddings 32"),
        (2, f"{EXPERTS.replace('--moe-grouped-gemm', '')} --pipeline-schedule zb-h1"),
        (1, f"{TENSORWISE} --bf16 --pipeline-schedule 2bw"),
    ],
)
def test_ranks_are_lost_and_come_back(tmp_path, depth, flags):
    """Scales have no state, so a batch that is repeated has those of an undisturbed run. A batch has two microbatches:
    with more, gradients would be summed in another order, and a last bit can round to another number of FP8."""
    losses = LOST_AND_BACK
    if depth == 1:
        losses = [[1, "forward", 3, "SIGKILL"], [0, "forward", 5, "newcomer"], [0, "stepped", 8, "SIGKILL"]]
    flags = f"--global-batch-size 2 --train-iters 12 --eval-interval 4 --eval-iters 1 {flags}"
    shape = f"--pipeline-model-parallel-size {depth} --save saved --save-interval 3"
    job = run(tmp_path, 2 * depth, f"{flags} {shape}", losses, max_restarts=1, trained=in_fp8())
    assert_nothing_lost(job, flags.replace("zb-h1", "flush"), trained=in_fp8())
    lost = [moment.rank for moment in job.moments if moment.is_loss]
    assert lost == [rank for rank, _, _, what in losses if what == "SIGKILL"], job.outcome.output
    assert f"rank 1 is back: {2 * depth} ranks of {2 * depth} go on" in job.outcome.output, job.outcome.output
