"""What each part of the time model is worth: the error on published runs, left out and fitted again, without it.

    python benchmarks/planner_ablation.py measurements.json

The runs are those of BPipe's Tables 6 and 7 that the constants of `a100` explain; the fit is that of
`tools/grid_search.py calibrate`. Each line takes one effect out of the model, fits what remains to all runs but one
(and those of the same degrees and microbatch), and predicts that one.
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
from megatron.planner.published.validation import row_errors
from megatron.planner.time import first_principles, iteration
from megatron.planner.time.calibration import load_calibration
from megatron.planner.time.closed_forms import StageTimes, end_of_batch
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.work import LayerWork, Work

_costs, _softmax = FirstPrinciples.costs, LayerWork.softmax_is_fused


def _changed(**changes: object) -> Callable:
    """Costs with some numbers replaced."""

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


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("entries", help="measured runs")
    options = parser.parse_args()
    calibration = load_calibration()
    explained = [name for name in calibration.entries if name not in calibration.unexplained]
    calibration = calibration.model_copy(update={"entries": tuple(explained)})
    entries = [each for each in load_entries(options.entries) if isinstance(each, Entry) and each.id in explained]
    table = Table("left out", "mean error", "largest", box=None)
    for name, patches in EFFECTS.items():
        with _all(patches):
            errors = [abs(row.worst) for row in row_errors(entries, calibration)]
        table.add_row(name, f"{100 * sum(errors) / len(errors):.1f}%", f"{100 * max(errors):.1f}%")
    Console(width=100).print(table)
    assert first_principles.FirstPrinciples.costs is _costs


if __name__ == "__main__":
    main()
