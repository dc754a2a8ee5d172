"""The interval of a prediction, from residuals of runs of its kind.

Where a run and n others of its kind are in no particular order, the ratio of measured to predicted time of that run is
equally likely to stand at any of n + 1 places among the others'. So it lies between the k-th smallest and the k-th
largest of them, k = floor(0.1 (n + 1)), with a probability of 80% at least (split conformal prediction). That takes 9
others. The prediction itself is always inside, which makes it no less likely. Fewer are joined by those of wider
groups: of other schedules on such GPUs; of other overlaps there (`BESIDE`); of other GPUs; with or without a network
between nodes; of other overlaps on other GPUs. What was never compared at all gets no interval from others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.planner.intervals.kind import BESIDE, PRESSED, Kind
from megatron.planner.intervals.residuals import Residual

LEVEL = 0.8
"""How likely a measured time lies in the interval."""
_TAIL = (1 - LEVEL) / 2
FEWEST = math.ceil(1 / _TAIL - 1e-9) - 1
"""Runs that an interval takes: 9."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Measured over predicted times between which `LEVEL` of the runs are.

    Attributes:
        low, high: these ratios, of which the one is not above 1 and the other not below.
        num_runs: that it is from.
        group: what these have in common, in words.
    """

    low: float
    high: float
    num_runs: int
    group: str

    def seconds(self, predicted: float) -> tuple[float, float]:
        """The interval of a predicted time, from and to."""
        return self.low * predicted, self.high * predicted


@dataclass(frozen=True)
class NotValidated:
    """There is no interval. `reason`: one clause."""

    reason: str


def interval_of(kind: Kind, runs: Sequence[Residual]) -> Interval | NotValidated:
    """The interval for a kind, or why there is none."""
    reason = _never_compared(kind, [run.kind for run in runs])
    if reason:
        return NotValidated(reason)
    alike: list[Residual] = []
    for group, has in _groups(kind):
        alike = [run for run in runs if has(run.kind)]
        if len(alike) >= FEWEST:
            low, high = quantiles([run.ratio for run in alike])
            return Interval(low=min(low, 1.0), high=max(high, 1.0), num_runs=len(alike), group=group)
    ratios = [run.ratio for run in alike]
    range_of = f", which took {min(ratios):.2f} to {max(ratios):.2f} of the predicted times" if ratios else ""
    return NotValidated(
        f"an interval takes {FEWEST} published runs, and of {group} only {len(alike)} were compared{range_of}"
    )


def quantiles(ratios: Sequence[float]) -> tuple[float, float]:
    """Between which another one lies with a probability of `LEVEL` at least. Of `FEWEST` or more."""
    place = math.floor(_TAIL * (len(ratios) + 1) + 1e-9)
    ordered = sorted(ratios)
    return ordered[place - 1], ordered[-place]


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


def _groups(kind: Kind) -> Iterator[tuple[str, Callable[[Kind], bool]]]:
    """From the narrowest on: in words, and what belongs to it."""
    nodes = "several nodes" if kind.several_nodes else "one node"
    pressed = f", {PRESSED}" if kind.under_pressure else ""
    apart = _without_beside(kind)
    kernels, fewer = (", ".join((kind.attention, *extras)) for extras in (kind.extras, apart))

    def alike(*names: str) -> Callable[[Kind], bool]:
        wanted = ("attention", "precision", "extras", "under_pressure", *names)
        return lambda other: all(getattr(other, name) == getattr(kind, name) for name in wanted)

    def nearly(*names: str) -> Callable[[Kind], bool]:
        wanted = ("attention", "precision", "under_pressure", *names)
        return lambda other: (
            all(getattr(other, name) == getattr(kind, name) for name in wanted) and _without_beside(other) == apart
        )

    yield f"{kind.strategy}, {kernels}, {kind.device}, {nodes}{pressed}", alike("strategy", "device", "several_nodes")
    yield f"any schedule, {kernels}, {kind.device}, {nodes}{pressed}", alike("device", "several_nodes")
    yield f"any schedule and overlap, {fewer}, {kind.device}, {nodes}{pressed}", nearly("device", "several_nodes")
    yield f"any schedule and GPU, {kernels}, {nodes}{pressed}", alike("several_nodes")
    yield f"any schedule and GPU, {kernels}, one node or several{pressed}", alike()
    yield f"any schedule, overlap and GPU, {fewer}, {nodes}{pressed}", nearly("several_nodes")
    yield f"any schedule, overlap and GPU, {fewer}, one node or several{pressed}", nearly()


def _without_beside(kind: Kind) -> tuple[str, ...]:
    return tuple(each for each in kind.extras if each not in BESIDE)
