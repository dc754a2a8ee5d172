"""Runs with experts: the same numbers however the job is cut, losses of routers in the log, checkpoints, refusals."""

import functools

import pytest
import torch

from tests.trainer.arguments.command_line import arguments
from tests.trainer.run.run_case import joined_weights, table, train

EXPERTS = (
    "--num-experts 4 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --untie-embeddings-and-output-weights "
    "--clip-grad 0"
)
QUIET = "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0"
SMOOTH = f"{QUIET} --adam-eps 1e-5"
"""So that the noise of gradients near zero stays noise: with 1e-8 weights of tensor ranks were 1.6e-4 from those of one
process, and with this they are 1.2e-6 (losses 6e-8)."""
DEEP, WIDE = (
    "--pipeline-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64",
)
SEQUENCE = 16  # tokens
OF_ROUTERS = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss")
BIASED = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05"
OVER_BATCHES = "--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-1"

PREDICTED = "--pipeline-schedule 2bw --2bw-provisional uniform --2bw-provisional-microbatches 1"
RECOMPUTE = "--recompute-method block --recompute-num-layers 1"
INTERLEAVED = (
    "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2 "
    "--microbatch-group-size-per-virtual-pipeline-stage 2"
)


def numbers(results: list[dict]) -> dict[str, list[float]]:
    records = [record for record in results[-1]["records"] if "lm_loss" in record]
    return {name: [record[name] for record in records] for name in ("lm_loss", *OF_ROUTERS) if name in records[0]}


@functools.cache
def on_one_rank(flags: str) -> list[dict]:
    return train(1, f"{EXPERTS} {flags}")


def check(results: list[dict], expected: list[dict], tolerance: float) -> None:
    ours, theirs = numbers(results), numbers(expected)
    assert len(theirs) == 3 and ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=tolerance, abs=0.0)
    for name in theirs.keys() - {"lm_loss"}:  # summed over layers in FP32, stage by stage
        assert ours[name] == pytest.approx(theirs[name], rel=max(tolerance, 1e-6))
    one, other = joined_weights(expected), joined_weights(results)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0.0, atol=5 * tolerance, msg=lambda text, n=name: n + text)


CUTS = {
    "2bw with predictions": (2, PREDICTED, "", 0.0),
    "l2l": (2, "--pipeline-schedule l2l", "", 1e-6),
    "Muon": (2, "--pipeline-schedule 2bw --optimizer muon --disable-bias-linear --swiglu", "", 0.0),
    "every other layer": (2, f"--moe-layer-freq 2 --moe-shared-expert-intermediate-size 32 {QUIET}", "", 0.0),
    "sequences": (2, "--moe-layer-freq [1,1,0,1] --moe-router-load-balancing-type seq_aux_loss", "", 0.0),
    "tensor ranks": (4, f"{SMOOTH} --pipeline-schedule 2bw", f"{DEEP} {WIDE}", 1e-6),
    "frozen layers": (2, "--freeze-training --freeze-interval 2 --freeze-schedule 1,2", "", 0.0),
    "replicas": (4, f"{SMOOTH} --pipeline-schedule 2bw", f"{DEEP} --use-distributed-optimizer", 1e-6),
    "recomputed": (2, f"--pipeline-schedule 2bw --recompute-granularity full {RECOMPUTE}", "", 0.0),
    "interleaved": (2, "--pipeline-schedule flush", INTERLEAVED, 0.0),
}  # fmt: skip


@table(("ranks", "flags", "cut", "tolerance"), CUTS, usual=1)
def test_numbers_do_not_depend_on_the_cut(ranks, flags, cut, tolerance):
    """Losses of tokens and of routers, and weights, are those of one rank."""
    check(train(ranks, f"{EXPERTS} {flags} {cut}"), on_one_rank(flags), tolerance)


