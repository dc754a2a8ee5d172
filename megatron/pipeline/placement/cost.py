"""The cost of a placement: the traffic within nodes and between nodes, its seconds, and the transfers of BPipe's pairs.

Two questions need two numbers. *How long does the traffic take?* A GPU's link within its node and a node's link to the
network are each busy for bytes over bandwidth; the busiest link decides (`busiest_seconds`). *Which placement is
better?* A maximum says nothing about the other links, so placements are compared by the sum over all transfers. A
transfer across nodes gets its GPU's share of the node's bandwidth (`total_seconds`; BPipe's appendix B divides in the
same way).

Links send and receive at the same time. Only sent bytes are counted: every transfer has one sender. An all-reduce
enters and leaves each of its nodes once, since collective libraries order their rings by node.

Pairs. Two paired stages on one node have the bandwidth of a GPU within its node. A pair across nodes shares the node's
network with all GPUs of the node whose pairs also cross nodes (BPipe, appendix B: with t=8 on nodes of 8, the network
bandwidth divided by 8). Moving activations costs no time if the transfer of a microbatch's saved activations ends
within a forward, so a GPU needs the bandwidth of those bytes over the time of a forward (equations 7 to 9). In the
steady phase an eviction and the load beside it may together take a backward and a forward, that is three forwards,
which lowers the needed bandwidth to two thirds (equations 10 to 12). Units: bytes, seconds, and GB/s of 10^9 bytes per
second, for one GPU. The pairs are those of a pipeline that trains all its stages: stage s with stage p-1-s.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from megatron.pipeline.placement.mapping import Degrees, inverse
from megatron.pipeline.placement.topology import Topology
from megatron.pipeline.placement.traffic import Traffic, TrafficKind, point_to_point, ring_bytes
from megatron.pipeline.program.lane_order import pair_of


class Level(str, Enum):
    """The level of a transfer: within a node, or between nodes."""

    WITHIN_NODE = "within a node"
    BETWEEN_NODES = "between nodes"


@dataclass(frozen=True, kw_only=True)
class LevelCost:
    """The cost of one kind of traffic at one level, per iteration.

    Attributes:
        num_transfers: number of directed connections between two ranks.
        total_bytes: bytes of all transfers.
        busiest_seconds: seconds for which the busiest GPU (within a node) or node (between nodes) sends.
        total_seconds: sum of seconds over all transfers, each at the bandwidth of its GPU.
    """

    num_transfers: int
    total_bytes: float
    busiest_seconds: float
    total_seconds: float


NOTHING = LevelCost(num_transfers=0, total_bytes=0.0, busiest_seconds=0.0, total_seconds=0.0)


@dataclass(frozen=True)
class PlacementCost:
    """Costs by kind and level of traffic. `at` returns a cost of zeros for a kind that sends nothing at a level."""

    by_kind_and_level: dict[tuple[TrafficKind, Level], LevelCost]

    def at(self, kind: TrafficKind, level: Level) -> LevelCost:
        return self.by_kind_and_level.get((kind, level), NOTHING)

    @property
    def total_seconds(self) -> float:
        """The sum of seconds over all transfers of an iteration, which `optimized` minimizes."""
        return sum(cost.total_seconds for cost in self.by_kind_and_level.values())


def placement_cost(mapping: Sequence[int], degrees: Degrees, traffic: Traffic, topology: Topology) -> PlacementCost:
    """The cost of one iteration's traffic for a mapping of logical ranks to the slots of `topology`."""
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
    """A counter that adds up transfers by kind of traffic, level and link."""

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


_GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class PairNodes:
    """The nodes of an evictor stage and its acceptor, for each pair of ranks (one per replica and tensor rank)."""

    evictor: int
    acceptor: int
    nodes: tuple[tuple[int, int], ...]

    @property
    def num_crossing(self) -> int:
        return sum(first != second for first, second in self.nodes)


@dataclass(frozen=True, kw_only=True)
class PairTransfer:
    """The slowest transfer of one microbatch's saved activations between the ranks of a pair."""

    evictor: int
    acceptor: int
    crosses: bool
    num_bytes: float
    bandwidth: float
    """The bandwidth of the transfer in GB/s."""

    @property
    def seconds(self) -> float:
        return self.num_bytes / (self.bandwidth * _GIGA)


