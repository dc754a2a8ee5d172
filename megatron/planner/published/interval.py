"""The interval of a prediction, from residuals of published runs.

Runs of one source err alike, since they share a cluster, software and a way of measuring. A user's run comes from a
source of its own. So all sources have the same weight, however many runs each has. If a source and K others are
exchangeable, the error of a run of that source is at most x with a probability of at least 80%. Here x is the smallest
error for which the fractions of each source's runs with at most this error sum up to 0.8 (K + 1) (conformal prediction
of data in groups: Lee, Barber and Willett 2023, "Distribution-free inference with hierarchical data"). This needs 4
sources. An error is the size of log(measured / predicted time), so the prediction is always inside the interval.

If all runs are of one source, such as a user's own cluster, the next run is assumed to be of that source, too. Then all
runs have the same weight. The ratio of the next run lies between the k-th smallest and the k-th largest of n ratios,
k = floor(0.1 (n + 1)), with a probability of at least 80% (split conformal prediction). This needs 9 runs.

A feature that is priced by a rule of its own (`Kind.extras`) may be predicted worse than everything else. So the
interval is at least as wide as that of the runs with such features, which needs 9 of these runs. A feature that was
never compared has no interval.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.planner.job.cluster import Cluster
from megatron.planner.job.estimate import Estimate
from megatron.planner.job.software import Software
from megatron.planner.memory.architecture import Architecture
from megatron.planner.published.residuals import (
    BESIDE,
    PRESSED,
    Kind,
    Residual,
    kind_of,
    load_others,
    load_residuals,
    read_residuals,
    source_of,
)

LEVEL = 0.8
"""The probability with which a measured time lies in the interval."""
_TAIL = (1 - LEVEL) / 2
FEWEST = math.ceil(1 / _TAIL - 1e-9) - 1
"""The fewest runs of one source for an interval: 9."""
FEWEST_SOURCES = math.ceil(1 / (1 - LEVEL) - 1e-9) - 1
"""The fewest sources for an interval: 4."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The ratios of measured to predicted time that enclose `LEVEL` of the runs.

    Attributes:
        low, high: the least ratio, at most 1, and the largest ratio, at least 1.
        num_runs: the number of runs from which the interval was computed.
        group: these runs in words.
    """

    low: float
    high: float
    num_runs: int
    group: str

    def seconds(self, predicted: float) -> tuple[float, float]:
        """Return the seconds between which the measured time of a predicted time is expected."""
        return self.low * predicted, self.high * predicted


@dataclass(frozen=True)
class NotValidated:
    """The lack of an interval. `reason`: the reason as one clause."""

    reason: str


def interval_of(kind: Kind, runs: Sequence[Residual]) -> Interval | NotValidated:
    """The interval for a kind of run, or the reason why there is none."""
    reason = _never_compared(kind, [run.kind for run in runs])
    if reason:
        return NotValidated(reason)
    pressed = f", {PRESSED}" if kind.under_pressure else ""
    alike = [run for run in runs if run.kind.under_pressure == kind.under_pressure]
    features = _without_beside(kind)
    featured = [run for run in alike if _without_beside(run.kind) == features]
    named = f"with {', '.join(features)}{pressed}" if features else f"of such a kind{pressed}"
    num_sources = len({source_of(run.source) for run in alike})
    if len(featured) < FEWEST and (features or num_sources < 2):
        return _too_few(f"an interval takes {FEWEST} published runs, and {named}", featured)
    if num_sources < 2:
        low, high = quantiles([run.ratio for run in featured])
        group = f"{featured[0].source}, {named}"
        return Interval(low=min(low, 1.0), high=max(high, 1.0), num_runs=len(featured), group=group)
    if num_sources < FEWEST_SOURCES:
        takes = f"an interval takes {FEWEST_SOURCES} sources, or one alone, and of {num_sources} sources{pressed}"
        return _too_few(takes, alike)
    error = error_of_sources(alike)
    low, high, group = math.exp(-error), math.exp(error), f"{num_sources} sources{pressed}"
    if features:
        least, largest = quantiles([run.ratio for run in featured])
        low, high, group = min(low, least), max(high, largest), f"{group}; {len(featured)} {named}"
    return Interval(low=low, high=high, num_runs=len(alike), group=group)


def quantiles(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the two ratios between which a further ratio lies with a probability of at least `LEVEL`.

    Needs `FEWEST` ratios or more.
    """
    place = math.floor(_TAIL * (len(ratios) + 1) + 1e-9)
    ordered = sorted(ratios)
    return ordered[place - 1], ordered[-place]


def error_of_sources(runs: Sequence[Residual]) -> float:
    """Return the size of log(measured / predicted) that a run of another source exceeds with a probability of at most
    1 - `LEVEL`. Needs runs of `FEWEST_SOURCES` sources or more."""
    counts = Counter(source_of(run.source) for run in runs)
    part = 0.0
    for error, source in sorted((abs(math.log(run.ratio)), source_of(run.source)) for run in runs):
        part += 1 / counts[source]
        if part >= LEVEL * (len(counts) + 1) - 1e-9:
            return error
    raise AssertionError(f"{len(counts)} sources are fewer than {FEWEST_SOURCES}")