@pytest.mark.full
def test_random_choices_do_not_depend_on_the_cut():
    """In training and in evaluations, which draw in their own microbatches."""
    flags = f"{EXPERTS} --moe-router-force-load-balancing --eval-iters 1 --eval-interval 3"
    one, two = (train(ranks, f"{flags} {cut}")[-1]["records"] for ranks, cut in ((1, ""), (2, DEEP)))
    for name in ("lm_loss", "validation_loss"):
        expected = [record[name] for record in one if name in record]
        assert expected and [record[name] for record in two if name in record] == expected


@pytest.mark.full
def test_losses_of_routers_are_reported():
    """The log and the metrics have them for training, and not for evaluations, where no router has any."""
    last = train(1, f"{EXPERTS} --eval-iters 1 --eval-interval 3")[-1]
    line = next(line for line in last["lines"] if "iteration        6/" in line)
    assert " load_balancing_loss: 1.0" in line and " z_loss: " in line and "| expert load imbalance: " in line
    assert all(
        1.0 <= value < 2.0 for value in numbers([last])["load_balancing_loss"]
    )  # 1 is balanced, 2 half the experts
    evaluations = [record for record in last["records"] if "validation_loss" in record]
    assert len(evaluations) == 2 and not any("balancing" in key or "z_loss" in key for key in evaluations[0])


def test_loads_of_experts_are_reported():
    """Of each batch, over all ranks: each token of a layer goes to two experts. Losses of a batch's counts, too."""
    flags = f"{EXPERTS} {SMOOTH} {BIASED} {OVER_BATCHES} --moe-layer-freq 2 --pipeline-schedule 2bw"
    one, other = (train(*run)[-1]["records"] for run in ((1, flags), (2, f"{flags} {DEEP}")))
    one, other = ([each for each in records if "lm_loss" in each] for records in (one, other))
    for ours, theirs in zip(other, one, strict=True):
        loads = ours["tokens_per_expert"]
        assert loads == theirs["tokens_per_expert"] and loads.keys() == {"1", "3"}
        tokens = ours["consumed_samples"] // ours["iteration"] * SEQUENCE
        assert all(sum(row) == 2 * tokens for row in loads.values())
        assert ours["expert_load_imbalance"] == max(max(row) * 4 / sum(row) for row in loads.values()) > 1.0
        assert ours["global_load_balancing_loss"] == pytest.approx(theirs["global_load_balancing_loss"], rel=1e-6)


@pytest.mark.full
def test_recomputed_layers_report_the_same_losses():
    """megatron.core recomputes them in the backward, whose microbatch has the losses."""
    flags = f"{EXPERTS} {QUIET} --recompute-granularity full {RECOMPUTE}"
    check(train(1, flags), on_one_rank(QUIET), 0.0)


RESUMED = {
    "other depth": (2, "", 1, "", 0.0),
    "biases": (2, BIASED, 1, "", 0.0),
    "random choices": (2, "--moe-router-force-load-balancing", 1, "", 0.0),
    "predictions and biases": (2, f"{BIASED} --2bw-provisional uniform --2bw-provisional-microbatches 1", 1, "", 0.0),
    "other replicas": (2, SMOOTH, 4, f"{DEEP} --use-distributed-optimizer", 1e-6),
    "other tensor ranks": (1, SMOOTH, 4, f"{DEEP} {WIDE}", 1e-6),
}


