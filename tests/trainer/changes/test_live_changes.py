"""Runs that train, and change their pipeline meanwhile: everything that they have is the same behind each change."""

import pytest
import torch

from tests.trainer.changes.whole_model import joined
from tests.trainer.run.run_case import BASE, train

FULL = pytest.mark.full
WATCH = "tests.trainer.changes.live_changes:states"
FREEZES = (
    f"{BASE} --global-batch-size 8 --train-iters 7 --untie-embeddings-and-output-weights "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --lr 1e-3 --freeze-training --freeze-interval 2 --elastic-pipeline "
    "--elastic-schedule 4,2,1"
)
TWO_BW, DISTRIBUTED = "--pipeline-schedule 2bw", "--use-distributed-optimizer"
FP16 = "--fp16 --initial-loss-scale 1024 --loss-scale-window 3"


@pytest.mark.parametrize(
    "flags",
    [
        f"{TWO_BW} {DISTRIBUTED} --bf16",
        pytest.param(f"{TWO_BW} {FP16}", marks=FULL),
        pytest.param(f"{FP16} {DISTRIBUTED}", marks=FULL),
    ],
)
def test_nothing_else_changes(flags):
    """From four ranks of a pipeline to two and one, and from one frozen layer, which is a rank's only one, to three."""
    check(4, f"{FREEZES} --num-layers 4 --freeze-schedule 1,2,3 {flags}", [(1, 4), (2, 2), (3, 1)])


@pytest.mark.full
@pytest.mark.eight_ranks
@pytest.mark.parametrize("flags", [f"{TWO_BW} {DISTRIBUTED} --bf16", f"{TWO_BW} {FP16}", f"{FP16} {DISTRIBUTED}"])
def test_nothing_else_changes_on_eight_ranks(flags):
    """p goes 8, 4, 2, 1."""
    check(8, f"{FREEZES} --num-layers 8 --freeze-schedule 2,4,6 {flags}", [(2, 4), (4, 2), (6, 1)])


def check(num_ranks: int, flags: str, expected: list[tuple[int, int]]) -> None:
    """Weights, and of layers that are not frozen both versions, masters, moments and step counters; on each rank loss
    scales, learning rate and all generators: bit for bit. What is gone is of layers that have been frozen."""
    results = train(num_ranks, flags, watch=WATCH)
    behind = 0
    for changes in zip(*(each["watched"] for each in results), strict=True):
        num_frozen, pipeline = changes[0]["num_frozen"], changes[0]["pipeline"]
        assert (num_frozen, pipeline) == expected[behind]
        before, after = joined([each["before"] for each in changes]), joined([each["after"] for each in changes])
        assert not [key for key, value in after.items() if not torch.equal(value, before[key])]
        gone, kinds = before.keys() - after.keys(), {kind for kind, *_ in after}
        frozen = range(1 + (expected[behind - 1][0] if behind else 0), num_frozen + 1)
        layers = {layer_of(name) for _, name, _ in gone}
        assert layers - {0} == set(frozen) and (0 in layers) == (behind == 0)
        assert {kind for kind, *_ in gone} == kinds - {"weight"} >= {"exp_avg", "exp_avg_sq", "step", "param"}
        assert len([kind for kind in kinds if kind.startswith("version")]) == (2 if "2bw" in flags else 1)
        for each in changes:
            (_, common, generators), (_, common_after, generators_after) = each["before"], each["after"]
            assert common == changes[0]["before"][1] == common_after and generators == generators_after
        behind += 1
    assert behind == len(expected)


def layer_of(name: str) -> int:
    """The layer of a parameter; 0: an embedding's."""
    words = name.split(".")
    return int(words[2]) if words[1] == "layers" else {"embedding": 0}[words[0]]
