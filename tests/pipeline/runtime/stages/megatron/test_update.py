"""Training through the engine equals a single process: losses, gradient norms, weights and both weight versions.

The cases are data: a name, the options, the layouts (p, t, d) and how exact they must be. The references are plain
torch in one process, see `megatron_reference`.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases

EXACT = cases.Deviation(loss=0.0, norm=1e-14, newest=0.0, older=0.0)
"""Bit-equal; the norm's squares are added in another order, in float64."""
CLOSE = cases.Deviation(loss=1e-6, norm=1e-6, newest=1e-5, older=1e-5)
"""The two halves of a tied gradient, or replicas, add up in another order."""
SPREAD = cases.Deviation(loss=1e-6, norm=5e-6, newest=2e-5, older=2e-5)
"""Tensor ranks split every product, so activations differ in their last bits, and eight steps spread that."""

P124 = ((1, 1, 1), (2, 1, 1), (4, 1, 1))


@dataclass(frozen=True)
class Row:
    """One line of the table: options of `Case`, the layouts to try, the deviation allowed."""

    options: dict
    layouts: tuple[tuple[int, int, int], ...] = P124
    allowed: cases.Deviation = field(default_factory=lambda: EXACT)


TWO_BW = {"schedule": "2bw", "batches": (4,) * 6}
FP16 = {"schedule": "2bw", "dtype": "float16", "layers": 2, "hidden": 16, "clip": 1.0}

SELECTION = {
    "flush": Row({"schedule": "flush"}, layouts=((1, 1, 1), (4, 1, 1))),
    "gpipe": Row({"schedule": "gpipe"}, layouts=((4, 1, 1),), allowed=CLOSE),
    "flush tied, clipped": Row({"schedule": "flush", "tied": True, "clip": 0.5}, layouts=((4, 1, 1),), allowed=CLOSE),
    "flush data parallel": Row(
        {"schedule": "flush", "clip": 0.5, "distributed_optimizer": True}, layouts=((2, 1, 2),), allowed=CLOSE
    ),
    "flush tensor parallel, tied": Row(
        {"schedule": "flush", "clip": 0.5, "tied": True}, layouts=((2, 2, 1),), allowed=SPREAD
    ),
    "interleaved": Row({"schedule": "interleaved", "v": 2, "drains": (1, 3)}, layouts=((2, 1, 1),)),
    "zb-h1": Row({"schedule": "zb-h1"}, layouts=((4, 1, 1),)),
    "zbv": Row({"schedule": "zbv", "v": 2, "drains": (1, 3)}, layouts=((2, 1, 1),)),
    "2bw": Row(TWO_BW, layouts=((1, 1, 1), (4, 1, 1))),
    "2bw clipped, warm-up, ramp-up": Row(
        {"schedule": "2bw", "batches": (4, 4, 5, 5, 6, 6, 8, 8), "clip": 0.5, "warmup": 24, "weight_decay": 0.1},
        layouts=((4, 1, 1),),
    ),
    "2bw tied": Row(TWO_BW | {"tied": True, "clip": 0.5}, layouts=((4, 1, 1),), allowed=CLOSE),
    "2bw drained": Row(TWO_BW | {"drains": (0, 3, 4)}, layouts=((1, 1, 1), (2, 1, 1))),
    "2bw recompute instructions": Row(TWO_BW | {"recompute": True, "dropout": 0.1}, layouts=((2, 1, 1),)),
    "2bw full recompute": Row(TWO_BW | {"recompute_granularity": "full", "dropout": 0.1}, layouts=((2, 1, 1),)),
    "2bw data parallel": Row(TWO_BW | {"clip": 0.5}, layouts=((2, 1, 2),), allowed=CLOSE),
    "2bw distributed optimizer": Row(
        TWO_BW | {"clip": 0.5, "tied": True, "distributed_optimizer": True},
        layouts=((2, 1, 2),),
        allowed=CLOSE,
    ),
    "2bw sequence parallel": Row(
        TWO_BW | {"clip": 0.5, "tied": True, "sequence_parallel": True}, layouts=((2, 2, 1),), allowed=SPREAD
    ),
    "2bw bf16": Row(TWO_BW | {"dtype": "bfloat16"}, layouts=((2, 1, 1),)),
    "pipedream": Row({"schedule": "pipedream", "batches": (1,) * 12}, layouts=((4, 1, 1),)),
    "2bw, uneven": Row(TWO_BW | {"first_layers": 1}, layouts=((2, 1, 1),)),
    "2bw fp16, two in a row": Row(FP16 | {"batches": (2,) * 8, "overflow_batches": (2, 3)}, layouts=((2, 1, 1),)),
    "2bw fp16, before a drain": Row(
        FP16 | {"batches": (2,) * 8, "overflow_batches": (3,), "drains": (3, 5)}, layouts=((2, 1, 1),)
    ),
}