@pytest.mark.full
@table(("writers", "flags", "readers", "cut", "tolerance"), RESUMED, usual=1)
def test_a_checkpoint_goes_on_at_other_degrees(tmp_path, writers, flags, readers, cut, tolerance):
    """Weights and moments of routers and experts, in both versions of 2bw."""
    flags = f"{EXPERTS} {flags} --pipeline-schedule 2bw --load {tmp_path}"
    whole = train(writers, flags.replace(f"--load {tmp_path}", ""))
    train(writers, f"{flags} --save {tmp_path} --exit-interval 3")
    found = numbers(train(readers, f"{flags} {cut}"))
    for name, expected in numbers(whole).items():
        assert found[name] == pytest.approx(expected[3:], rel=max(tolerance, 1e-6 if name != "lm_loss" else 0), abs=0.0)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--moe-router-topk 2", "--moe-router-topk is given, and --num-experts is not; give both, or neither"),
        ("--num-experts 4 --moe-router-topk 5", "--moe-router-topk 5 is more than --num-experts 4; lower"),
        ("--num-experts 4 --moe-router-topk 1", "needs --moe-router-pre-softmax, since the softmax of one score"),
        ("--num-experts 4 --moe-layer-freq 0", "--moe-layer-freq 0 is below 1; give 1"),
        ("--num-experts 4 --moe-layer-freq [1]", "--moe-layer-freq has 1 entries, and the model 4 layers; give"),
        ("--num-experts 4 --moe-router-num-groups 2", "--moe-router-group-topk belong together; give both"),
        ("--num-experts 4 --moe-router-num-groups 3 --moe-router-group-topk 1", "3 has to divide --num-experts 4"),
        (
            "--num-experts 4 --moe-router-load-balancing-type global_aux_loss --pipeline-schedule l2l "
            "--pipeline-model-parallel-size 2",
            "global_aux_loss: weights on the host keep no counts of a batch; choose",
        ),
        ("--num-experts 4 --moe-router-load-balancing-type best", "best is none of aux_loss, seq_aux_loss"),
        ("--num-experts 4 --moe-aux-loss-coeff 1 2", "has 2 values and --moe-router-load-balancing-type 1; give"),
        (
            "--num-experts 4 --moe-router-num-groups 4 --moe-router-group-topk 1",
            "a group needs as many experts as a token",
        ),
        ("--num-experts 4 --moe-layer-freq [0,0,0,0]", "leaves no layer with experts; leave --num-experts out"),
        ("--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 1", "none has no loss for"),
        ("--num-experts 4 --moe-router-load-balancing-type aux_loss aux_loss", "none is given twice"),
        ("--num-experts 4 --moe-router-load-balancing-type aux_loss none", "sinkhorn and none stand alone"),
        ("--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1", "leave them out"),
        ("--num-experts 4 --moe-token-dispatcher-type flex", "flex needs CUDA and the package deep_ep; use alltoall"),
        ("--num-experts 4 --moe-token-dispatcher-type post", "post is none of allgather, alltoall, flex"),
        ("--num-experts 4 --moe-apply-probs-on-input", "needs --moe-router-topk 1, not 2; leave it out"),
        ("--num-experts 4 --moe-pad-expert-input-to-capacity", "needs --moe-expert-capacity-factor"),
        ("--num-experts 4 --moe-router-enable-expert-bias", "needs --moe-router-score-function sigmoid; add it"),
        (
            f"--num-experts 4 {BIASED} --freeze-training --freeze-interval 2 --pipeline-schedule flush "
            "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights",
            "frozen layers count no tokens of a batch; leave --freeze-training out",
        ),
        (
            f"--num-experts 4 {BIASED} --pipeline-schedule pipedream --pipeline-model-parallel-size 2 --clip-grad 0 "
            "--global-batch-size 2 --micro-batch-size 1 --untie-embeddings-and-output-weights",
            "stages update alone, before the tokens of all ranks are counted; choose another schedule",
        ),
        (
            "--num-experts 4 --tensor-model-parallel-size 2 --disable-bias-linear",
            "above 1 need --sequence-parallel; a",
        ),
        ("--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel", "have no biases in megatron.core; add"),
        ("--num-experts 4 --elastic-pipeline", "layers with experts are not moved to another pipeline; leave it out"),
        (
            "--num-experts 4 --pipeline-model-parallel-size 4 --pipeline-schedule bpipe",
            "differ in size between microbatches, so they cannot leave the device; add",
        ),
    ],
)
def test_what_is_refused(flags, reason):
    with pytest.raises(ValueError) as refused:
        arguments(flags, world_size=4)
    assert reason in str(refused.value)
