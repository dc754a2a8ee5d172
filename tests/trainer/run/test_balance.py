"""BPipe through the training door: a balanced run computes bit for bit what the same run computes without balancing.

The cases are data: what to train, on p x t x d ranks. A case joins the table in one line.
"""

import functools
import math

import pytest

torch = pytest.importorskip("torch")

from tests.trainer.run.run_case import train

SELECTIVE = "--recompute-granularity selective"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TWO_BW = "--pipeline-schedule 2bw"
INTERLEAVED = "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2 --num-layers 8"
TENSOR = "--tensor-model-parallel-size 2"
SEQUENCE = f"{TENSOR} --sequence-parallel"
VIRTUAL = "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2"
UNTIED = "--untie-embeddings-and-output-weights"

SCOPES = {"none": "", "attention": SELECTIVE, "layer": FULL, "program": "--pipeline-recompute"}
QUICK = ("p=4 2bw attention",)
# name: (pipeline ranks, tensor x data ranks, flags). Dropout is on and embeddings are tied by default.
CASES = {
    "p=4 2bw attention": (4, 1, f"{TWO_BW} {SELECTIVE}"),
    "p=4 interleaved bf16": (4, 1, f"{INTERLEAVED} --bf16"),
    "p=4 bf16": (4, 1, "--bf16"),
    "p=4 interleaved": (4, 1, INTERLEAVED),
    "p=4 d=2 attention": (4, 2, SELECTIVE),
    "p=8": (8, 1, ""),
    "p=4 t=2 sequence parallel, layer": (4, 2, f"{SEQUENCE} {FULL}"),
    **{f"p={p} {scope}": (p, 1, flags) for p in (4, 8) for scope, flags in SCOPES.items() if (p, scope) != (8, "none")},
    **{f"p={p} 2bw {scope}": (p, 1, f"{TWO_BW} {flags}") for p in (4, 8) for scope, flags in SCOPES.items()
       if (p, scope) != (4, "attention")},
    **{f"t=2 {scope}": (4, 2, f"{TENSOR} {flags}") for scope, flags in SCOPES.items()},
    **{f"t=2 sequence parallel, bf16 {scope}": (4, 2, f"{SEQUENCE} --bf16 {flags}") for scope, flags in SCOPES.items()},
    **{f"d=2 {scope}": (4, 2, flags) for scope, flags in SCOPES.items() if scope != "attention"},
    **{f"p=4 interleaved {scope}": (4, 1, f"{INTERLEAVED} {flags}") for scope, flags in SCOPES.items() if flags},
    "p=8 interleaved bf16": (8, 1, f"{INTERLEAVED} --bf16 --num-layers 16"),
    "t=2 interleaved": (4, 2, f"{INTERLEAVED} {SEQUENCE}"),
    "uneven": (4, 1, "--num-layers 8 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"),
    "uneven 2bw": (4, 1, f"{TWO_BW} --num-layers 9 --decoder-first-pipeline-num-layers 3"),
    "d=2 2bw distributed optimizer": (4, 2, f"{TWO_BW} --use-distributed-optimizer"),
    "t=2 2bw bf16": (4, 2, f"{TWO_BW} {SEQUENCE} --bf16"),
    "untied, no dropout": (4, 1, f"{UNTIED} --hidden-dropout 0 --attention-dropout 0"),
    "fp16": (4, 1, "--fp16 --initial-loss-scale 65536"),
    "llama": (4, 1, "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
                    f"{UNTIED} --group-query-attention --num-query-groups 2"),
    "ramp-up": (4, 1, "--rampup-batch-size 2 2 12 --train-iters 8"),
    "extra warm-up": (4, 1, "--pipeline-extra-warmup"),
    "extra warm-up 2bw": (4, 1, f"{TWO_BW} --pipeline-extra-warmup"),
    "2bw single gradient buffer": (4, 1, f"{TWO_BW} --2bw-single-gradient-buffer"),
    "evaluations between": (4, 1, f"{TWO_BW} --eval-iters 2 --eval-interval 1"),
    "p=4 v=2": (4, 1, VIRTUAL),  # the same schedule as interleaved, by default
    "p=4 v=2 d=2": (4, 2, f"{VIRTUAL} --use-distributed-optimizer"),
    "p=4 v=2 t=2": (4, 2, f"{VIRTUAL} {SEQUENCE}"),
    "p=4 v=2 with an empty stage": (4, 1, "--num-layers 8 --pipeline-model-parallel-layout Et|t|tt|t||t|t|tL"),
    "p=4 uneven": (4, 1, "--num-layers 6 --pipeline-model-parallel-layout Ett|t|tt|tL"),
    "p=4 2bw uneven": (4, 1, f"{TWO_BW} --num-layers 6 --decoder-first-pipeline-num-layers 3"),
    "masks": (4, 1, "--reset-attention-mask --reset-position-ids --eod-mask-loss"),
}  # fmt: skip


