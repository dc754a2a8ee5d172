"""How often the intervals hold: each run against the interval that other runs give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.planner.intervals.interval import Interval, interval_of
from megatron.planner.intervals.residuals import Residual, source_of


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Of `num_runs` whose kind the others had an interval for, `num_inside` were in it; `num_without` had none."""

    num_runs: int
    num_inside: int
    num_without: int

    @property
    def share(self) -> float:
        return self.num_inside / self.num_runs if self.num_runs else 0.0


def without_run(runs: Sequence[Residual]) -> Coverage:
    """Each run against the interval of all others."""
    return _coverage(runs, lambda run, other: run.id != other.id)


def without_source(runs: Sequence[Residual]) -> Coverage:
    """Each run against the interval of other sources' runs, which share no cluster with it."""
    return _coverage(runs, lambda run, other: source_of(run.source) != source_of(other.source))


def _coverage(runs: Sequence[Residual], counts: Callable[[Residual, Residual], bool]) -> Coverage:
    found = [(run, interval_of(run.kind, [other for other in runs if counts(run, other)])) for run in runs]
    held = [(run, each) for run, each in found if isinstance(each, Interval)]
    inside = sum(each.low <= run.ratio <= each.high for run, each in held)
    return Coverage(num_runs=len(held), num_inside=inside, num_without=len(found) - len(held))
