"""Several stages on a rank, and stages of unequal size, train what one process trains on the same data.

The single-process run takes the same samples in the same order. Where only the cut differs, everything is bit-equal;
norms, tied embeddings, replicas and tensor ranks add up in another order (docs/design.md, "What equals what").
"""

from functools import cache, partial

import pytest
import torch

from tests.trainer.run.run_case import joined_weights, table, train

EXACT = "--untie-embeddings-and-output-weights --clip-grad 0"
CLIPPED = "--clip-grad 0.5"  # tied
DAMPED = "--adam-eps 1e-5"  # so that the noise of gradients that should be 0, as of the keys' bias, stays noise
V2 = "--num-virtual-stages-per-pipeline-rank 2"
P2, P4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
NAMES = ("lm_loss", "grad_norm", "learning_rate", "consumed_samples")


def values(results: list[dict]) -> dict[str, list[float]]:
    """By name, what each iteration reported."""
    records = [record for record in results[-1]["records"] if "lm_loss" in record]
    return {name: [record[name] for record in records] for name in NAMES}


@cache
def single(flags: str) -> tuple[dict, dict]:
    """What one process reports, and the weights that it ends with."""
    results = train(1, flags)
    return values(results), joined_weights(results)


def check(num_ranks: int, model: str, layout: str, *, exact: bool, case: str = "train_case", without: str = "") -> None:
    """`layout` (flags) on `num_ranks` ranks equals one process; exactly, or to rounding that six updates spread.

    `without`: what of the model's flags is for the single process alone.
    """
    model = model if exact else f"{model} {DAMPED}"
    expected, weights = single(model)
    results = train(num_ranks, f"{model.replace(without, '') if without else model} {layout}", case=case)
    found, found_weights = values(results), joined_weights(results)
    if "--untie" not in model:  # the last stage's copy of the embedding
        assert torch.equal(found_weights.pop("output_layer.weight"), found_weights["embedding.word_embeddings.weight"])
    assert len(found["lm_loss"]) == 6 and expected["lm_loss"][5] < expected["lm_loss"][0]
    assert found_weights.keys() == weights.keys()
    assert found["consumed_samples"] == expected["consumed_samples"]
    if exact:
        assert found["lm_loss"] == expected["lm_loss"]
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-12)  # squares added in another order
        different = [name for name, tensor in weights.items() if not torch.equal(found_weights[name], tensor)]
        assert not different
        return
    assert found["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-6)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(found_weights[name], tensor, rtol=0, atol=1e-5, msg=partial("{}: {}".format, name))


TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64"
UNDROPPED = "--hidden-dropout 0 --attention-dropout 0"
EIGHT, SIX = "--num-layers 8 --hidden-size 16", "--num-layers 6"
FULLY = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-activations"
TWO_BW = "--pipeline-schedule 2bw"
LAYOUT = "--pipeline-model-parallel-layout"
FIRST, LAST = (f"--decoder-{end}-pipeline-num-layers" for end in ("first", "last"))
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"

ROW = "num_ranks, model, layout"  # flags that the single process has too, flags of the layout
INTERLEAVED = {
    "p=2 v=2": (2, EXACT, f"{P2} {V2}"),
    "p=4 v=2": (4, f"{EXACT} {EIGHT}", f"{P4} {V2}"),
    "p=2 v=2 recompute instructions": (2, EXACT, f"{P2} {V2} --pipeline-recompute"),
    "groups of 4": (2, EXACT, f"{P2} {V2} --microbatch-group-size-per-virtual-pipeline-stage 4"),
    "p=2 v=4": (2, f"{EXACT} --num-layers 8", f"{P2} --num-layers-per-virtual-pipeline-stage 1"),
    "p=2 v=2 recompute full": (2, f"{EXACT} {FULLY}", f"{P2} {V2}"),
    "p=2 v=2 recompute selective": (2, f"{EXACT} {SELECTIVE}", f"{P2} {V2}"),
    "bf16 distributed optimizer": (2, f"{EXACT} --bf16", f"{P2} {V2} --use-distributed-optimizer"),
    "ramp-up": (2, f"{EXACT} --global-batch-size 8 --rampup-batch-size 4 2 24", f"{P2} {V2}"),
    "masks for every stage": (2, f"{EXACT} --reset-attention-mask", f"{P2} {V2}"),
}
CLOSE = {
    "p=2 v=2 d=2 distributed optimizer": (4, CLIPPED, f"{P2} {V2} --use-distributed-optimizer"),
    "p=2 v=2 t=2": (4, f"{CLIPPED} {UNDROPPED}", f"{P2} {V2} {TENSOR}"),
    "p=2 v=2 tied, clipped": (2, CLIPPED, f"{P2} {V2}"),
    "p=4 v=2 selective": (4, f"{CLIPPED} {EIGHT} {SELECTIVE}", f"{P4} {V2}"),
    "p=2 v=2 t=2 d=2": (8, f"{CLIPPED} {UNDROPPED}", f"{P2} {V2} {TENSOR} --use-distributed-optimizer"),
    "ends of their own, tied": (4, CLIPPED, f"{P4} {LAYOUT} E|ttt|t|L"),
    "2bw, 5 layers on 3 stages, tied": (3, f"{CLIPPED} {TWO_BW} --num-layers 5", ""),
    "2bw with ends of their own, tied": (4, f"{CLIPPED} {TWO_BW}", f"{P4} {LAYOUT} E|ttt|t|L"),
}
UNEVEN = {
    "2bw, 5 layers on 3 stages": (3, f"{EXACT} --num-layers 5 {TWO_BW}", ""),
    "interleaved, 6 layers on 4 stages": (2, f"{EXACT} {SIX}", V2),
    "zbv, 5 layers on 4 stages": (2, f"{EXACT} --num-layers 5", "--pipeline-schedule zbv"),
    "l2l, 5 layers on 4 stages": (2, f"{EXACT} --num-layers 5", "--pipeline-schedule l2l"),
    "bpipe, 7 layers on 4 stages": (4, f"{EXACT} --num-layers 7 --hidden-size 16", "--pipeline-schedule bpipe"),
    "2bw": (2, f"{EXACT} {TWO_BW}", f"{LAYOUT} Et|tttL"),
    "interleaved with an empty stage": (2, EXACT, f"{LAYOUT} Et|tt||tL"),
    "gpipe": (2, f"{EXACT} --pipeline-schedule gpipe", f"{LAYOUT} Et|tttL"),
    "flush, first": (2, EXACT, f"{FIRST} 1"),
    "2bw, last": (2, f"{EXACT} {TWO_BW}", f"{LAST} 1"),
    "interleaved, first": (2, f"{EXACT} {SIX}", f"{FIRST} 2 {V2}"),
    "interleaved, last": (2, f"{EXACT} {SIX}", f"{LAST} 2 {V2}"),
    "flush, ends of their own": (4, EXACT, f"{LAYOUT} E|ttt|t|L"),
    "embedding counts": (2, f"{EXACT} --num-layers 3", EMBEDDING),
    "2bw, embedding and loss count": (4, f"{EXACT} --num-layers 2 {TWO_BW}", f"{EMBEDDING} {LOSS}"),
    "interleaved, embedding and loss count": (2, f"{EXACT} {SIX}", f"{EMBEDDING} {LOSS} {V2}"),
}


@table(ROW, INTERLEAVED, usual=1)
def test_interleaved_equals_one_process(num_ranks, model, layout):
    """With dropout, untied and unclipped: losses and weights are bit-equal."""
    check(num_ranks, model, layout, exact=True)


@pytest.mark.full
@table(ROW, CLOSE, usual=1)
def test_interleaved_agrees_with_one_process(num_ranks, model, layout):
    """Tied embeddings, clipping, replicas and tensor ranks: equal to rounding."""
    check(num_ranks, model, layout, exact=False)


@table(ROW, UNEVEN, usual=1)
def test_uneven_stages_equal_one_process(num_ranks, model, layout):
    """However the layers are cut, losses and weights are bit-equal; 2bw against 2bw in one process."""
    check(num_ranks, model, layout, exact=True)
