"""The contribution of each part of the time model: the error on published runs without that part.

    python benchmarks/planner_ablation.py measurements.json
    python benchmarks/planner_ablation.py measurements.json --feasibility feasibility_gpt3_96b.json
    python benchmarks/planner_ablation.py --as-fitted benchmarks/published/{*h100,*blackwell}.json

The runs are those of BPipe's Tables 6 and 7 that the constants of `a100` explain; the fit is that of
`tools/grid_search.py calibrate`. Each line removes one effect or one constant from the model, fits the rest to all runs
but one (and those with the same degrees and microbatch), and predicts the run that was left out. A constant is removed
by a value without an effect: an efficiency of 1, no seconds, no contention. With --feasibility a second table has the
constants of the verdict on memory, and the number of stated and implied facts that are judged wrongly without each.

With --as-fitted nothing is fitted again: runs on newer GPUs are predicted with the project's constants, which are
fitted to A100, and each mean is over the absolute errors of the iteration times of one kind of runs.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.common.results import parser_of
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.devices import DEVICES, Device
from megatron.planner.memory.architecture import Architecture
from megatron.planner.published.entries import Entry, load_entries
from megatron.planner.published.prediction import ConstantsFit, Question, fit_runs
from megatron.planner.published.validation import judge_facts, load_facts, row_errors
from megatron.planner.time import first_principles, iteration
from megatron.planner.time.calibration import FITTED, START, Constants, default_constants, load_calibration
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


AS_FITTED = {
    "nothing left out": [],
    "what this GPU's products reach of the peak (A100's part for all)": [
        lambda: mock.patch.object(Device, "product_rate", _rate_of_a100)
    ],
    "scores that a causal mask leaves out": [
        lambda: mock.patch.object(Architecture, "is_causal", property(lambda _: False))
    ],
    "casts to FP8": [lambda: mock.patch.object(LayerWork, "_casts", lambda *_, **__: Work())],
}
SOFTWARE: dict[str, dict[str, bool]] = {
    "overlap of reductions and gathers over replicas": {"overlaps_gradients": False, "overlaps_weights": False},
    "tensor ranks' products in pieces": {"overlaps_in_pieces": False},
    "kernels of attention for this GPU (FlashAttention-2 for all)": {"flash_attention_2": True},
}


def _rate_of_a100(device: Device, element_bytes: int) -> float:
    peak = 1e12 * device.peak_teraflops_fp8 if element_bytes == 1 else device.peak(element_bytes)
    return peak * DEVICES["A100-80"].product_part


def _all(patches: Sequence[Callable]) -> ExitStack:
    """A block in which all patches hold."""
    stack = ExitStack()
    for patch in patches:
        stack.enter_context(patch())
    return stack


def kind_of(entry: Entry) -> str:
    """The kind of a run, as the heading of a column."""
    generation = "H100" if entry.cluster.gpu.startswith("H") else "Blackwell"
    if entry.model.experts is not None:
        return f"experts, {generation}"
    return f"{'FP8' if entry.software.fp8 else '16 bits'}, {generation}"


def mean_errors(entries: Sequence[Entry], constants: Constants, **software: bool) -> dict[str, float]:
    """The mean absolute errors by kind of run. `software`: fields of the runs' software to change."""
    errors = defaultdict(list)
    for entry in entries:
        changed = replace(entry, software=replace(entry.software, **software))
        errors[kind_of(entry)].append(abs(Question(changed).time_errors(constants)["iteration"]))
    return {kind: mean(found) for kind, found in sorted(errors.items())}


def _as_fitted(entries: Sequence[Entry]) -> Table:
    """The table of mean errors without each part, with the project's constants."""
    entries, constants, rows = [each for each in entries if each.seconds is not None], default_constants(), {}
    for name, patches in AS_FITTED.items():
        with _all(patches):
            rows[name] = mean_errors(entries, constants)
    rows |= {name: mean_errors(entries, constants, **changes) for name, changes in SOFTWARE.items()}
    for name, value in CONSTANTS.items():
        if name != "pressed_efficiency":  # no run is slowed
            rows[name] = mean_errors(entries, replace(constants, **{name: value}))
    kinds = list(rows["nothing left out"])
    counts = {kind: sum(kind_of(entry) == kind for entry in entries) for kind in kinds}
    table = Table("left out", *(f"{kind}\n({counts[kind]})" for kind in kinds), box=None)
    for name, found in rows.items():
        table.add_row(name, *(f"{100 * found[kind]:.1f}%" for kind in kinds))
    return table


def _refitted(entries: Sequence[Entry]) -> Table:
    """The table of errors on runs that were left out of a fit without each part."""
    calibration = load_calibration()
    explained = [name for name in calibration.entries if name not in calibration.unexplained]
    calibration = calibration.model_copy(update={"entries": tuple(explained)})
    entries = [each for each in entries if each.id in explained]
    table = Table("left out", "mean error", "largest", box=None)
    for name, patches in (EFFECTS | {name: _fixed(name, value) for name, value in CONSTANTS.items()}).items():
        with _all(patches):
            errors = [abs(row.worst) for row in row_errors(entries, calibration)]
        table.add_row(name, f"{100 * sum(errors) / len(errors):.1f}%", f"{100 * max(errors):.1f}%")
    return table


def _verdicts(entries: Sequence[Entry], facts: str) -> Table:
    """The table of wrongly judged facts without each constant of the verdict on memory."""
    asked = load_facts(facts)
    table = Table("left out", "stated facts, wrong", "implied facts, wrong", box=None)
    for name, patches in OF_VERDICT.items():
        with _all(patches):
            wrong = [each.fact.strength for each in judge_facts(asked, entries) if not each.is_right]
        table.add_row(name, str(wrong.count("stated")), str(wrong.count("implied")))
    return table


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("entries", nargs="+", help="measured runs")
    parser.add_argument("--feasibility", metavar="FILE", help="facts about memory")
    parser.add_argument("--as-fitted", action="store_true", help="fit nothing again: errors by kind of run")
    options = parser.parse_args()
    entries = [each for file in options.entries for each in load_entries(file) if isinstance(each, Entry)]
    console = Console(width=160)
    console.print(_as_fitted(entries) if options.as_fitted else _refitted(entries))
    if options.feasibility:
        console.print(_verdicts(entries, options.feasibility))
    assert first_principles.FirstPrinciples.costs is _costs


if __name__ == "__main__":
    main()
