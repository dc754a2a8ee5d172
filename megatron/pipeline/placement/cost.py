"""What a placement costs: which traffic stays inside a node, which crosses to another, and how long each takes.

Two questions need two numbers. *How long does it take?* A GPU's link inside its node and a node's link to the network
are each busy for bytes over bandwidth; the busiest one decides (`busiest_seconds`). *Which placement is better?* A
maximum says nothing about the other links, so placements are compared by the sum over all transfers, where one that
crosses goes at its GPU's share of the node's bandwidth (`total_seconds`; BPipe's appendix B divides in the same way).

Links send and receive at the same time, and only what is sent is counted: every transfer has one sender. An all-reduce
enters and leaves each of its nodes once, as a library that knows the nodes lays its ring.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from megatron.pipeline.placement.degrees import Degrees
from megatron.pipeline.placement.mapping import inverse
from megatron.pipeline.placement.topology import Topology
from megatron.pipeline.placement.traffic import Traffic, TrafficKind, point_to_point, ring_bytes


class Level(str, Enum):
    """Where a transfer goes."""

    WITHIN_NODE = "within a node"
    BETWEEN_NODES = "between nodes"


@dataclass(frozen=True, kw_only=True)
class LevelCost:
    """One kind of traffic at one level, per iteration.

    Attributes:
        num_transfers: directed connections between two ranks.
        total_bytes: what they send together.
        busiest_seconds: how long the busiest GPU (within a node) or node (between nodes) sends.
        total_seconds: the sum over all transfers, each at the bandwidth of its GPU.
    """

    num_transfers: int
    total_bytes: float
    busiest_seconds: float
    total_seconds: float


NOTHING = LevelCost(num_transfers=0, total_bytes=0.0, busiest_seconds=0.0, total_seconds=0.0)


@dataclass(frozen=True)
class PlacementCost:
    """Costs by kind and level; `at` gives zeros where nothing is sent."""

    by_kind_and_level: dict[tuple[TrafficKind, Level], LevelCost]

    def at(self, kind: TrafficKind, level: Level) -> LevelCost:
        return self.by_kind_and_level.get((kind, level), NOTHING)

    @property
    def total_seconds(self) -> float:
        """Sum over all transfers of an iteration; what `optimized` makes least."""
        return sum(cost.total_seconds for cost in self.by_kind_and_level.values())


def placement_cost(mapping: Sequence[int], degrees: Degrees, traffic: Traffic, topology: Topology) -> PlacementCost:
    """Cost of one iteration when logical ranks sit as `mapping` says in the slots of `topology`."""
    assert len(mapping) == degrees.world_size == topology.num_slots
    counter = _Counter(inverse(mapping), topology)
    stages, replicas, shards = range(degrees.pipeline), range(degrees.data), range(degrees.tensor)
    for edge in point_to_point(traffic):
        for data in replicas:
            for tensor in shards:
                first = degrees.rank(tensor=tensor, data=data, stage=edge.first_stage)
                second = degrees.rank(tensor=tensor, data=data, stage=edge.second_stage)
                counter.send(edge.kind, first, second, edge.bytes_each_way)
                counter.send(edge.kind, second, first, edge.bytes_each_way)
    for stage in stages:
        for tensor in shards:
            members = [degrees.rank(tensor=tensor, data=data, stage=stage) for data in replicas]
            counter.all_reduce(TrafficKind.DATA, members, traffic.data[stage])
        for data in replicas:
            members = [degrees.rank(tensor=tensor, data=data, stage=stage) for tensor in shards]
            counter.all_reduce(TrafficKind.TENSOR, members, traffic.tensor[stage])
    return counter.result()


class _Counter:
    """Adds up transfers by kind, level and link."""

    def __init__(self, slots: Sequence[int], topology: Topology) -> None:
        self._slots, self._topology = slots, topology
        self._links: dict[tuple[TrafficKind, Level], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._num_transfers: dict[tuple[TrafficKind, Level], int] = defaultdict(int)

    def send(self, kind: TrafficKind, sender: int, receiver: int, num_bytes: float) -> None:
        slot = self._slots[sender]
        node, target = self._topology.node_of_slot[slot], self._topology.node_of_slot[self._slots[receiver]]
        key, link = (kind, Level.WITHIN_NODE), slot
        if node != target:
            key, link = (kind, Level.BETWEEN_NODES), node
        self._links[key][link] += num_bytes
        self._num_transfers[key] += 1

    def all_reduce(self, kind: TrafficKind, members: list[int], num_bytes: float) -> None:
        if len(members) == 1 or not num_bytes:
            return
        ring = sorted(members, key=self._slots.__getitem__)  # slots are counted node by node
        for sender, receiver in zip(ring, ring[1:] + ring[:1], strict=True):
            self.send(kind, sender, receiver, ring_bytes(num_bytes, len(members)))

    def result(self) -> PlacementCost:
        topology, costs = self._topology, {}
        for (kind, level), links in self._links.items():
            if level is Level.WITHIN_NODE:
                seconds = [topology.seconds_within_node(num_bytes) for num_bytes in links.values()]
                total = sum(seconds)
            else:
                seconds = [topology.seconds_between_nodes(num_bytes) for num_bytes in links.values()]
                total = sum(each * topology.nodes[node].gpus for each, node in zip(seconds, links, strict=True))
            costs[kind, level] = LevelCost(
                num_transfers=self._num_transfers[kind, level],
                total_bytes=sum(links.values()),
                busiest_seconds=max(seconds),
                total_seconds=total,
            )
        return PlacementCost(costs)