MODERN = {"swiglu": True, "normalization": "RMSNorm", "position": "rope", "token_form": True}
SINGLE = {"single_gradient_buffer": True}
PIPEDREAM = {"schedule": "pipedream", "batches": (2,) * 12}
INTERLEAVED = {"schedule": "interleaved", "v": 2, "dropout": 0.1}
OPTIONS = {
    "modern": Row(TWO_BW | MODERN),
    "modern tied": Row(TWO_BW | MODERN | {"tied": True, "clip": 0.3}, ((1, 2, 1), (2, 2, 1)), SPREAD),
    "sgd": Row(TWO_BW | {"optimizer": "sgd", "lr": 0.1}),
    "dropout, replicas": Row(TWO_BW | {"dropout": 0.2, "tied": True}, ((1, 1, 2), (2, 1, 2)), CLOSE),
    "selective recompute": Row(TWO_BW | {"recompute_granularity": "selective", "dropout": 0.1}),
    "both recomputes": Row(TWO_BW | {"recompute": True, "recompute_granularity": "selective", "dropout": 0.1}),
    "long batches": Row(TWO_BW | {"batches": (8,) * 6}, ((2, 1, 1), (4, 1, 1))),
    "fp16, first and last": Row(FP16 | {"batches": (2,) * 8, "overflow_batches": (0, 7)}, ((1, 1, 1), (2, 1, 1))),
    "fp16, hysteresis": Row(FP16 | {"batches": (2,) * 8, "overflow_batches": (1, 2, 4)}, ((1, 1, 1), (2, 1, 1))),
    "fp16, four stages": Row(FP16 | {"layers": 4, "batches": (4,) * 8, "overflow_batches": (2, 3)}, ((4, 1, 1),)),
}
"""What no row of the selection has, and every schedule below takes."""
WIDE = {
    f"{schedule}: {name}": Row(
        row.options | {"schedule": schedule}, row.layouts,
        CLOSE if row.allowed is EXACT and "clip" in row.options else row.allowed,
    )
    for name, row in (SELECTION | OPTIONS).items()
    for schedule in ("gpipe", "flush", "zb-h1", "2bw")
    if row.options["schedule"] in ("flush", "2bw") and (name in OPTIONS or row.options["schedule"] != schedule)
} | {
    "2bw extra warm-up": Row(TWO_BW | {"batches": (7,) * 6, "extra_warmup": True}, ((2, 1, 1), (4, 1, 1))),
    "2bw one buffer, tied": Row(TWO_BW | SINGLE | {"clip": 0.3, "tied": True, "drains": (4,)}, allowed=CLOSE),
    "2bw constant scale": Row(
        FP16 | {"batches": (2,) * 8, "loss_scale": 256.0, "overflow_batches": (4,)}, ((2, 1, 1),)
    ),
    "2bw fp16 distributed, overflow": Row(
        FP16 | {"batches": (4,) * 8, "overflow_batches": (2,), "distributed_optimizer": True, "clip": 0.0},
        ((1, 1, 2), (2, 1, 2)), CLOSE,
    ),
    "pipedream replicas": Row(PIPEDREAM | {"distributed_optimizer": True}, ((2, 1, 2),), CLOSE),
    "pipedream dropout": Row(PIPEDREAM | {"batches": (1,) * 12, "dropout": 0.1, "dtype": "bfloat16"}),
    "pipedream sequence": Row(PIPEDREAM | {"batches": (1,) * 12, "sequence_parallel": True}, ((2, 2, 1),), SPREAD),
    "pipedream, uneven": Row(PIPEDREAM | {"batches": (1,) * 16, "layers": 4, "first_layers": 3}, ((2, 1, 1),)),
    "interleaved tied, clipped": Row(INTERLEAVED | {"tied": True, "clip": 0.5}, ((2, 1, 1),), CLOSE),
    "interleaved recompute": Row(INTERLEAVED | {"recompute": True, "dtype": "bfloat16"}, ((2, 1, 1),)),
}  # fmt: skip
"""The wide grid, all of it for the full selection."""
TABLE = SELECTION | WIDE


def reference_key(case: cases.Case) -> cases.Case:
    """The case of which this one is a layout."""
    kept = case.p if case.schedule == "pipedream" else 1  # its delays depend on the pipeline
    return replace(
        case, p=kept, t=1, cp=1, e=1, cut_experts=True, exchange="all_gather", sequence_parallel=False,
        distributed_optimizer=False,
        recompute=False, drains=(), engine=False, puts_off=False, fused=False,
    )  # fmt: skip


class Outcomes:
    """Runs the cases of a table when they are asked for, each once, and the reference of each once."""

    def __init__(self, table: dict[str, Row], function: str = f"{cases.__name__}:train") -> None:
        self._table, self._function = table, function
        self._references: dict[cases.Case, dict] = {}
        self._results: dict[tuple, tuple] = {}

    def __getitem__(self, key: tuple[str, tuple[int, int, int]]) -> tuple[cases.Case, dict, list[dict]]:
        """(case, reference, results of all ranks) of a row's name and a layout."""
        if key not in self._results:
            name, (p, t, d) = key
            case = cases.Case(**self._table[name].options, p=p, t=t, d=d)
            device = "engine" if case.engine else "cpu"
            results = workers.run(case.num_ranks, self._function, timeout=200, device=device, **vars(case))
            self._results[key] = (case, self._reference(reference_key(case)), results)
        return self._results[key]

    def _reference(self, case: cases.Case) -> dict:
        if case not in self._references:
            function = "tests.pipeline.runtime.stages.megatron.megatron_reference:reference"
            self._references[case] = workers.run(1, function, timeout=200, **vars(case))[0]
        return self._references[case]


