"""Provisional weights of megatron.core's chunks equal a plain loop of torch that takes the same provisional step."""

from dataclasses import replace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.pipeline.runtime.update.elementwise_step import DueStep
from tests import workers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.megatron.test_update import CLOSE, FP16, SPREAD, Row, check

REFERENCE = "tests.pipeline.runtime.stages.megatron.megatron_provisional_reference:reference"
STAGE = {"schedule": "2bw", "predict": True, "batches": (4,) * 6}
UNIFORM = STAGE | {"provisional_microbatches": 1}
FEEDBACK = STAGE | {"provisional_microbatches": 0}
FP16 = FP16 | {"predict": True, "batches": (2,) * 8}

TABLE = {
    "plain": Row(STAGE),
    "uniform": Row(UNIFORM | {"clip": 0.5}),
    "ramp-up, warm-up, clipped": Row(
        STAGE | {"batches": (4, 4, 5, 5, 6, 8, 8, 4), "clip": 0.5, "warmup": 24, "weight_decay": 0.1},
        layouts=((2, 1, 1), (4, 1, 1)),
    ),
    "m=2p": Row(STAGE | {"batches": (8,) * 8}, layouts=((4, 1, 1),)),
    "drained": Row(STAGE | {"drains": (0, 3, 4)}, layouts=((1, 1, 1), (2, 1, 1))),
    "uniform drained": Row(UNIFORM | {"drains": (0, 3, 4)}, layouts=((2, 1, 1),)),
    "SGD": Row(STAGE | {"optimizer": "sgd", "lr": 0.05}, layouts=((2, 1, 1),)),
    "SGD clipped": Row(STAGE | {"optimizer": "sgd", "lr": 0.05, "clip": 0.5}, layouts=((2, 1, 1),)),
    "tied": Row(STAGE | {"tied": True, "clip": 0.5}, layouts=((2, 1, 1), (4, 1, 1)), allowed=CLOSE),
    "tied uniform": Row(UNIFORM | {"tied": True}, allowed=CLOSE),
    "dropout, recompute": Row(STAGE | {"recompute": True, "dropout": 0.1}, layouts=((2, 1, 1),)),
    "full recompute": Row(STAGE | {"recompute_granularity": "full", "dropout": 0.1}, layouts=((2, 1, 1),)),
    "bf16": Row(STAGE | {"dtype": "bfloat16"}, layouts=((2, 1, 1),)),
    "data parallel": Row(STAGE | {"clip": 0.5}, layouts=((2, 1, 2),), allowed=CLOSE),
    "data parallel, reduced": Row(STAGE | {"clip": 0.5, "reduce_partial": True}, layouts=((2, 1, 2),), allowed=CLOSE),
    "distributed optimizer, reduced": Row(
        STAGE | {"clip": 0.5, "tied": True, "distributed_optimizer": True, "reduce_partial": True},
        layouts=((2, 1, 2),),
        allowed=CLOSE,
    ),
    "distributed optimizer, bf16": Row(
        STAGE | {"distributed_optimizer": True, "reduce_partial": True, "dtype": "bfloat16"},
        layouts=((1, 1, 2),),
        allowed=cases.Deviation(loss=1e-3, norm=1e-2, newest=4e-3, older=4e-3),
    ),
    "tensor parallel": Row(STAGE | {"clip": 0.5}, layouts=((2, 2, 1),), allowed=SPREAD),
    "sequence parallel, tied": Row(
        STAGE | {"clip": 0.5, "tied": True, "sequence_parallel": True}, layouts=((2, 2, 1),), allowed=SPREAD
    ),
    "balanced": Row(STAGE | {"balance": True}, layouts=((4, 1, 1),)),
    "uneven": Row(STAGE | {"first_layers": 1}, layouts=((2, 1, 1),)),
    "uniform, uneven": Row(UNIFORM | {"first_layers": 3}, layouts=((2, 1, 1),)),
    "BERT": Row(  # its clip factor lies at a rounding of the stage's norm
        STAGE | {"bert": True, "binary_head": False, "clip": 0.5}, layouts=((2, 1, 1),), allowed=CLOSE
    ),
    "extra warm-up": Row(UNIFORM | {"extra_warmup": True}, layouts=((2, 1, 1),)),
    "fp16, two overflows": Row(FP16 | {"overflow_batches": (2, 3), "clip": 0.25}, layouts=((2, 1, 1),)),
    "error feedback": Row(FEEDBACK | {"clip": 0.5, "weight_decay": 0.1, "warmup": 24, "tied": True}, allowed=CLOSE),
    "error feedback, drained": Row(FEEDBACK | {"drains": (0, 3, 4)}, layouts=((2, 1, 1),)),
    "error feedback, SGD": Row(
        FEEDBACK | {"optimizer": "sgd", "lr": 0.05, "clip": 0.5}, layouts=((2, 1, 2),), allowed=CLOSE
    ),
    "error feedback, distributed optimizer": Row(
        FEEDBACK | {"distributed_optimizer": True, "tied": True}, layouts=((2, 1, 2),), allowed=CLOSE
    ),
    "error feedback, tensor parallel": Row(FEEDBACK | {"clip": 0.5}, layouts=((2, 2, 1),), allowed=SPREAD),
    "error feedback, overflows": Row(
        FP16 | {"provisional_microbatches": 0, "overflow_batches": (2, 3), "clip": 0.25}, layouts=((2, 1, 1),)
    ),
    "error feedback, bf16, recompute": Row(
        FEEDBACK | {"dtype": "bfloat16", "recompute": True, "dropout": 0.1}, layouts=((2, 1, 1),)
    ),
    "fp16, an overflow and drains": Row(FP16 | {"overflow_batches": (3,), "drains": (3, 5)}, layouts=((2, 1, 1),)),
}


