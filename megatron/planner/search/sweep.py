"""A sweep: the best configuration for each number of GPUs and each sequence length, with its front and knee.

More GPUs make a training shorter, and more expensive, since GPUs wait more for one another. The front of a sequence
length is its Pareto front in time and cost. The knee is the point of the front farthest below the chord between the
ends of the front, with both axes scaled to the front: to the left of the knee a day less costs more than to the right
(Satopaa et al. 2011, Finding a "Kneedle" in a Haystack). The knee depends on the ends of the front. A front with fewer
than three points, or without a bend, has no knee.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.planner.search.outcome import Kept

_STRAIGHT = 0.01  # a bend of less than 1% is no knee


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """The result of one search of a sweep. `best` is None if nothing can run, for the reason in `reason`."""

    num_gpus: int
    sequence_length: int
    best: Kept | None
    reason: str = ""

    @property
    def time(self) -> float:
        """The days of the whole training; if the number of tokens is not known, the seconds of an iteration."""
        bill = self.best.bill
        return self.best.estimate.seconds if bill.days is None else bill.days

    @property
    def cost(self) -> float:
        """The money for the whole training or, as in `time`, for an iteration; without a price, the GPU hours."""
        bill = self.best.bill
        if bill.days is None:
            return bill.gpu_hours_per_iteration if bill.cost_per_iteration is None else bill.cost_per_iteration
        return bill.gpu_hours if bill.cost is None else bill.cost


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The points of a sweep, by sequence length, then by ascending number of GPUs.

    Attributes:
        tokens: tokens of the whole training; None: points are compared by iteration, since all iterations have the same
            number of tokens.
        currency: the currency of the price; None: no price, so costs are GPU hours.
    """

    points: tuple[SweepPoint, ...]
    tokens: float | None = None
    currency: str | None = None

    @property
    def time_name(self) -> str:
        return "s/iteration" if self.tokens is None else "days"

    @property
    def cost_name(self) -> str:
        unit = self.currency or "GPU hours"
        return f"{unit}/iteration" if self.tokens is None else unit

    @cached_property
    def curves(self) -> dict[int, tuple[SweepPoint, ...]]:
        """The points at which a configuration can run, by sequence length."""
        lengths = dict.fromkeys(point.sequence_length for point in self.points)
        return {
            length: tuple(each for each in self.points if each.best is not None and each.sequence_length == length)
            for length in lengths
        }

    @cached_property
    def fronts(self) -> dict[int, tuple[SweepPoint, ...]]:
        """The Pareto front of time and cost, fastest first, by sequence length."""
        return {length: tuple(front(points)) for length, points in self.curves.items()}

    @cached_property
    def knees(self) -> dict[int, SweepPoint]:
        """The knees by sequence length. A front without a knee has no entry."""
        found = {length: knee([(each.time, each.cost) for each in points]) for length, points in self.fronts.items()}
        return {length: self.fronts[length][index] for length, index in found.items() if index is not None}

    def remarks(self, point: SweepPoint) -> tuple[str, ...]:
        """Remarks on the position of a point on its curve, such as "knee", or the reason why nothing can run."""
        if point.best is None:
            return (point.reason,)
        points, best = self.fronts[point.sequence_length], []
        if point not in points:
            other = next(each for each in points if each.time <= point.time and each.cost <= point.cost)
            return (f"neither faster nor cheaper than {other.num_gpus} GPUs",)
        if point == points[0]:
            best.append("fastest")
        if point == self.knees.get(point.sequence_length):
            best.append("knee")
        if point == points[-1]:
            best.append("cheapest")
        return tuple(best)


def front(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """The Pareto front of time and cost, fastest first. Of equal points the one with the fewest GPUs is kept."""
    found: list[SweepPoint] = []
    for each in sorted(points, key=lambda point: (point.time, point.cost, point.num_gpus)):
        if not found or each.cost < found[-1].cost:
            found.append(each)
    return found


def knee(curve: Sequence[tuple[float, float]]) -> int | None:
    """The index of the knee of a front of (time, cost) pairs with ascending times; None: no knee. See the module."""
    if len(curve) < 3:
        return None
    (left, top), (right, bottom) = curve[0], curve[-1]
    width, height = right - left, top - bottom

    def depth(place: tuple[float, float]) -> float:
        """The distance below the chord, as a fraction of the height of the curve."""
        return 1 - (place[0] - left) / width - (place[1] - bottom) / height

    index = max(range(len(curve)), key=lambda each: depth(curve[each]))
    return index if depth(curve[index]) > _STRAIGHT else None
