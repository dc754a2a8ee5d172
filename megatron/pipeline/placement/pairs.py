"""BPipe's pairs in a placement: which cross a node, at what bandwidth, and whether a transfer fits under a forward.

A pair whose stages share a node has the bandwidth of a GPU inside it. One that crosses shares the node's network with
all GPUs of the node whose pairs cross too (BPipe, appendix B: with t=8 on nodes of 8, the network divided by 8).

Balanced activations cost no time as long as the transfer of a microbatch's saved activations ends within a forward, so
these bytes over the time of a forward are the bandwidth that a GPU needs (equations 7 to 9). In the steady phase an
eviction and the load beside it may together take a backward and a forward, that is three forwards, which lowers the
need to two thirds (10 to 12). Units: bytes, seconds, and GB/s of 10^9 bytes per second, all of one GPU.

The pairs are those of a pipeline that trains all its stages, s with p-1-s.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron.pipeline.placement.degrees import Degrees
from megatron.pipeline.placement.mapping import inverse
from megatron.pipeline.placement.topology import Topology
from megatron.pipeline.program.move_order import pair_of

_GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class PairNodes:
    """An evictor stage and its acceptor: their nodes, for each pair of ranks (one for each replica and tensor rank)."""

    evictor: int
    acceptor: int
    nodes: tuple[tuple[int, int], ...]

    @property
    def num_crossing(self) -> int:
        return sum(first != second for first, second in self.nodes)


@dataclass(frozen=True, kw_only=True)
class PairTransfer:
    """The transfer of one microbatch's saved activations between the ranks of a pair, where it is slowest."""

    evictor: int
    acceptor: int
    crosses: bool
    num_bytes: float
    bandwidth: float
    """GB/s"""

    @property
    def seconds(self) -> float:
        return self.num_bytes / (self.bandwidth * _GIGA)


def pair_nodes(mapping: Sequence[int], degrees: Degrees, node_of_slot: Sequence[int]) -> list[PairNodes]:
    """Every pair of stages, also those that have nothing to move."""
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
    """The slowest transfer of each pair whose first stage is among `evictors`. `moved`: bytes of a move, by stage."""
    moving = [pair for pair in pair_nodes(mapping, degrees, topology.node_of_slot) if pair.evictor in evictors]
    sharing = [0] * len(topology.nodes)  # ranks of a node whose pairs cross
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
    """How many pairs of ranks cross a node, of those whose stage is among `evictors`. `nodes`: slots by node."""
    return sum(pair.num_crossing for pair in _moving(mapping, degrees, nodes, evictors))


def _moving(
    mapping: Sequence[int], degrees: Degrees, nodes: Sequence[int], evictors: Collection[int]
) -> list[PairNodes]:
    node_of_slot = [index for index, count in enumerate(nodes) for _ in range(count)]
    return [pair for pair in pair_nodes(mapping, degrees, node_of_slot) if pair.evictor in evictors]


def describe_crossing(mapping: Sequence[int], degrees: Degrees, nodes: Sequence[int], evictors: Collection[int]) -> str:
    """How many pairs of `evictors` cross a node, and why where no mapping could avoid it. `nodes`: slots by node."""
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
    """The bandwidth that the slowest transfer needs and has. `transfers` is not empty."""
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
    """GB/s at which the transfer takes as long as a forward: equations 7 to 9. Raises ValueError for a time of 0."""
    if not forward_seconds > 0:
        raise ValueError(f"{forward_seconds} is not positive; give a time above 0")
    return num_bytes / forward_seconds / _GIGA


def required_steady_bandwidth(num_bytes: float, *, forward_seconds: float) -> float:
    """GB/s at which an eviction and a load take as long as a backward and a forward, a backward being two forwards:
    equations 10 to 12."""
    return 2 / 3 * required_bandwidth(num_bytes, forward_seconds=forward_seconds)
