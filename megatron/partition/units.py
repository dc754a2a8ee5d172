"""A graph as units in whole numbers, which all methods cut, and a partition that changes by one unit at a time.

Units are in an order of computation. Inputs are left out, nodes that must stay in one stage are one unit, and
coarsening merges units further. Times are integers of picoseconds and memory of bytes, so sums are exact, and a search
that undoes a step returns to the same state.

`PartitionState` prices a move without computing all sums again. Stages are in an order of computation: each unit's
stage is not before the stages of its producers. So the graph of stages never has a circle, and `window` gives the
stages to which a unit may move. A stage may be empty.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import networkx

from megatron.partition.graph import Graph, Partition, crowded, in_order, stage_graph, tensors, without_circles

PICOSECONDS = 10**9
"""Picoseconds in a millisecond."""


@dataclass(frozen=True)
class UnitTensor:
    """A tensor that unit `source` makes, and sends once to each stage with a consumer. Units are indices."""

    source: int
    num_bytes: int
    consumers: tuple[int, ...]


@dataclass(frozen=True)
class Units:
    """The units of a graph, numbered in an order of computation: each tensor goes from a lower to higher numbers.

    Attributes:
        nodes: for each unit, the ids of its nodes.
        time: for each unit, picoseconds at speed 1.
        memory: for each unit, bytes of weights and of saved tensors, without shared parameters.
        tensors: the tensors between units.
        shared: for each set of shared parameters, its bytes on a device and the units that use it.
        on_one_device: sets of units that must stay on one device.
    """

    graph: Graph
    nodes: tuple[tuple[int, ...], ...]
    time: tuple[int, ...]
    memory: tuple[int, ...]
    tensors: tuple[UnitTensor, ...]
    shared: tuple[tuple[int, tuple[int, ...]], ...]
    on_one_device: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def num_devices(self) -> int:
        return self.graph.num_devices

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        found: list[set[int]] = [set() for _ in self.nodes]
        for tensor in self.tensors:
            found[tensor.source].update(tensor.consumers)
        return tuple(tuple(sorted(each)) for each in found)

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        found: list[set[int]] = [set() for _ in self.nodes]
        for tensor in self.tensors:
            for unit in tensor.consumers:
                found[unit].add(tensor.source)
        return tuple(tuple(sorted(each)) for each in found)

    @cached_property
    def limits(self) -> tuple[int, ...]:
        return tuple(int(self.graph.memory_limit(device)) for device in range(self.num_devices))

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        return tuple(self.graph.speed(device) for device in range(self.num_devices))

    @cached_property
    def bound(self) -> float:
        """A lower bound of the objective of any partition of these units, in picoseconds."""
        return max(sum(self.time) / sum(self.speeds), crowded(self.time, self.speeds))

    @cached_property
    def unequal(self) -> bool:
        return len(set(zip(self.limits, self.speeds, strict=True))) > 1

    @cached_property
    def picoseconds_per_byte(self) -> float:
        return self.graph.milliseconds_of(1) * PICOSECONDS

    def reordered(self, order: Sequence[int]) -> "Units":
        """The same units, numbered in another order of computation."""
        number = {unit: index for index, unit in enumerate(order)}
        return self.merged([number[unit] for unit in range(len(self))])

    def merged(self, group_of: Sequence[int]) -> "Units":
        """Merge the units of each group into one unit. Groups must be numbered from 0 in an order of computation."""
        size = 1 + max(group_of)
        nodes: list[list[int]] = [[] for _ in range(size)]
        time, memory = [0] * size, [0] * size
        for unit, group in enumerate(group_of):
            nodes[group] += self.nodes[unit]
            time[group] += self.time[unit]
            memory[group] += self.memory[unit]
        crossing = []
        for tensor in self.tensors:
            source = group_of[tensor.source]
            consumers = {group_of[unit] for unit in tensor.consumers} - {source}
            assert all(unit > source for unit in consumers)
            if consumers:
                crossing.append(UnitTensor(source, tensor.num_bytes, tuple(sorted(consumers))))
        shared = tuple((size, tuple(sorted({group_of[u] for u in users}))) for size, users in self.shared)
        together = [tuple(sorted({group_of[u] for u in each})) for each in self.on_one_device]
        on_one_device = tuple(each for each in together if len(each) > 1)
        merged_nodes = tuple(map(tuple, nodes))
        return Units(self.graph, merged_nodes, tuple(time), tuple(memory), tuple(crossing), shared, on_one_device)


def compiled(graph: Graph, plain: Iterable[int] = ()) -> Units:
    """The finest units of a graph. `plain`: ids of the nodes whose costs are without recompute."""
    plain = set(plain)
    nodes = {node.id: node for node in graph.nodes}
    order = [node for node in graph.order() if not nodes[node].input]
    index = {node: position for position, node in enumerate(order)}
    weight = graph.weight_bytes_per_parameter
    units = Units(
        graph,
        tuple((node,) for node in order),
        tuple(round(nodes[node].milliseconds(plain=node in plain) * PICOSECONDS) for node in order),
        tuple(_whole(nodes[node].saved_bytes(plain=node in plain) + weight * nodes[node].params) for node in order),
        tuple(
            UnitTensor(index[source], _whole(size), tuple(sorted(index[node] for node in consumers)))
            for source, size, consumers in tensors(graph)
        ),
        tuple((_whole(weight * each.params), tuple(index[n] for n in each.nodes)) for each in graph.shared_parameters),
        tuple(tuple(index[n] for n in each.nodes) for each in graph.together if each.where == "device"),
    )
    return _held_together(units, [[index[n] for n in each.nodes] for each in graph.together if each.where == "stage"])


def _held_together(units: Units, groups: Sequence[Sequence[int]]) -> Units:
    """Merge each group with all units on a path between two of its units, which elsewhere would make a circle."""
    if not groups:
        return units
    held = networkx.DiGraph()
    held.add_nodes_from(range(len(units)))
    held.add_edges_from((tensor.source, unit) for tensor in units.tensors for unit in tensor.consumers)
    for group in groups:
        held.add_edges_from(zip(group, [*group[1:], group[0]], strict=True))
    return units.merged(without_circles(held))


def _whole(num_bytes: float) -> int:
    return int(-(-num_bytes // 1))


def partition_of(units: Units, stage_of_unit: Sequence[int], device_of_stage: Sequence[int]) -> Partition:
    """The partition of stages and devices of units. Stages are renumbered in an order of computation without empty
    stages, and each input joins the stage of its first consumer."""
    used = sorted(set(stage_of_unit))
    stages = {
        node: used.index(stage) for nodes, stage in zip(units.nodes, stage_of_unit, strict=True) for node in nodes
    }
    holds = [device_of_stage[stage] for stage in used]
    for node in units.graph.nodes:
        if node.input:
            stages[node.id] = 0
    number = in_order(stage_graph(units.graph, Partition(stages, tuple(holds))))
    stages = {node: number[stage] for node, stage in stages.items()}
    for node in units.graph.nodes:
        if node.input:
            stages[node.id] = min((stages[b] for a, b in units.graph.edges if a == node.id), default=0)
    by_number = sorted(number, key=number.__getitem__)
    return Partition(stages, tuple(holds[stage] for stage in by_number))


class Score(NamedTuple):
    """The score of a partition. Less is better, in the order of the fields.

    Attributes:
        excess: bytes above the memory limits.
        worst: the objective in picoseconds.
        uneven: the sum over devices of the squared time, in picoseconds squared.
    """

    excess: int
    worst: float
    uneven: float

    def better_than(self, other: "Score") -> bool:
        """Whether this score is less by more than rounding, so that a search that keeps only better scores ends."""
        if self.excess != other.excess:
            return self.excess < other.excess
        if abs(self.worst - other.worst) > 1e-9 * other.worst:
            return self.worst < other.worst
        return self.worst <= other.worst and self.uneven < other.uneven * (1 - 1e-9)


@dataclass(frozen=True)
class Placed:
    """A copy of a `PartitionState`: the stage of each unit and the device of each stage."""

    stage_of: tuple[int, ...]
    device_of: tuple[int, ...]


class PartitionState:
    """A partition of units that can change, with the sums that the objective needs.

    Args:
        stage_of: the stage of each unit, never before the stage of a producer.
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
        """Set stages and devices, and compute all sums anew."""
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
        devices = self.device_of
        return sum(devices[stage] != devices[source] for stage in readers)

    def placed(self) -> Placed:
        return Placed(tuple(self.stage_of), tuple(self.device_of))

    def window(self, unit: int) -> range:
        """The stages to which a unit may move, apart from the rule of `may_move` on devices."""
        stage_of = self.stage_of
        first = max((stage_of[each] for each in self.units.producers[unit]), default=0)
        last = min((stage_of[each] for each in self.units.consumers[unit]), default=len(self.device_of) - 1)
        return range(first, last + 1)

    def may_move(self, unit: int, stage: int) -> bool:
        if stage not in self.window(unit):
            return False
        return unit not in self._held or self.device_of[self.stage_of[unit]] == self.device_of[stage]

    def may_change_device(self, stage: int) -> bool:
        return self._held.isdisjoint(self.members[stage])

    def move(self, unit: int, stage: int) -> None:
        """Move a unit to a stage. Precondition: `may_move`. The time grows with the number of the unit's tensors."""
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
        """The largest T_s of each device, in picoseconds; 0 for a device without a stage."""
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