def pair_nodes(mapping: Sequence[int], degrees: Degrees, node_of_slot: Sequence[int]) -> list[PairNodes]:
    """The nodes of every pair of stages, including pairs that move nothing."""
    slots = inverse(mapping)

    def node(stage: int, data: int, tensor: int) -> int:
        return node_of_slot[slots[degrees.rank(tensor=tensor, data=data, stage=stage)]]

    members = [(data, tensor) for data in range(degrees.data) for tensor in range(degrees.tensor)]
    pairs = [(stage, pair_of(stage, degrees.pipeline)) for stage in range(degrees.pipeline // 2)]
    return [
        PairNodes(evictor=first, acceptor=second, nodes=tuple((node(first, *m), node(second, *m)) for m in members))
        for first, second in pairs
    ]


def pair_transfers(
    mapping: Sequence[int],
    degrees: Degrees,
    topology: Topology,
    moved: Sequence[float],
    evictors: Collection[int],
) -> list[PairTransfer]:
    """The slowest transfer of each pair whose first stage is in `evictors`.

    `moved`: bytes of one microbatch's saved activations, by stage.
    """
    moving = [pair for pair in pair_nodes(mapping, degrees, topology.node_of_slot) if pair.evictor in evictors]
    sharing = [0] * len(topology.nodes)  # by node: number of ranks whose pair crosses nodes
    for pair in moving:
        for first, second in pair.nodes:
            if first != second:
                sharing[first] += 1
                sharing[second] += 1
    found = []
    for pair in moving:
        bandwidths = [
            topology.bandwidth.within_node
            if first == second
            else topology.bandwidth.between_nodes / max(sharing[first], sharing[second])
            for first, second in pair.nodes
        ]
        slowest = min(range(len(bandwidths)), key=bandwidths.__getitem__)
        first, second = pair.nodes[slowest]
        found.append(
            PairTransfer(
                evictor=pair.evictor, acceptor=pair.acceptor, crosses=first != second, num_bytes=moved[pair.evictor],
                bandwidth=bandwidths[slowest],
            )
        )  # fmt: skip
    return found


def count_crossing(mapping: Sequence[int], degrees: Degrees, nodes: Sequence[int], evictors: Collection[int]) -> int:
    """The number of rank pairs across nodes whose first stage is in `evictors`. `nodes`: number of slots by node."""
    return sum(pair.num_crossing for pair in _moving(mapping, degrees, nodes, evictors))


def _moving(
    mapping: Sequence[int], degrees: Degrees, nodes: Sequence[int], evictors: Collection[int]
) -> list[PairNodes]:
    node_of_slot = [index for index, count in enumerate(nodes) for _ in range(count)]
    return [pair for pair in pair_nodes(mapping, degrees, node_of_slot) if pair.evictor in evictors]


def describe_crossing(mapping: Sequence[int], degrees: Degrees, nodes: Sequence[int], evictors: Collection[int]) -> str:
    """A sentence on the pairs of `evictors` across nodes, with the reason if no mapping avoids such pairs.

    `nodes`: number of slots by node.
    """
    moving = _moving(mapping, degrees, nodes, evictors)
    if not moving:
        return "no pair has activations to move"
    total = sum(len(pair.nodes) for pair in moving)
    crossing = count_crossing(mapping, degrees, nodes, evictors)
    text = f"{crossing} of {total} pairs that move activations cross a node"
    if crossing and degrees.tensor >= max(nodes):
        text += f", for tensor parallel size {degrees.tensor} fills a node of {max(nodes)} GPUs"
    return text


def describe_need(transfers: Sequence[PairTransfer], *, forward_seconds: float | None) -> str:
    """A sentence on the bandwidth that the slowest transfer needs and has. `transfers` must not be empty."""
    slowest = max(transfers, key=lambda transfer: transfer.seconds)
    where = "between nodes" if slowest.crosses else "within a node"
    has = (
        f"the transfer of a microbatch ({slowest.num_bytes / 1e9:.3g} GB) between stages {slowest.evictor} and "
        f"{slowest.acceptor} goes at {slowest.bandwidth:.4g} GB/s {where} and takes {1e3 * slowest.seconds:.4g} ms"
    )
    if forward_seconds is None:
        return f"{has}; it is hidden if a forward takes as long"
    need = required_bandwidth(slowest.num_bytes, forward_seconds=forward_seconds)
    relaxed = required_steady_bandwidth(slowest.num_bytes, forward_seconds=forward_seconds)
    return (
        f"{has}; to fit under a forward of {1e3 * forward_seconds:.4g} ms it needs {need:.4g} GB/s "
        f"({relaxed:.4g} GB/s where an eviction and a load share a backward and a forward): "
        + (
            "it fits"
            if slowest.bandwidth >= need
            else "only the latter fits"
            if slowest.bandwidth >= relaxed
            else "too slow"
        )
    )


def fits_under_forward(transfers: Sequence[PairTransfer], forward_seconds: float) -> bool:
    """Whether no transfer takes longer than a forward."""
    return all(transfer.seconds <= forward_seconds for transfer in transfers)


def required_bandwidth(num_bytes: float, *, forward_seconds: float) -> float:
    """The bandwidth in GB/s at which the transfer takes as long as a forward: equations 7 to 9.

    Raises ValueError if `forward_seconds` is not positive.
    """
    if not forward_seconds > 0:
        raise ValueError(f"{forward_seconds} is not positive; give a time above 0")
    return num_bytes / forward_seconds / _GIGA


def required_steady_bandwidth(num_bytes: float, *, forward_seconds: float) -> float:
    """The bandwidth in GB/s at which an eviction and a load take as long as a backward and a forward.

    These are equations 10 to 12. A backward counts as two forwards.
    """
    return 2 / 3 * required_bandwidth(num_bytes, forward_seconds=forward_seconds)
