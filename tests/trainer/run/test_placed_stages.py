"""Wherever a schedule puts its stages, they train what one process trains on the same data.

The schedules are those of tests/pipeline/placed_schedules.py. Losses and weights are those of one process, and
checkpoints those of every other cut.
"""

import re

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.trainer.checkpoint.test_stages import check_cut, saved  # noqa: F401  a fixture
from tests.trainer.run import run_case
from tests.trainer.run.run_case import joined_weights, table
from tests.trainer.run.test_bert import bert_alone, numbers, train_bert
from tests.trainer.run.test_virtual_stages import (
    CLIPPED,
    EIGHT,
    EMBEDDING,
    EXACT,
    FIRST,
    FULLY,
    LAYOUT,
    LOSS,
    P2,
    P4,
    ROW,
    TENSOR,
    TWO_BW,
    UNDROPPED,
    V2,
    check,
    values,
)

SHARDED = "--use-distributed-optimizer"
V, LOPSIDED, TWO_BW_V = (f"{P2} {V2} --pipeline-schedule {name}" for name in ("v", "lopsided", "2bw-v"))
SHUFFLED, REVERSED, TWO_BW_REVERSED = (
    f"{P4} --pipeline-schedule {name}" for name in ("shuffled", "reversed", "2bw-reversed")
)
V3 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3 --pipeline-schedule v"


def train(num_ranks: int, flags: str, **options) -> list[dict]:
    return run_case.train(num_ranks, flags, case="placed_case", **options)


BIT_EQUAL = {
    "v": (2, EXACT, V),
    "2bw, shuffled": (4, f"{EXACT} {TWO_BW}", TWO_BW_REVERSED),
    "numbers of stages that differ": (2, EXACT, LOPSIDED),
    "v, a layout with an empty stage": (2, EXACT, f"{V.replace(V2, '')} {LAYOUT} Et|ttt||L"),
    "one stage a rank, shuffled": (4, EXACT, SHUFFLED),
    "v, recompute": (2, EXACT, f"{V} --pipeline-recompute"),
    "v, three turns": (2, f"{EXACT} --num-layers 6", V3),
    "v of 4 ranks": (4, f"{EXACT} {EIGHT}", V.replace(P2, P4)),
    "v, full recompute": (2, f"{EXACT} {FULLY}", V),
    "v, bf16": (2, f"{EXACT} --bf16", f"{V} {SHARDED}"),
    "v, 2bw": (2, f"{EXACT} {TWO_BW}", TWO_BW_V),
    "v, the first stage": (2, f"{EXACT} --num-layers 5", f"{V} {FIRST} 2"),
    "v, embedding and loss count": (2, f"{EXACT} --num-layers 6", f"{V} {EMBEDDING} {LOSS}"),
    "shuffled, the first stage": (4, f"{EXACT} --num-layers 5", f"{SHUFFLED} {FIRST} 2"),
    "v, masks for every stage": (2, f"{EXACT} --reset-attention-mask", V),
    "v, ramp-up": (2, f"{EXACT} --global-batch-size 8 --rampup-batch-size 4 2 24", V),
}
CLOSE = {
    "2bw, v, one gradient buffer, d=2": (4, f"{CLIPPED} {TWO_BW}", f"{TWO_BW_V} {SHARDED}"),
    "v, d=2 distributed optimizer": (4, CLIPPED, f"{V} {SHARDED}"),
    "one stage a rank, reversed": (4, CLIPPED, REVERSED),
    "v, t=2": (4, f"{CLIPPED} {UNDROPPED}", f"{V} {TENSOR}"),
    "v, t=2 d=2": (8, f"{CLIPPED} {UNDROPPED}", f"{V} {TENSOR} {SHARDED}"),
    "v of 4 ranks": (4, f"{CLIPPED} {EIGHT}", V.replace(P2, P4)),
    "numbers of stages that differ": (2, CLIPPED, LOPSIDED),
    "one stage a rank, shuffled, d=2": (8, CLIPPED, f"{SHUFFLED} {SHARDED}"),
    "2bw, reversed": (4, f"{CLIPPED} {TWO_BW}", TWO_BW_REVERSED),
}


@table(ROW, BIT_EQUAL, usual=1)
def test_placed_stages_equal_one_process(num_ranks, model, layout):
    """With dropout, untied and unclipped: losses and weights are bit-equal."""
    check(num_ranks, model, layout, exact=True, case="placed_case")


@table(ROW, CLOSE, usual=0)
def test_placed_stages_agree_with_one_process(num_ranks, model, layout):
    """Tied embeddings, clipping, replicas and tensor ranks: equal to rounding. The tied copies stay equal, whether two
    ranks hold them, or one."""
    check(num_ranks, model, layout, exact=False, case="placed_case")