@functools.cache
def run(name: str, balance: bool) -> list[dict]:
    """Results by rank of a case, moved and unmoved; both count bytes. Tests of one case share them."""
    stages, replicas, flags = CASES[name]
    data = 1 if "--tensor" in flags else replicas
    size = f"--num-layers {stages} --pipeline-model-parallel-size {stages} --global-batch-size {2 * stages * data}"
    how = "--balance-activations" if balance else "--log-saved-activations"
    return train(stages * replicas, f"{size} --train-iters 3 {flags} {how}", timeout=300)


def marked(names) -> list:
    """Parameters: all but the quick ones are for the full selection, and those on 8 ranks come last."""
    parameters = []
    for name in names:
        marks = [] if name in QUICK else [pytest.mark.full]
        marks += [pytest.mark.eight_ranks] if CASES[name][0] * CASES[name][1] == 8 else []
        parameters.append(pytest.param(name, marks=marks))
    return parameters


@pytest.mark.parametrize("name", marked(CASES))
def test_a_balanced_run_has_the_same_bits(name):
    """Losses, norms, every rank's gradients of every batch and its weights are equal. Each stage that evicts did move
    something, but for a first stage whose whole forward is recomputed: it has no input that it could keep."""
    kept, moved = run(name, False), run(name, True)
    one, other = kept[-1]["records"], moved[-1]["records"]
    values = ("lm_loss", "grad_norm", "validation_loss", "loss_scale", "learning_rate")
    assert len(one) >= 3 and [[record.get(value) for value in values] for record in one] == [
        [record.get(value) for value in values] for record in other
    ]
    for before, after in zip(kept, moved, strict=True):
        assert before["gradients"] == after["gradients"]
        assert len(set(before["gradients"])) == kept[-1]["iteration"]
        assert before["weights"].keys() == after["weights"].keys() and len(before["weights"]) > 5
        assert all(torch.equal(weight, after["weights"][each]) for each, weight in before["weights"].items())
    num_stages = CASES[name][0]
    kept_bytes, moved_bytes = ([any(result["moved_bytes"].values()) for result in results] for results in (kept, moved))
    width = len(moved) // num_stages
    first = 1 if "program" in name else 0
    if "extra" in name:
        assert any(moved_bytes)
    else:
        assert moved_bytes == [first <= rank // width < (num_stages - 2) / 2 for rank in range(len(moved))]
    assert not any(kept_bytes)


@pytest.mark.parametrize("name", marked(["p=4 bf16", "p=8", "p=4 2bw attention", "p=8 2bw layer", "t=2 none"]))
def test_no_stage_holds_more_than_its_share(name):
    """Counted bytes of the metrics file: without balancing stage s holds p-s microbatches, with it the largest stage
    ceil((p+2)/2), each of at most the bytes of the largest microbatch."""
    num_stages = CASES[name][0]
    before, after = (run(name, balance)[-1]["records"][-1]["saved_activation_bytes"] for balance in (False, True))
    microbatch = [peak / (num_stages - stage) for stage, peak in enumerate(before)]
    assert all(each == int(each) > 0 for each in microbatch)
    assert microbatch[1:-1] == [microbatch[1]] * (num_stages - 2)
    moved = max(size or 0 for result in run(name, True) for size in result["moved_bytes"].values())
    assert max(microbatch[:-1]) <= moved < 1.1 * max(microbatch[:-1]), "a buffer is its bytes and some alignment"
    bound = math.ceil((num_stages + 2) / 2)
    assert max(after) <= bound * max(moved, *microbatch)
    assert max(max(result["saved_microbatches"].values()) for result in run(name, True)) == bound
    assert after[0] < before[0]


@pytest.mark.full
def test_nothing_to_move_is_said_and_trained():
    """Two stages keep within their bound: the run goes on as it would, and counts nothing."""
    plain, balanced = (train(2, f"--train-iters 2 {flags}") for flags in ("", "--pipeline-schedule bpipe"))
    assert plain[-1]["losses"] == balanced[-1]["losses"]
    assert "saved_activation_bytes" not in balanced[-1]["records"][-1]


@pytest.mark.full
@pytest.mark.eight_ranks
@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_nothing_grows_in_two_hundred_iterations(schedule):
    """p=8: from iteration 100 to 200 no rank gains a thread or an open file, nor half a MiB of memory (a microbatch of
    a stage is 50 KiB). Before, the allocator still settles, as it does in a run that moves nothing."""
    flags = f"--num-layers 8 --global-batch-size 8 --pipeline-schedule {schedule} --balance-activations"
    flags += " --train-iters 200 --log-interval 50"
    for result in train(8, flags, timeout=500, look_after=(100, 200)):
        early, late = result["resources"]
        assert (early["threads"], early["files"]) == (late["threads"], late["files"]), (early, late)
        assert late["bytes"] - early["bytes"] < 2**19, (early, late)
