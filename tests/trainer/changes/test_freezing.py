"""Runs that freeze layers while they train equal one process of plain torch that does: norms by layer, decisions,
losses, weights, moments and counters of steps.
"""

import functools
from dataclasses import dataclass

import pytest

from tests import workers
from tests.trainer.arguments import bert_command_line
from tests.trainer.changes.freezing_cases import (
    CLOSE,
    EXACT,
    FREEZES,
    SPREAD,
    Deviation,
    assert_same,
    reference,
    train_watched,
)
from tests.trainer.run.run_case import train

P124 = ((1, 1, 1), (2, 1, 1), (4, 1, 1))
DATA_2, TENSOR_2 = ((2, 1, 2), (1, 1, 2)), ((2, 2, 1), (1, 2, 1))
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"  # tensor ranks draw masks of their own
VOCABULARY = "--make-vocab-size-divisible-by 64"
FP16 = (
    "--fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 1048576 --loss-scale-window 3 --hysteresis 1"
    " --lr 1e-4"
)
"""Overflows at first and, with the doubled scale, later: little is learned, so gradients stay as large."""


THAWS = "--eval-iters 1 --eval-interval 2 --freeze-watch-validation -0.99"
"""No loss is nearly all gone, so freezing ends with the first evaluation with frozen layers, behind batch 4."""


@dataclass(frozen=True)
class Row:
    """One line of the table: flags, layouts (p, t, d), what may differ; `layout_flags`: not the reference's."""

    flags: str = ""
    layouts: tuple[tuple[int, int, int], ...] = P124
    allowed: Deviation = EXACT
    layout_flags: str = ""


TABLE = {
    "flush": Row("--freeze-alpha 0.4"),
    "2bw, bf16": Row("--pipeline-schedule 2bw --bf16 --freeze-schedule 1,2,3"),
    "gpipe": Row("--pipeline-schedule gpipe --freeze-schedule 0,2,3", allowed=CLOSE),
    "SGD": Row("--optimizer sgd --lr 1e-1 --freeze-schedule 1,3"),
    "fp16": Row(f"{FP16} --freeze-schedule 1,2,3"),
    "2bw, fp16": Row(f"--pipeline-schedule 2bw {FP16} --freeze-schedule 1,2,3"),
    "clipped": Row("--clip-grad 0.3 --freeze-alpha 0.4", allowed=CLOSE),
    "replicas": Row("--pipeline-schedule 2bw --freeze-alpha 0.4", DATA_2, CLOSE),
    "distributed optimizer": Row(
        "--clip-grad 0.3 --freeze-alpha 0.4", DATA_2, CLOSE, layout_flags="--use-distributed-optimizer"
    ),
    "distributed optimizer, 2bw, bf16": Row(
        "--pipeline-schedule 2bw --bf16 --freeze-schedule 1,2,3", DATA_2, CLOSE, "--use-distributed-optimizer"
    ),
    "tensor parallel": Row(f"{NO_DROPOUT} {VOCABULARY} --freeze-schedule 1,2,3", TENSOR_2, SPREAD),
    "sequence parallel": Row(
        f"--pipeline-schedule 2bw {NO_DROPOUT} {VOCABULARY} --freeze-alpha 0.4", TENSOR_2, SPREAD, "--sequence-parallel"
    ),
    "full recompute": Row(
        "--freeze-alpha 0.4", ((1, 1, 1), (2, 1, 1)), layout_flags="--recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "selective recompute": Row(
        "--freeze-schedule 1,2,3", ((2, 1, 1),), layout_flags="--recompute-granularity selective"
    ),
    "recompute instructions": Row(
        "--pipeline-schedule 2bw --freeze-schedule 1,2,3", layout_flags="--pipeline-recompute"
    ),
    "one gradient buffer": Row(
        "--pipeline-schedule 2bw --2bw-single-gradient-buffer --clip-grad 0.3 --freeze-schedule 1,2,3", allowed=CLOSE
    ),
    "ramp-up": Row("--global-batch-size 8 --rampup-batch-size 4 2 24 --freeze-alpha 0.4 --pipeline-schedule 2bw"),
    "a later start": Row("--freeze-start 1 --freeze-interval 3 --freeze-schedule 2,3"),
    "thawed": Row(f"{THAWS} --freeze-schedule 1,3"),
    "thawed, 2bw, bf16": Row(f"{THAWS} --pipeline-schedule 2bw --bf16 --freeze-schedule 2,3"),
    "thawed, 2bw, SGD": Row(f"{THAWS} --pipeline-schedule 2bw --optimizer sgd --lr 1e-1 --freeze-schedule 3"),
    "thawed, distributed optimizer, 2bw, bf16": Row(
        f"{THAWS} --pipeline-schedule 2bw --bf16 --freeze-schedule 2,3", DATA_2, CLOSE, "--use-distributed-optimizer"
    ),
    "uneven": Row(
        "--freeze-schedule 1,2,3", ((2, 1, 1),), layout_flags="--decoder-first-pipeline-num-layers 1"
    ),
}  # fmt: skip
DEFAULT = {("thawed, 2bw, bf16", (2, 1, 1))}