@pytest.mark.full
@pytest.mark.parametrize("more", ["--fp16 --initial-loss-scale 65536", "--bf16"])
def test_half_precision_in_a_v(more):
    """Tied copies on one rank are equal bit for bit, too, and the loss scale is that of one process."""
    [one], two = train(1, f"{CLIPPED} {more}"), train(2, f"{CLIPPED} {more} {V} {SHARDED}")
    weights = joined_weights(two)
    assert torch.equal(weights["output_layer.weight"], weights["embedding.word_embeddings.weight"])
    assert values(two)["lm_loss"] == pytest.approx(values([one])["lm_loss"], rel=2e-3)
    scales = [[record["loss_scale"] for record in each["records"]] for each in (one, two[-1])]
    assert scales[0] == scales[1]


@pytest.mark.full
def test_versions_belong_to_the_stage():
    """PipeDream keeps as many weight versions as the stage needs, and not its rank: as in the order of the ranks."""
    flags = f"{EXACT} --global-batch-size 1 --train-iters 12 {P4} --pipeline-schedule"
    in_order, shuffled = (train(4, f"{flags} {name}") for name in ("pipedream", "pipedream-shuffled"))
    assert values(in_order)["lm_loss"] == values(shuffled)["lm_loss"]
    one, other = joined_weights(in_order), joined_weights(shuffled)
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


@pytest.mark.full
@pytest.mark.parametrize("layout", [V, f"{P2} --pipeline-schedule reversed"])
def test_bert(layout):
    """BERT's stages, too, whose first one need not be on the first rank, and all of which read masks: bit-equal."""
    assert numbers(train_bert(2, layout, case="placed_case")) == numbers(bert_alone())


@pytest.mark.full
def test_what_a_run_says_and_draws(tmp_path):
    """Parameters by stage, evaluations, the timeline: those of the stages in their order."""
    flags = "--train-iters 5 --eval-iters 2 --eval-interval 2"
    in_order, v = train(4, f"{flags} {P4}"), train(2, f"{flags} {V} --pipeline-timeline {tmp_path}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["measured.json", "timeline.png", "trace.json"]
    said = [re.search(r"parameters per stage .*?;", "".join(each[-1]["lines"])) for each in (in_order, v)]
    assert said[0].group() == said[1].group()
    losses = [[each["validation_loss"] for each in run[-1]["records"] if "validation_loss" in each]
              for run in (in_order, v)]  # fmt: skip
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], rel=1e-6)


CUTS = {
    "v to v, d=2 distributed optimizer": (CLIPPED, 4, f"{V} {SHARDED}", 4, f"{V} {SHARDED}", True),
    "v to flush": (EXACT, 2, V, 4, P4, True),
    "shared reading": (f"{CLIPPED} --adam-eps 1e-5", 4, f"{V} {SHARDED}", 4, f"{V} --ckpt-fully-parallel-load", False),
    "flush to v": (EXACT, 4, P4, 2, V, True),
    "v, d=2 to one rank": (CLIPPED, 4, V, 1, "--pipeline-model-parallel-size 1", False),
    "v to shuffled": (EXACT, 2, V, 4, SHUFFLED, True),
    "v, distributed optimizer to lopsided": (f"{EXACT} --bf16", 2, f"{V} {SHARDED}", 2, LOPSIDED, True),
    "both versions, reversed to v": (EXACT, 4, TWO_BW_REVERSED, 2, TWO_BW_V, True),
    "fp16": (f"{CLIPPED} --fp16 --initial-loss-scale 1024", 4, f"{V} {SHARDED}", 4, f"{V} {SHARDED}", True),
}


@table("model, writers, source, readers, target, exact", CUTS, usual=0)
def test_checkpoints_load_wherever_the_stages_are(saved, model, writers, source, readers, target, exact):  # noqa: F811
    """A run that goes on from a checkpoint of another placement has the numbers of the run that went on."""
    check_cut(saved, model, writers, source, readers, target, exact=exact, case="placed_case")


@pytest.mark.parametrize(("model", "layout"), [(CLIPPED, f"{V} {SHARDED}"), (EXACT, V)])
@pytest.mark.full
def test_keys_are_those_of_one_process(saved, model, layout):  # noqa: F811
    """Tied or not, whoever holds the stages."""
    sharded = SHARDED if SHARDED in layout else ""
    keys = []
    for num_ranks, flags in ((1, f"--pipeline-model-parallel-size 1 {sharded}"), (2, layout)):
        folder, _ = saved(num_ranks, f"{model} {flags}", "placed_case")
        stored = FileSystemReader(f"{folder}/iter_0000003").read_metadata().state_dict_metadata
        keys.append({key for key in stored if not key.startswith("rng_state")})
    assert keys[0] == keys[1] and "decoder.layers.mlp.linear_fc1.weight" in keys[0]