def _too_few(takes: str, runs: Sequence[Residual]) -> NotValidated:
    ratios = [run.ratio for run in runs]
    range_of = f", which took {min(ratios):.2f} to {max(ratios):.2f} of the predicted times" if ratios else ""
    were = "was" if len(ratios) == 1 else "were"
    return NotValidated(f"{takes} only {len(ratios)} {were} compared{range_of}")


def _never_compared(kind: Kind, known: Sequence[Kind]) -> str | None:
    for preposition, name in (("on", "device"), ("of", "strategy"), ("with", "attention"), ("in", "precision")):
        if not any(getattr(each, name) == getattr(kind, name) for each in known):
            return f"no published time {preposition} {getattr(kind, name)} was compared"
    for extra in kind.extras:
        if not any(extra in each.extras for each in known):
            return f"no published time with {extra} was compared"
    if not any(_core(each) == _core(kind) for each in known):
        others = "".join(f", {each}" for each in kind.extras)
        return f"no published time of {kind.strategy} with {kind.attention}{others} on {kind.device} was compared"
    return None


def _core(kind: Kind) -> tuple:
    return kind.device, kind.strategy, kind.attention, kind.precision, _without_beside(kind)


def _without_beside(kind: Kind) -> tuple[str, ...]:
    return tuple(each for each in kind.extras if each not in BESIDE)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Counts of runs: `num_runs` with an interval from other runs, `num_inside` of these inside it, `num_without`
    others.
    """

    num_runs: int
    num_inside: int
    num_without: int

    @property
    def share(self) -> float:
        return self.num_inside / self.num_runs if self.num_runs else 0.0


def without_run(runs: Sequence[Residual]) -> Coverage:
    """The coverage of each run by the interval of all other runs."""
    return _coverage(runs, lambda run, other: run.id != other.id)


def without_source(runs: Sequence[Residual]) -> Coverage:
    """The coverage of each run by the interval of runs of other sources, which share no cluster with it."""
    return _coverage(runs, lambda run, other: source_of(run.source) != source_of(other.source))


def _coverage(runs: Sequence[Residual], counts: Callable[[Residual, Residual], bool]) -> Coverage:
    found = [(run, interval_of(run.kind, [other for other in runs if counts(run, other)])) for run in runs]
    held = [(run, each) for run, each in found if isinstance(each, Interval)]
    inside = sum(each.low <= run.ratio <= each.high for run, each in held)
    return Coverage(num_runs=len(held), num_inside=inside, num_without=len(found) - len(held))


class Intervals:
    """Finds the interval of an estimate from residuals. Without residuals no estimate has an interval, for `reason`."""

    def __init__(self, runs: Sequence[Residual] = (), *, reason: str = "") -> None:
        self._runs, self._reason = runs, reason
        self._known: dict[Kind, Interval | NotValidated] = {}

    @classmethod
    def of_calibration(
        cls, name: str, constants: Mapping[str, float], residuals: str | Path | None = None
    ) -> "Intervals":
        """The intervals of times that a calibration's constants predict. `residuals`: the file of residuals; None: the
        files of the package.

        Raises ValueError if the file has no residuals, or those of other constants.
        """
        known = load_residuals(name) if residuals is None else read_residuals(residuals)
        if known is not None and known.constants == constants:
            others = load_others(name) if residuals is None else ()
            return cls([*known.runs, *(run for each in others if each.constants == constants for run in each.runs)])
        if residuals is not None:
            raise ValueError(
                f"{residuals} was written with other constants than those of {name}; write it again with validate "
                f"--calibrated-on {name} --write-residuals"
            )
        return cls(reason=f"the constants of {name} were not held against published runs")

    @classmethod
    def of_profile(cls) -> "Intervals":
        """The intervals of times that the profile of a machine predicts: none."""
        return cls(
            reason="no published run has a profile (docs/profiling.md says how near this project's own runs came)"
        )

    def of(
        self, estimate: Estimate, model: Architecture, cluster: Cluster, software: Software
    ) -> Interval | NotValidated:
        """The interval of an estimate of this model."""
        if self._reason:
            return NotValidated(self._reason)
        pressed = estimate.under_pressure
        kind = kind_of(estimate.configuration, model, cluster, software, under_pressure=pressed)
        if kind not in self._known:
            self._known[kind] = interval_of(kind, self._runs)
        return self._known[kind]


def interval_record(accuracy: Interval | NotValidated, seconds: float) -> dict:
    """The JSON record of the interval of a predicted time and its runs, or of the reason why there is none."""
    if isinstance(accuracy, NotValidated):
        return {"interval": None, "not_validated": accuracy.reason}
    low, high = accuracy.seconds(seconds)
    found = {
        "level": LEVEL, "low_seconds": low, "high_seconds": high, "num_runs": accuracy.num_runs,
        "runs": accuracy.group,
    }  # fmt: skip
    return {"interval": found, "not_validated": None}


def interval_text(accuracy: Interval | NotValidated, seconds: float) -> str:
    """The interval of a predicted time for a cell of a table: "39.9-48.9", or "not validated"."""
    if isinstance(accuracy, NotValidated):
        return "not validated"
    low, high = accuracy.seconds(seconds)
    return f"{short_number(low)}-{short_number(high)}"


def short_number(value: float) -> str:
    """A value as text: three significant digits below 100, no decimals from 100 on."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
