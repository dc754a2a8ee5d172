"""The exact methods: Seq-pipe by dynamic programming, and a mixed integer program that improves a given partition.

Seq-pipe cuts one order of computation into contiguous stages, at most one for each device. It is solved by dynamic
programming over the end of a stage and the devices used. Of equal devices only the number is counted, so unequal
devices are tried in every order. The bytes that a stage sends depend on how the readers are later divided into stages.
The tables charge each tensor once, which makes them a lower bound. If the cut from the tables costs more than its
bound, a search from the last stage backwards, with the tables as its bound, finds the best cut.

The mixed integer program (scipy's HiGHS) moves units between the stages of a partition; stages keep their devices. It
finds the least possible time of the busiest device exactly, under the limits of memory and the order of stages. The
program does not contain transfers, so its result is priced like any other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from megatron.partition.units import Placed, Units

MAX_CELLS = 3e9
"""The most cells of all tables, which take about 10 s. For more, unequal devices keep the order of the file."""

MAX_STEPS = 20_000
"""The most steps of the search from the last stage backwards."""


@dataclass(frozen=True)
class Sequential:
    """A contiguous cut of an order of computation.

    Attributes:
        ends: the exclusive end of each stage, as a number of units.
        devices: the device of each stage.
        worst: the objective in picoseconds.
        proven: whether it is proven that no contiguous cut of this order is better.
    """

    ends: tuple[int, ...]
    devices: tuple[int, ...]
    worst: float
    proven: bool

    def stage_of_unit(self) -> list[int]:
        return [stage for stage, (begin, end) in enumerate(pairwise((0, *self.ends))) for _ in range(begin, end)]


def cut_sequentially(units: Units) -> Sequential | None:
    """The best contiguous cut in the units' order; None if none fits."""
    return _Tables(units).best()


