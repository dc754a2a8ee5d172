"""Runs that change their degrees in flight: everything that they have arrives bit for bit, and what can go wrong."""

import pytest
import torch

from tests import workers
from tests.trainer.changes.whole_model import joined
from tests.trainer.run.run_case import data_flags

CASES = "tests.trainer.changes.cases:"
DISTRIBUTED = "--use-distributed-optimizer"
FP16 = "--fp16 --initial-loss-scale 1024"
TWO_BW = "--pipeline-schedule 2bw"
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.mark.full
@pytest.mark.parametrize(
    ("stages", "flags"),
    [
        pytest.param((4, 2, 1), f"{TWO_BW} {DISTRIBUTED} --bf16 --swiglu", id="2bw bf16 distributed gated"),
        pytest.param((4, 2, 1), f"{TWO_BW} {FP16}", id="2bw fp16"),
        pytest.param((2, 1), f"{DISTRIBUTED} --tensor-model-parallel-size 2 --swiglu", id="t=2 distributed"),
        pytest.param((4, 2, 1), f"{UNTIED} --hidden-size 20 --num-attention-heads 2", id="fp32 untied"),
        pytest.param((4, 2, 1), f"{TWO_BW} {DISTRIBUTED} {UNTIED}", id="2bw distributed untied"),
        pytest.param((4, 2, 1), f"{TWO_BW} {FP16} {DISTRIBUTED}", id="2bw fp16 distributed"),
        pytest.param((4, 2, 1), f"{TWO_BW} --fp16 --initial-loss-scale 16384 --hysteresis 1", id="overflow"),
        pytest.param((4, 2, 1), "--optimizer sgd", id="sgd"),
        pytest.param((4, 2, 1), "--optimizer lamb", id="lamb"),
        pytest.param((2, 1), f"--tensor-model-parallel-size 2 --bf16 {TWO_BW}", id="t=2 2bw bf16"),
        pytest.param((2, 1), f"--tensor-model-parallel-size 2 {FP16} {DISTRIBUTED} {UNTIED}", id="t=2 fp16"),
    ],
)
def test_everything_arrives(stages, flags):
    """All live versions of the weights, masters, moments, step counters, groups, loss scales, schedule and generators,
    after each change; what was held is untouched, and the moved bytes agree on both sides."""
    check(4, stages, flags)


@pytest.mark.full
@pytest.mark.eight_ranks
@pytest.mark.parametrize("optimizer", ["", DISTRIBUTED], ids=["plain", "distributed"])
@pytest.mark.parametrize("precision", ["", "--bf16", FP16], ids=["fp32", "bf16", "fp16"])
def test_everything_arrives_on_eight_ranks(precision, optimizer):
    """p goes 8, 4, 2, 1 under 2bw."""
    check(8, (8, 4, 2, 1), f"{TWO_BW} --num-layers 8 {precision} {optimizer}")


def check(num_ranks, stages, flags):
    flags = f"{flags} {data_flags()}"
    results = workers.run(num_ranks, CASES + "change_degrees", flags=flags, stages=stages)
    for changes in zip(*results, strict=True):
        before, after = joined([one for one, _, _ in changes]), joined([other for _, other, _ in changes])
        assert before.keys() == after.keys()
        differing = [key for key in before if not torch.equal(before[key], after[key])]
        assert not differing
        if "2bw" in flags:
            assert len({kind for kind, *_ in before if kind.startswith("version")}) == 2
        for (_, common, generators), (_, common_after, generators_after), _ in changes:
            assert common == changes[0][0][1] == common_after and generators == generators_after
        moved = [each for *_, each in changes]
        assert sum(each["bytes_sent"] for each in moved) == sum(each["bytes_received"] for each in moved) > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("num_ranks", "stages", "frozen", "flags"),
    [
        pytest.param(2, (2, 1), (1, 2), f"--bf16 {DISTRIBUTED}", id="part of a rank, then all of it"),
        pytest.param(2, (2, 1), (2, 2), "--bf16", id="a rank without parameters"),
        pytest.param(4, (4, 2), (2, 3), "", id="deeper, fp32"),
        pytest.param(4, (4, 2), (2, 3), f"{DISTRIBUTED} --swiglu", id="deeper, distributed"),
        pytest.param(4, (4, 2), (2, 3), f"--bf16 {DISTRIBUTED}", id="deeper, bf16 distributed"),
        pytest.param(4, (4, 4), (0, 1), "--bf16", id="freezing alone"),
    ],
)
def test_layers_freeze(num_ranks, stages, frozen, flags):
    """Frozen layers keep their weights and have no optimizer state; the others keep theirs as they freeze deeper."""
    flags = f"{UNTIED} {flags} {data_flags()}"
    results = workers.run(num_ranks, CASES + "freeze_deeper", flags=flags, stages=stages, frozen=frozen)
    weights = {name: value for (_, found), _ in results for name, value in found.items()}
    for _, (_, found) in results:
        assert all(torch.equal(value, weights[name]) for name, value in found.items())
    before, after = joined([one for (one, _), _ in results]), joined([other for _, (other, _) in results])
    gone = {key for key in before if key not in after}
    assert all(torch.equal(value, before[key]) for key, value in after.items())
    names = {name for _, name, _ in gone}
    assert bool(names) == (frozen[0] < frozen[1])
    assert all(name.startswith((f"decoder.layers.{frozen[1]}.", "embedding.")) for name in names)
