"""The contribution of each part of the time model: the error on published runs after a fit without that part.

    python benchmarks/planner_ablation.py measurements.json
    python benchmarks/planner_ablation.py measurements.json --feasibility feasibility_gpt3_96b.json

The runs are those of BPipe's Tables 6 and 7 that the constants of `a100` explain; the fit is that of
`tools/grid_search.py calibrate`. Each line removes one effect or one constant from the model, fits the rest to all runs
but one (and those with the same degrees and microbatch), and predicts the run that was left out. A constant is removed
by a value without an effect: an efficiency of 1, no seconds, no contention. With --feasibility a second table has the
constants of the verdict on memory, and the number of stated and implied facts that are judged wrongly without each.
"""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.common.results import parser_of
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs
from megatron.planner.job.configuration import Configuration
from megatron.planner.published.entries import Entry, load_entries
from megatron.planner.published.prediction import ConstantsFit, Question, fit_runs
from megatron.planner.published.validation import judge_facts, load_facts, row_errors
from megatron.planner.time import first_principles, iteration
from megatron.planner.time.calibration import FITTED, START, load_calibration
from megatron.planner.time.closed_forms import end_of_batch
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.microbatch_flow import StageTimes
from megatron.planner.time.work import LayerWork, Work

_costs, _softmax = FirstPrinciples.costs, LayerWork.softmax_is_fused


def _changed(**changes: object) -> Callable:
    """A replacement for `FirstPrinciples.costs` that changes some numbers of its result."""

    def costs(self: FirstPrinciples, *arguments: object) -> Costs:
        return replace(_costs(self, *arguments), **changes)

    return costs


def _without(name: str, part: Callable) -> object:
    return mock.patch.object(LayerWork, name, property(lambda self: part(self)))


def _core(whole: Callable) -> Callable:
    return lambda self: replace(whole(self), traffic=0.0)


_core_forward, _core_backward = LayerWork._core_forward, LayerWork._core_backward
_seconds = FirstPrinciples._seconds


def _silent(self: FirstPrinciples, work: Work, links: object) -> float:
    return _seconds(self, replace(work, exchanged=0.0, overlapped=0.0), links)


def _no_fill(costs: Costs, configuration: Configuration, schedule: Schedule) -> iteration.IterationTime:
    stages, m = StageTimes(costs, schedule), configuration.num_microbatches
    seconds = m * max(stages.work) + end_of_batch(stages) + max(stages.step)
    return iteration.IterationTime(seconds=seconds, bubble=0.0)


def _nothing(self: LayerWork) -> tuple[Work, Work]:
    return Work(), Work()


def _fixed(name: str, value: float) -> list[Callable]:
    """The patches that fix a constant at `value` instead of fitting it."""

    def fit(asked: dict[str, Question]) -> ConstantsFit:
        runs = {each: question.time_errors for each, question in asked.items()}
        return fit_runs(runs, replace(START, **{name: value}), free=[each for each in FITTED if each != name])

    return [lambda: mock.patch("megatron.planner.published.validation.fit_questions", fit)]


CONSTANTS = {
    "product_efficiency": 1.0, "product_overhead": 1e-12, "memory_efficiency": 1.0, "tensor_efficiency": 1.0,
    "link_efficiency": 1.0, "network_efficiency": 1.0, "contention": 0.0, "launch": 0.0, "pressed_efficiency": 1.0,
}  # fmt: skip
"""Constant -> the value at which it has no effect."""
OF_VERDICT = {
    "nothing left out": [],
    "LOST": [lambda: mock.patch("megatron.planner.job.estimate.LOST", 0.0)],
    "FEWEST": [lambda: mock.patch("megatron.planner.job.estimate.FEWEST", 0)],
    "copies of gradients that are in the step alone": [
        lambda: mock.patch("megatron.planner.memory.parameters.TrainingState.copies_in_step", lambda *_, **__: 0.0)
    ],
}
EFFECTS = {
    "nothing left out": [],
    "traffic of softmax and dropout of scores": [
        lambda: mock.patch.object(LayerWork, "_core_forward", _core(_core_forward)),
        lambda: mock.patch.object(LayerWork, "_core_backward", _core(_core_backward)),
    ],
    "availability of the fused softmax": [lambda: _without("softmax_is_fused", lambda self: True)],
    "communication of tensor ranks": [lambda: mock.patch.object(FirstPrinciples, "_seconds", _silent)],
    "filling and draining of the pipeline": [
        lambda: mock.patch("megatron.planner.published.prediction.priced", _no_fill),
        lambda: mock.patch("megatron.planner.planner.priced", _no_fill),
    ],
    "embedding and head": [
        lambda: mock.patch.object(LayerWork, "head", property(_nothing)),
        lambda: mock.patch.object(LayerWork, "embedding", property(_nothing)),
    ],
    "reductions of gradients": [
        lambda: mock.patch.object(FirstPrinciples, "costs", _changed(reduce_grad=0.0, reduce_embed=0.0))
    ],
    "transfers between stages": [lambda: mock.patch.object(FirstPrinciples, "_boundary", lambda self, asked: 0.0)],
    "optimizer step": [lambda: mock.patch.object(FirstPrinciples, "costs", _changed(step=0.0))],
}


@contextmanager
def _all(patches: list[Callable]):
    if not patches:
        yield
        return
    with patches[0](), _all(patches[1:]):
        yield


def _verdicts(entries: str, facts: str) -> Table:
    """The table of wrongly judged facts without each constant of the verdict on memory."""
    known, asked = [each for each in load_entries(entries) if isinstance(each, Entry)], load_facts(facts)
    table = Table("left out", "stated facts, wrong", "implied facts, wrong", box=None)
    for name, patches in OF_VERDICT.items():
        with _all(patches):
            wrong = [each.fact.strength for each in judge_facts(asked, known) if not each.is_right]
        table.add_row(name, str(wrong.count("stated")), str(wrong.count("implied")))
    return table


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("entries", help="measured runs")
    parser.add_argument("--feasibility", metavar="FILE", help="facts about memory")
    options = parser.parse_args()
    calibration = load_calibration()
    explained = [name for name in calibration.entries if name not in calibration.unexplained]
    calibration = calibration.model_copy(update={"entries": tuple(explained)})
    entries = [each for each in load_entries(options.entries) if isinstance(each, Entry) and each.id in explained]
    table = Table("left out", "mean error", "largest", box=None)
    effects = EFFECTS | {name: _fixed(name, value) for name, value in CONSTANTS.items()}
    for name, patches in effects.items():
        with _all(patches):
            errors = [abs(row.worst) for row in row_errors(entries, calibration)]
        table.add_row(name, f"{100 * sum(errors) / len(errors):.1f}%", f"{100 * max(errors):.1f}%")
    Console(width=100).print(table)
    if options.feasibility:
        Console(width=100).print(_verdicts(options.entries, options.feasibility))
    assert first_principles.FirstPrinciples.costs is _costs


if __name__ == "__main__":
    main()