def check(outcome: tuple, allowed: cases.Deviation) -> None:
    case, expected, results = outcome
    found = cases.deviation(case, expected, results)
    for quantity in ("loss", "norm", "newest", "older"):
        assert getattr(found, quantity) <= getattr(allowed, quantity), found
    for result in results[1:]:  # loss, norm, overflow, scale and learning rate of every batch
        for ours, theirs in zip(result["batches"], results[0]["batches"], strict=True):
            assert repr(ours) == repr(theirs), case


@pytest.fixture(scope="module")
def selection():
    return Outcomes(TABLE)


TWINS = {
    "gpipe",
    "flush tensor parallel, tied",
    "2bw recompute instructions",
    "2bw full recompute",
    "2bw data parallel",
}
"""Rows whose claim others have, too: modules' tests, sequence parallel, the distributed optimizer."""


def layouts_of(table: dict[str, Row]) -> list[tuple[str, tuple[int, int, int]]]:
    return [(name, layout) for name, row in table.items() for layout in row.layouts]


def marked(table: dict[str, Row], *, full: Collection[str]) -> list:
    """The same as parameters; those of the rows `full` are kept for the full selection."""
    return [
        pytest.param(name, layout, marks=pytest.mark.full if name in full else ()) for name, layout in layouts_of(table)
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "layout"), marked(TABLE, full=TWINS | WIDE.keys()), ids=str)
def test_training_equals_one_process(selection, name, layout):
    """Every layout reproduces the single process within what its row allows, and all ranks report alike."""
    check(selection[name, layout], TABLE[name].allowed)


@pytest.mark.full
def test_two_weight_slots_and_two_gradient_slots_at_most(selection):
    """2bw keeps two sets of weights and two gradient buffers, flush one of each."""
    for case, _, results in (selection[key] for key in layouts_of(SELECTION)):
        for result in results:
            most = 2 if case.schedule == "2bw" else 1
            if case.schedule != "pipedream":
                assert result["num_weight_slots"] == result["peak_versions"] == most
            assert result["num_gradient_slots"] <= (1 if case.single_gradient_buffer else most)


def test_pipedream_keeps_a_version_per_microbatch_in_flight(selection):
    """Stage s of p keeps p - s weight versions at most, and reaches that many."""
    results = selection["pipedream", (4, 1, 1)][2]
    assert [result["peak_versions"] for result in results] == [4, 3, 2, 1]


DROPOUT_OVER_TENSORS = {
    "plain": TWO_BW | {"dropout": 0.1, "t": 2, "batches": (4,) * 4, "layers": 2},
    "sequence parallel": TWO_BW | {"dropout": 0.1, "t": 2, "batches": (4,) * 4, "layers": 2, "sequence_parallel": True},
}


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.full), "sequence parallel"])
def test_dropout_over_tensor_ranks_does_not_depend_on_the_pipeline(name):
    """With t=2 tensor ranks draw masks of their own, so no single process is the reference: p=2 equals p=1 instead."""
    case = cases.Case(**DROPOUT_OVER_TENSORS[name], p=2)
    one = workers.run(2, f"{cases.__name__}:train", timeout=200, **vars(replace(case, p=1)))
    two = workers.run(4, f"{cases.__name__}:train", timeout=200, **vars(case))
    check((case, one[0], two), EXACT)
    one_batch = replace(case, p=1, dropout=0.0, batches=case.batches[:1])
    without = workers.run(2, f"{cases.__name__}:train", timeout=200, **vars(one_batch))
    assert without[0]["batches"][0]["loss"] != one[0]["batches"][0]["loss"]


def test_evaluations_between_drained_batches_do_not_depend_on_the_pipeline(selection):
    """Evaluation uses the newest weights, the same sums on every rank and for every p."""
    one, two = selection["2bw drained", (1, 1, 1)][2], selection["2bw drained", (2, 1, 1)][2]
    assert len(one[0]["evaluations"]) == 3
    assert one[0]["evaluations"] == two[0]["evaluations"] == two[1]["evaluations"]


def test_overflows_skip_the_step_and_the_learning_rate(selection):
    """An overflowed batch leaves weights, optimizer and schedule alone: the next batch has its learning rate."""
    _, _, results = selection["2bw fp16, two in a row", (2, 1, 1)]
    batches = results[0]["batches"]
    assert [batch["overflow"] for batch in batches] == [index in (2, 3) for index in range(8)]
    assert batches[2]["lr"] == batches[3]["lr"] == batches[4]["lr"] > batches[5]["lr"]
    assert [batch["scale"] for batch in batches[:5]] == [1024.0] * 4 + [512.0]
    assert all(report.skipped == report.overflow and not report.nan for report in results[0]["reports"][4:])
