"""The best configuration for each number of GPUs and each sequence length: time against cost, and the knee.

More GPUs make a training shorter and, as they wait for one another more, dearer. The points of one sequence length of
which none is both slower and dearer than another are its front. The knee is the point of the front that lies farthest
from the chord between the ends, towards little time and little money, where both are as the picture draws them: from
there on less time costs more than it did before (Satopaa et al. 2011, Finding a "Kneedle" in a Haystack). It depends on
where the front ends; on a front of fewer than three points, or one that bends nowhere, there is none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.planner.search.outcome import Kept

_STRAIGHT = 0.01  # a bend of 1%, which says nothing


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """The result of one search of a sweep. `best`: None if nothing can run, for this `reason`."""

    num_gpus: int
    sequence_length: int
    best: Kept | None
    reason: str = ""

    @property
    def time(self) -> float:
        """Days of all tokens; where their number is not known, seconds of an iteration."""
        bill = self.best.bill
        return self.best.estimate.seconds if bill.days is None else bill.days

    @property
    def cost(self) -> float:
        """Money for that; without a price, GPU hours."""
        bill = self.best.bill
        if bill.days is None:
            return bill.gpu_hours_per_iteration if bill.cost_per_iteration is None else bill.cost_per_iteration
        return bill.gpu_hours if bill.cost is None else bill.cost


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All points, of one sequence length after the other, with GPUs ascending.

    Attributes:
        tokens: of the whole training; None: points are compared by the iteration, which all have equally many tokens.
        currency: of the price; None: without one costs are GPU hours.
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
        """By sequence length: the points where something can run."""
        lengths = dict.fromkeys(point.sequence_length for point in self.points)
        return {
            length: tuple(each for each in self.points if each.best is not None and each.sequence_length == length)
            for length in lengths
        }

    @cached_property
    def fronts(self) -> dict[int, tuple[SweepPoint, ...]]:
        """By sequence length: those of which none is both slower and dearer than another, from the fastest on."""
        return {length: tuple(front(points)) for length, points in self.curves.items()}

    @cached_property
    def knees(self) -> dict[int, SweepPoint]:
        """By sequence length, where there is one."""
        found = {length: knee([(each.time, each.cost) for each in points]) for length, points in self.fronts.items()}
        return {length: self.fronts[length][index] for length, index in found.items() if index is not None}

    def remarks(self, point: SweepPoint) -> tuple[str, ...]:
        """Words on a point's position on its curve, such as the knee."""
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
    """Those of which none is both slower and dearer than another, from the fastest on; of equals, the fewest GPUs."""
    found: list[SweepPoint] = []
    for each in sorted(points, key=lambda point: (point.time, point.cost, point.num_gpus)):
        if not found or each.cost < found[-1].cost:
            found.append(each)
    return found


def knee(curve: Sequence[tuple[float, float]]) -> int | None:
    """The index of the knee of a front of times, which ascend, and costs, which descend; see the module."""
    if len(curve) < 3:
        return None
    (left, top), (right, bottom) = curve[0], curve[-1]
    width, height = right - left, top - bottom

    def depth(place: tuple[float, float]) -> float:
        """How far below the chord, in parts of the curve's height."""
        return 1 - (place[0] - left) / width - (place[1] - bottom) / height

    index = max(range(len(curve)), key=lambda each: depth(curve[each]))
    return index if depth(curve[index]) > _STRAIGHT else None