class _Tables:
    def __init__(self, units: Units) -> None:
        self.units, size = units, len(units)
        kinds: dict[tuple[int, float], list[int]] = {}
        for device, kind in enumerate(zip(units.limits, units.speeds, strict=True)):
            kinds.setdefault(kind, []).append(device)
        states = prod(len(devices) + 1 for devices in kinds.values())
        self.in_order = states * len(kinds) * size**2 > MAX_CELLS
        self.kinds = list(kinds.values())
        time, sent, memory = _sums(units.time), self._sent(size), self._memory(size)
        split = self._split(size)
        self.costs = []
        for limit, speed in kinds:
            compute = time / speed
            cost = compute + 2 * numpy.maximum(0, sent * units.picoseconds_per_byte - compute)
            cost[(memory > limit) | split] = numpy.inf
            cost[numpy.tril_indices(size + 1, -1)] = numpy.inf
            self.costs.append(cost)
        self._fill(size)

    def _sent(self, size: int) -> numpy.ndarray:
        """The matrix of sent bytes: [i, j] is what a stage of units i to j-1 sends to units from j on, each tensor
        once."""
        starts = numpy.zeros((size + 1, size + 1))
        for tensor in self.units.tensors:  # counts for all ends j after the source, up to the last reader
            starts[tensor.source, tensor.source + 1 : max(tensor.consumers) + 1] += tensor.num_bytes
        return numpy.cumsum(starts[::-1], axis=0)[::-1]

    def _memory(self, size: int) -> numpy.ndarray:
        memory, place = _sums(self.units.memory), numpy.arange(size + 1)
        for num_bytes, users in self.units.shared:
            following = numpy.array([min((u for u in users if u >= i), default=size + 1) for i in range(size + 1)])
            memory += num_bytes * (following[:, None] < place[None, :])
        return memory

    def _split(self, size: int) -> numpy.ndarray:
        """The matrix of forbidden stages: [i, j] is True if units i to j-1 contain only a part of a set that must stay
        on one device."""
        split = numpy.zeros((size + 1, size + 1), dtype=bool)
        place = numpy.arange(size + 1)
        for group in self.units.on_one_device:
            inside = sum((place[:, None] <= unit) & (unit < place[None, :]) for unit in group)
            split |= (inside > 0) & (inside < len(group))
        return split

    def _steps(self, state: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield each state with one device less than `state`, and the kind of that device."""
        if self.in_order:
            if state[0]:
                device = state[0] - 1
                yield (device,), next(kind for kind, each in enumerate(self.kinds) if device in each)
            return
        for kind, used in enumerate(state):
            if used:
                yield (*state[:kind], used - 1, *state[kind + 1 :]), kind

    def _fill(self, size: int) -> None:
        ranges = [self.units.num_devices + 1] if self.in_order else [len(each) + 1 for each in self.kinds]
        empty = numpy.full(size + 1, numpy.inf)
        empty[0] = 0
        self.best_of: dict[tuple[int, ...], numpy.ndarray] = {}
        for state in numpy.ndindex(*ranges):  # in lexicographic order, so states with one device less come first
            if not any(state):
                self.best_of[state] = empty
                continue
            # The diagonal of the costs is 0, so a device may stay without a stage.
            found = [
                numpy.maximum(self.best_of[before][:, None], self.costs[kind]).min(axis=0)
                for before, kind in self._steps(state)
            ]
            self.best_of[state] = numpy.minimum.reduce(found)
        self.full = tuple(each - 1 for each in ranges)

    def best(self) -> Sequential | None:
        size, least = len(self.units), self.best_of[self.full][len(self.units)]
        if not numpy.isfinite(least):
            return None
        self.steps, self.incumbent, self.worst = 0, None, numpy.inf
        self.exact = lru_cache(maxsize=None)(self._exact)
        self._descend(size, self.full, (), 0.0, first_only=True)
        self.steps = 0
        if self.worst > least * (1 + 1e-12):
            self._descend(size, self.full, (), 0.0, first_only=False)
        ends, kinds = zip(*self.incumbent, strict=True)
        proven = self.steps < MAX_STEPS and not self.in_order
        return Sequential(tuple(ends), self._devices(kinds), float(self.worst), proven)

    def _descend(
        self, end: int, state: tuple[int, ...], behind: tuple[tuple[int, int], ...], worst: float, *, first_only: bool
    ) -> bool:
        """Choose the stage that ends at `end`, then recursively the stages before it. Returns True to stop the
        search."""
        if end == 0:
            if worst < self.worst:
                self.worst, self.incumbent = worst, behind
            return first_only
        choices = []
        for before, kind in self._steps(state):
            bounds = numpy.maximum(self.best_of[before][: end + 1], self.costs[kind][: end + 1, end])
            for begin in numpy.flatnonzero(bounds < min(self.worst, numpy.inf)):
                choices.append((max(float(bounds[begin]), worst), -int(begin), before, kind))
        for bound, begin, before, kind in sorted(choices):
            if bound >= self.worst * (1 - 1e-12):
                break
            self.steps += 1
            if self.steps > MAX_STEPS:
                return True
            if -begin == end:
                stop = self._descend(end, before, behind, worst, first_only=first_only)
            else:
                cost = self.exact(-begin, end, tuple(each for each, _ in behind), self.costs[kind][-begin, end], kind)
                now = max(worst, cost)
                if now >= self.worst:
                    continue
                stop = self._descend(-begin, before, ((end, kind), *behind), now, first_only=first_only)
            if stop:
                return True
        return False

    def _exact(self, begin: int, end: int, ends: tuple[int, ...], bound: float, kind: int) -> float:
        """The exact time of a stage for the given ends of all later stages, in picoseconds."""
        units, num_bytes = self.units, 0
        for tensor in units.tensors:
            if begin <= tensor.source < end:
                stages = {numpy.searchsorted(ends, unit, side="right") for unit in tensor.consumers if unit >= end}
                num_bytes += tensor.num_bytes * len(stages)
        compute = sum(units.time[begin:end]) / units.speeds[self.kinds[kind][0]]
        return max(bound, compute + 2 * max(0.0, num_bytes * units.picoseconds_per_byte - compute))

    def _devices(self, kinds: Sequence[int]) -> tuple[int, ...]:
        left = [list(each) for each in self.kinds]
        return tuple(left[kind].pop(0) for kind in kinds)


def _sums(values: Sequence[int]) -> numpy.ndarray:
    """The matrix of sums: [i, j] is the sum of the values i to j-1."""
    start = numpy.cumsum([0, *values], dtype=float)
    return start[None, :] - start[:, None]


REACH = 3
"""The number of stages by which a unit may move in either direction."""


def improve(units: Units, placed: Placed, seconds: float) -> Placed | None:
    """The best partition within `REACH` that is found in `seconds`; None if none is found."""
    num_stages = len(placed.device_of)
    held = {unit for group in units.on_one_device for unit in group}
    number: dict[tuple[int, int], int] = {}
    for unit, stage in enumerate(placed.stage_of):
        reach = 0 if unit in held else REACH
        for each in range(max(0, stage - reach), min(num_stages - 1, stage + reach) + 1):
            number[unit, each] = len(number)
    longest = len(number)  # the variable that is the objective
    rows: list[dict[int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def add(row: dict[int, float], least: float, most: float) -> None:
        rows.append(row)
        low.append(least)
        high.append(most)

    for unit in range(len(units)):
        add({number[unit, s]: 1.0 for s in range(num_stages) if (unit, s) in number}, 1, 1)
    for unit, readers in enumerate(units.consumers):
        for reader in readers:  # a reader may be at or before a stage only if the unit is at or before that stage
            for last in range(num_stages - 1):
                row = {number[reader, s]: 1.0 for s in range(last + 1) if (reader, s) in number}
                if row:
                    row |= {number[unit, s]: -1.0 for s in range(last + 1) if (unit, s) in number}
                    add(row, -numpy.inf, 0)
    scale = max(1.0, sum(units.time) / units.num_devices)
    for device in range(units.num_devices):
        here = [(unit, s, index) for (unit, s), index in number.items() if placed.device_of[s] == device]
        times = {index: units.time[unit] / units.speeds[device] / scale for unit, _, index in here}
        add(times | {longest: -1.0}, -numpy.inf, 0)
        limit = units.limits[device]
        shared = sum(size for size, users in units.shared if _is_near(placed, users, device))
        add({index: units.memory[unit] / limit for unit, _, index in here}, -numpy.inf, 1 - shared / limit)
    chosen = _solve(rows, low, high, longest, seconds)
    if chosen is None:
        return None
    stage_of = [0] * len(units)
    for (unit, stage), index in number.items():
        if chosen[index] > 0.5:
            stage_of[unit] = stage
    return Placed(tuple(stage_of), placed.device_of)


def _is_near(placed: Placed, users: Sequence[int], device: int) -> bool:
    return any(placed.device_of[placed.stage_of[unit]] == device for unit in users)


def _solve(rows, low, high, longest: int, seconds: float) -> numpy.ndarray | None:
    row_of = [row for row, each in enumerate(rows) for _ in each]
    column_of = [column for each in rows for column in each]
    values = [value for each in rows for value in each.values()]
    matrix = coo_array((values, (row_of, column_of)), shape=(len(rows), longest + 1)).tocsr()
    cost, whole = numpy.zeros(longest + 1), numpy.ones(longest + 1)
    cost[longest], whole[longest] = 1, 0
    most = numpy.ones(longest + 1)
    most[longest] = numpy.inf
    options = {"time_limit": seconds, "mip_rel_gap": 1e-5}
    constraints = LinearConstraint(matrix, low, high)
    return milp(cost, constraints=constraints, integrality=whole, bounds=Bounds(0, most), options=options).x