@functools.cache
def expected(flags: str, replicas: int) -> dict:
    return reference(flags, replicas=replicas)


def _rows() -> list:
    return [
        pytest.param(name, layout, marks=() if (name, layout) in DEFAULT else pytest.mark.full)
        for name, row in TABLE.items()
        for layout in row.layouts
    ]


@pytest.mark.parametrize(("name", "layout"), _rows(), ids=str)
def test_freezing_equals_plain_torch(name, layout):
    row, (p, t, d) = TABLE[name], layout
    flags = f"{row.flags} {row.layout_flags} --pipeline-model-parallel-size {p} --tensor-model-parallel-size {t}"
    results = train_watched(p * t * d, flags)
    assert_same(results, expected(row.flags, d), row.allowed)
    frozen = [batch["num_frozen"] for batch in results[0]["watched"]["batches"]]
    assert len(set(frozen)) > 1, "nothing was frozen"
    assert THAWS not in flags or (frozen[3] > 0 and frozen[4:] == [0, 0, 0])


@pytest.mark.parametrize("name", ["fp16", "2bw, fp16"])
@pytest.mark.full
def test_the_case_with_loss_scales_overflows(name):
    """Before and behind a change."""
    overflows = [batch["overflow"] for batch in expected(TABLE[name].flags, 1)["batches"]]
    assert any(overflows[:2]) and any(overflows[2:]) and not all(overflows)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_bert(schedule, ranks):
    base = (
        f"{bert_command_line.SMALL_BERT} --num-workers 0 --log-interval 1 --eval-iters 0 --hidden-size 32"
        " --lr-decay-style constant --lr 1e-2"
    )
    options = {"program": "pretrain_bert", "base": base}
    flags = f"--pipeline-schedule {schedule} --freeze-schedule 1,2,3"
    found = train_watched(ranks, f"{flags} {bert_command_line.data_flags()}", **options)
    assert_same(found, reference(flags, data=bert_command_line.data_flags(), **options), EXACT)


def _validations(results: list[dict]) -> dict[int, float]:
    return {each["iteration"]: each["validation_loss"] for each in results[-1]["records"] if "validation_loss" in each}


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["2bw", "flush"])
def test_evaluations_use_what_is_frozen(schedule):
    """Validation losses behind changes, and between two of them, are plain torch's."""
    flags = f"--pipeline-schedule {schedule} --freeze-schedule 1,3 --eval-iters 1 --eval-interval 3"
    results = train_watched(2, flags)
    behind = {number: each["validation"] for number, each in enumerate(reference(flags)["batches"], 1)
              if "validation" in each}  # fmt: skip
    assert len(behind) == 2
    found = _validations(results)
    assert {number: found[number] for number in behind} == pytest.approx(behind, rel=1e-6)


assert "--freeze-interval 2" in FREEZES


def test_a_rank_without_layers_is_refused():
    """What is frozen is cut by layers, so the embedding or the loss alone is no place of a pipeline that changes."""
    flags = f"{FREEZES} --num-layers 3 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|L"
    with pytest.raises(workers.WorkerError, match="the ranks of the pipeline have 3, 0 layers, and where"):
        train(2, flags)