FULL = {  # others hold the same features
    "uniform": ((1, 1, 1), (2, 1, 1)), "tied": ((2, 1, 1), (4, 1, 1)),
    "ramp-up, warm-up, clipped": ((2, 1, 1),), "drained": ((1, 1, 1),),
} | dict.fromkeys((
    "plain", "tied uniform", "BERT",
    "m=2p", "uniform drained", "SGD", "full recompute", "distributed optimizer, bf16", "tensor parallel", "uneven",
    "error feedback, drained", "error feedback, SGD", "error feedback, distributed optimizer",
    "error feedback, tensor parallel", "error feedback, bf16, recompute",
    "data parallel, reduced", "fp16, an overflow and drains", "uniform, uneven", "extra warm-up",
))  # fmt: skip


def rows() -> list:
    """(name, layout) of the table."""
    found = []
    for name, row in TABLE.items():
        for layout in row.layouts:
            is_full = name in FULL and layout in (FULL[name] or row.layouts)
            found.append(pytest.param(name, layout, marks=pytest.mark.full if is_full else ()))
    return found


def run(case: cases.Case) -> list[dict]:
    return workers.run(case.num_ranks, f"{cases.__name__}:train", timeout=200, **vars(case))


def check_predictions(case: cases.Case, allowed: cases.Deviation) -> None:
    """A run with predicted weights, against the plain loop that predicts."""
    check((case, *expected_and_found(case)), allowed)


def expected_and_found(case: cases.Case) -> tuple[dict, list[dict]]:
    """What the plain loop finds, and the results of the ranks."""
    loop = replace(case, t=1, sequence_parallel=False, distributed_optimizer=False, recompute=False, drains=())
    [expected] = workers.run(1, REFERENCE, timeout=200, **vars(loop))
    results = run(case)
    if case.d > 1 and not case.reduce_partial and case.provisional_microbatches != 0:
        # each replica goes on with a prediction of its own
        results = [result | {"older": expected["older"]} for result in results]
    return expected, results


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "layout"), rows(), ids=str)
def test_training_equals_a_plain_loop(name, layout):
    """Losses, norms, the true weights, and the prediction with which the run would go on."""
    row, (p, t, d) = TABLE[name], layout
    case = cases.Case(**row.options, p=p, t=t, d=d)
    expected, results = expected_and_found(case)
    check((case, expected, results), row.allowed)
    for result in results:
        assert result["num_weight_slots"] == result["peak_versions"] == 2


