"""What the methods cut: the graph's computing nodes in an order of computation, as lists of whole numbers.

Inputs are gone, nodes that must stay in one stage are one unit, and coarsening merges units further. Times are
picoseconds and memory is whole bytes, so that adding and taking away is exact and a search that undoes a step is back
where it was.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx

from megatron.partition.graph import Graph, crowded
from megatron.partition.objective import Partition, stage_edges, tensors

PICOSECONDS = 10**9
"""Picoseconds in a millisecond."""


@dataclass(frozen=True)
class UnitTensor:
    """What `source` sends once to each stage with a consumer; the units are indices."""

    source: int
    num_bytes: int
    consumers: tuple[int, ...]


@dataclass(frozen=True)
class Units:
    """Units are numbered in an order of computation: each tensor goes from a lower to higher numbers.

    Attributes:
        nodes: ids of each unit's nodes.
        time: picoseconds at speed 1.
        memory: bytes of weights and of what is saved; without shared parameters.
        shared: of each set of shared parameters, its bytes on a device and the units that use it.
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
        """Picoseconds: no partition of these units is faster."""
        return max(sum(self.time) / sum(self.speeds), crowded(self.time, self.speeds))

    @cached_property
    def unequal(self) -> bool:
        return len(set(zip(self.limits, self.speeds, strict=True))) > 1

    @cached_property
    def picoseconds_per_byte(self) -> float:
        return self.graph.milliseconds_of(1) * PICOSECONDS

    def reordered(self, order: Sequence[int]) -> "Units":
        """The same, numbered in another order of computation."""
        number = {unit: index for index, unit in enumerate(order)}
        return self.merged([number[unit] for unit in range(len(self))])

    def merged(self, group_of: Sequence[int]) -> "Units":
        """Units by group, where groups are numbered from 0 in an order of computation."""
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
        return Units(
            self.graph,
            tuple(map(tuple, nodes)),
            tuple(time),
            tuple(memory),
            tuple(crossing),
            shared,
            tuple(each for each in together if len(each) > 1),
        )


def compiled(graph: Graph, plain: Iterable[int] = ()) -> Units:
    """The finest units. `plain`: ids of nodes that are counted without recompute."""
    plain = set(plain)
    order = [node for node in graph.order()]
    nodes = {node.id: node for node in graph.nodes}
    order = [node for node in order if not nodes[node].input]
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
    """Merge each group, and with it what lies on a path between two of its units: elsewhere it would make a circle."""
    if not groups:
        return units
    held = networkx.DiGraph()
    held.add_nodes_from(range(len(units)))
    held.add_edges_from((tensor.source, unit) for tensor in units.tensors for unit in tensor.consumers)
    for group in groups:
        held.add_edges_from(zip(group, [*group[1:], group[0]], strict=True))
    condensed = networkx.condensation(held)
    first = {each: min(data["members"]) for each, data in condensed.nodes(data=True)}
    order = networkx.lexicographical_topological_sort(condensed, key=first.__getitem__)
    number = {each: index for index, each in enumerate(order)}
    return units.merged([number[condensed.graph["mapping"][unit]] for unit in range(len(units))])


def _whole(num_bytes: float) -> int:
    return int(-(-num_bytes // 1))


def partition_of(units: Units, stage_of_unit: Sequence[int], device_of_stage: Sequence[int]) -> Partition:
    """Number the stages that compute in an order of computation; each input joins its first consumer's stage."""
    used = sorted(set(stage_of_unit))
    stages = {
        node: used.index(stage) for nodes, stage in zip(units.nodes, stage_of_unit, strict=True) for node in nodes
    }
    holds = [device_of_stage[stage] for stage in used]
    for node in units.graph.nodes:
        if node.input:
            stages[node.id] = 0
    edges = stage_edges(units.graph, Partition(stages, tuple(holds)))
    order = networkx.DiGraph()
    order.add_nodes_from(range(len(used)))
    order.add_edges_from(edges)
    number = {stage: index for index, stage in enumerate(networkx.lexicographical_topological_sort(order))}
    stages = {node: number[stage] for node, stage in stages.items()}
    for node in units.graph.nodes:
        if node.input:
            stages[node.id] = min((stages[b] for a, b in units.graph.edges if a == node.id), default=0)
    by_number = sorted(number, key=number.__getitem__)
    return Partition(stages, tuple(holds[stage] for stage in by_number))
