"""A partition under change: what a move costs, without counting everything again.

Stages stand in a row, and each unit's stage is at or behind the stages of its producers. So whatever moves, the graph
of stages has no circle, and a move is legal where `window` says so. A stage may be empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.partition.units import Units


class Score(NamedTuple):
    """Less is better, in this order: bytes above the limits, the objective, then how uneven the devices are (all in
    picoseconds, the last squared)."""

    excess: int
    worst: float
    uneven: float

    def better_than(self, other: "Score") -> bool:
        """By more than rounding: so a search that only takes what is better comes to an end."""
        if self.excess != other.excess:
            return self.excess < other.excess
        if abs(self.worst - other.worst) > 1e-9 * other.worst:
            return self.worst < other.worst
        return self.worst <= other.worst and self.uneven < other.uneven * (1 - 1e-9)


@dataclass(frozen=True)
class Placed:
    """A copy of what a State holds."""

    stage_of: tuple[int, ...]
    device_of: tuple[int, ...]


class PartitionState:
    """Units in stages on devices, with the sums that the objective needs.

    Args:
        stage_of: the stage of each unit, never below that of a producer.
        device_of: the device of each stage.
    """

    def __init__(self, units: Units, stage_of: Sequence[int], device_of: Sequence[int]) -> None:
        self.units = units
        self._made: list[list[int]] = [[] for _ in units.nodes]
        self._read: list[list[int]] = [[] for _ in units.nodes]
        for number, tensor in enumerate(units.tensors):
            self._made[tensor.source].append(number)
            for unit in tensor.consumers:
                self._read[unit].append(number)
        self._shared_of: dict[int, list[int]] = {}
        for number, (_, users) in enumerate(units.shared):
            for unit in users:
                self._shared_of.setdefault(unit, []).append(number)
        self._held = {unit for group in units.on_one_device for unit in group}
        self.restore(Placed(tuple(stage_of), tuple(device_of)))

    def restore(self, placed: Placed) -> None:
        """Count everything anew."""
        units = self.units
        self.stage_of, self.device_of = list(placed.stage_of), list(placed.device_of)
        self.time, self.memory = [0] * units.num_devices, [0] * units.num_devices
        self.members: list[set[int]] = [set() for _ in self.device_of]
        for unit, stage in enumerate(self.stage_of):
            device = self.device_of[stage]
            self.time[device] += units.time[unit]
            self.memory[device] += units.memory[unit]
            self.members[stage].add(unit)
        self._users = [[0] * units.num_devices for _ in units.shared]
        for number, (size, users) in enumerate(units.shared):
            for unit in users:
                device = self.device_of[self.stage_of[unit]]
                self.memory[device] += 0 if self._users[number][device] else size
                self._users[number][device] += 1
        self._readers: list[dict[int, int]] = []
        self.sent = [0] * len(self.device_of)
        for tensor in units.tensors:
            readers: dict[int, int] = {}
            for unit in tensor.consumers:
                stage = self.stage_of[unit]
                assert stage >= self.stage_of[tensor.source]
                readers[stage] = readers.get(stage, 0) + 1
            self._readers.append(readers)
            source = self.stage_of[tensor.source]
            self.sent[source] += tensor.num_bytes * self._receivers(readers, source)

    def _receivers(self, readers: dict[int, int], source: int) -> int:
        device, devices = self.device_of[source], self.device_of
        return sum(devices[stage] != device for stage in readers)

    def placed(self) -> Placed:
        return Placed(tuple(self.stage_of), tuple(self.device_of))

    def window(self, unit: int) -> tuple[int, int]:
        """The first and the last stage in which a unit can stand."""
        stage_of = self.stage_of
        return (
            max((stage_of[each] for each in self.units.producers[unit]), default=0),
            min((stage_of[each] for each in self.units.consumers[unit]), default=len(self.device_of) - 1),
        )

    def may_move(self, unit: int, stage: int) -> bool:
        low, high = self.window(unit)
        if not low <= stage <= high:
            return False
        return unit not in self._held or self.device_of[self.stage_of[unit]] == self.device_of[stage]

    def may_change_device(self, stage: int) -> bool:
        return self._held.isdisjoint(self.members[stage])

    def move(self, unit: int, stage: int) -> None:
        """Costs as much as the unit has tensors; the caller has asked `may_move`."""
        units, devices, before = self.units, self.device_of, self.stage_of[unit]
        old, new = devices[before], devices[stage]
        for number in self._made[unit]:
            readers, size = self._readers[number], units.tensors[number].num_bytes
            self.sent[before] -= size * self._receivers(readers, before)
            self.sent[stage] += size * self._receivers(readers, stage)
        for number in self._read[unit]:
            tensor, readers = units.tensors[number], self._readers[number]
            source = self.stage_of[tensor.source]
            if readers[before] == 1:
                del readers[before]
                if devices[source] != old:
                    self.sent[source] -= tensor.num_bytes
            else:
                readers[before] -= 1
            if stage not in readers:
                readers[stage] = 0
                if devices[source] != new:
                    self.sent[source] += tensor.num_bytes
            readers[stage] += 1
        self.stage_of[unit] = stage
        self.members[before].discard(unit)
        self.members[stage].add(unit)
        if old == new:
            return
        self.time[old] -= units.time[unit]
        self.time[new] += units.time[unit]
        self.memory[old] -= units.memory[unit]
        self.memory[new] += units.memory[unit]
        for number in self._shared_of.get(unit, ()):
            users, size = self._users[number], units.shared[number][0]
            users[old] -= 1
            self.memory[old] -= 0 if users[old] else size
            self.memory[new] += 0 if users[new] else size
            users[new] += 1

    def set_devices(self, device_of: Sequence[int]) -> None:
        self.restore(Placed(tuple(self.stage_of), tuple(device_of)))

    def device_times(self) -> list[float]:
        """The largest T_s of each device, in picoseconds; one without a stage has 0."""
        compute = [time / speed for time, speed in zip(self.time, self.units.speeds, strict=True)]
        times, rate = list(compute), self.units.picoseconds_per_byte
        for stage, num_bytes in enumerate(self.sent):
            if num_bytes:
                device = self.device_of[stage]
                charged = 2 * num_bytes * rate - compute[device]
                if charged > times[device]:
                    times[device] = charged
        return times

    def score(self) -> Score:
        excess = 0
        for used, limit in zip(self.memory, self.units.limits, strict=True):
            if used > limit:
                excess += used - limit
        times = self.device_times()
        return Score(excess, max(times), sum(time * time for time in times))