def steps_in_predictions(**options) -> tuple[int, int]:
    """Train a case on this rank: the number of steps that predictions took, by parameter, and of those parameters."""
    calls, begin = [], DueStep.begin
    with mock.patch.object(DueStep, "begin", lambda self: (calls.append(self), begin(self))[1]):
        cases.train(**options)
    return len(calls), len({id(each.operands.parameter) for each in calls})


@pytest.mark.parametrize(
    "options",
    [
        STAGE | {"clip": 0.5, "p": 2},
        UNIFORM | {"dtype": "bfloat16", "p": 2},
        STAGE | {"distributed_optimizer": True, "dtype": "bfloat16", "p": 1, "d": 2},
        FP16 | {"overflow_batches": (4,), "p": 2},
    ],
    ids=["clipped", "bf16", "distributed optimizer", "an overflow"],
)
def test_predictions_take_the_steps_before_them(options):
    """All but the first, which makes the moments, one that is skipped, and the last, which no prediction follows."""
    case = cases.Case(**options)
    name = f"{__name__}:{steps_in_predictions.__name__}"
    skipped = len(options.get("overflow_batches", ()))
    for calls, parameters in workers.run(case.num_ranks, name, timeout=200, **vars(case)):
        assert parameters and calls == (len(case.batches) - 2 - skipped) * parameters


@pytest.mark.sample(1)
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_a_shard_is_predicted_by_its_owner(clip):
    """With the distributed optimizer each element of a prediction is one replica's, the same on both, clipped by the
    norm of all that the replica has; the true weights of the first batches are those of 2bw."""
    options = STAGE | {"batches": (4,), "clip": clip, "adam_eps": 0.1}  # by which Adam sees how large gradients are
    case = cases.Case(**options, distributed_optimizer=True, p=1, d=2)
    results = run(case)
    alone = run(replace(case, distributed_optimizer=False))
    different = 0
    for name, tensor in results[0]["older"].items():
        assert torch.equal(tensor, results[1]["older"][name])
        first, second = (result["older"][name] for result in alone)
        assert ((tensor == first) | (tensor == second)).all()
        different += (first != second).sum().item()
    assert different > 1000


def test_without_predictions_the_numbers_are_others():
    """So the table above could fail."""
    case = cases.Case(**STAGE | {"batches": (4, 4, 4)}, p=1)
    assert run(case)[0]["batches"] != run(replace(case, predict=False))[0]["batches"]


RESUMED = {
    "FP32": STAGE | {"clip": 0.5, "p": 2},
    "bf16": STAGE | {"dtype": "bfloat16", "p": 2},
    "fp16": FP16 | {"overflow_batches": (3,), "p": 2},
    "distributed optimizer": STAGE | {"distributed_optimizer": True, "clip": 0.5, "p": 2, "d": 2},
    "replicas apart": UNIFORM | {"p": 1, "d": 2, "clip": 0.5},
}


@pytest.mark.full
@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("border", [4, 1])
def test_a_resumed_run_has_the_same_numbers(name, border):
    """Stopped, everything built anew, gone on with: bit for bit the run that was never stopped."""
    case = cases.Case(**RESUMED[name])
    whole = run(replace(case, drains=()))
    resumed = workers.run(case.num_ranks, f"{cases.__name__}:resume", timeout=200, border=border, **vars(case))
    for one, other in zip(whole, resumed, strict=True):
        assert repr(one["batches"]) == repr(other["batches"])
        for version in ("newest", "older"):
            assert all(torch.equal(tensor, other[version][key]) for key, tensor in one[version].items())


@pytest.mark.parametrize(("clip", "expected"), [(0.5, [0.25, None]), (0.0, [1.0, 1.0])])
def test_a_run_that_does_not_clip_forgets_how_the_one_before_did(clip, expected):
    """Before the first step nobody knew it."""
    options = vars(cases.Case(**STAGE | {"clip": clip}, p=1))
    found = [
        workers.run(1, f"{cases.__name__}:loaded_clip_factor", clip_factor=each, **options)[0] for each in (0.25, None)
    ]
    assert found == expected
