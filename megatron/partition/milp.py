"""A mixed integer program (scipy's HiGHS) that improves a given partition by moving units between its stages.

Stages keep their devices, and each unit may move by a few stages. The least possible time of the busiest device is
found exactly, under the limits of memory and the order of stages. The program does not contain transfers, so the result
is priced like that of every other method.
"""

from collections.abc import Sequence

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from megatron.partition.units import Placed, Units

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
    result = milp(
        cost,
        constraints=LinearConstraint(matrix, low, high),
        integrality=whole,
        bounds=Bounds(numpy.zeros(longest + 1), most),
        options={"time_limit": seconds, "mip_rel_gap": 1e-5},
    )
    return result.x
