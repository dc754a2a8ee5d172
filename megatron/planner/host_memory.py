"""The memory of hosts: what all ranks of a node take of it together, whether that fits, and how large a model would.

Each rank has its own weights, gradients and optimizer state on its host, replicas too. So a node needs the sum over its
GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.placement.degrees import Degrees
from megatron.planner.architecture import Architecture
from megatron.planner.memory import GIB, RankMemory
from megatron.planner.parameters import layer_parameters, stage_parameters
from megatron.planner.state import TrainingState

_MOST_LAYERS = 1 << 30


@dataclass(frozen=True, kw_only=True)
class HostVerdict:
    """Whether hosts have the memory, by the fullest node. `spare_gib`: what it leaves; negative is missing."""

    node: int
    needed_gib: float
    spare_gib: float

    @property
    def fits(self) -> bool:
        return self.spare_gib >= 0


@dataclass(frozen=True, kw_only=True)
class LargestModel:
    """The most layers of a shape that hosts have the memory for; and parameters, of the whole model."""

    num_layers: int
    num_parameters: int


Crowd = Counter[int]
"""Pipeline rank -> how many of a node's GPUs stand there: tensor ranks and replicas of it."""


def crowds(degrees: Degrees, mapping: Sequence[int], node_of_slot: Sequence[int]) -> list[Crowd]:
    """Of each node that has ranks. `mapping`: logical rank by slot."""
    found: dict[int, Crowd] = {}
    for slot, rank in enumerate(mapping):
        found.setdefault(node_of_slot[slot], Counter())[degrees.coordinates(rank).stage] += 1
    return [found[node] for node in sorted(found)]


def host_bytes(memory: Sequence[RankMemory], nodes: Sequence[Crowd]) -> list[float]:
    """Bytes of each node's memory that its ranks take; 0 where weights live on the device."""
    of_rank = [rank.host.total if rank.host else 0.0 for rank in memory]
    return [sum(count * of_rank[stage] for stage, count in crowd.items()) for crowd in nodes]


def judge_host(memory: Sequence[RankMemory], nodes: Sequence[Crowd], gib: float) -> HostVerdict:
    """The verdict on nodes with this much memory, in GiB."""
    needed = host_bytes(memory, nodes)
    node = max(range(len(needed)), key=needed.__getitem__)
    return HostVerdict(node=node, needed_gib=needed[node] / GIB, spare_gib=gib - needed[node] / GIB)


def largest_model(
    shape: Architecture,
    state: TrainingState,
    nodes: Sequence[Crowd],
    gib: float,
    *,
    tensor: int,
    num_ranks: int,
    stash_of_layer: float = 0.0,
) -> LargestModel | None:
    """The deepest model of this shape that nodes with so many GiB hold, with a layer a stage and as many on every rank.

    Args:
        num_ranks: p.
        stash_of_layer: bytes of a layer's inputs on the host, where the stash is there.

    Returns:
        None where not even a layer for each rank fits.
    """

    def fits(of_rank: int) -> bool:
        return max(host_bytes_of(shape, state, crowd, of_rank, tensor, num_ranks, stash_of_layer)
                   for crowd in nodes) <= gib * GIB  # fmt: skip

    if not fits(1):
        return None
    low, high = 1, 2
    while high < _MOST_LAYERS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    layers = num_ranks * low
    return LargestModel(num_layers=layers, num_parameters=sum(stage_parameters(shape, 1, (1,) * layers)))


def host_bytes_of(
    shape: Architecture,
    state: TrainingState,
    crowd: Crowd,
    layers_of_rank: int,
    tensor: int,
    num_ranks: int,
    stash_of_layer: float,
) -> float:
    """Bytes of a node's memory with so many layers on each pipeline rank, a layer a stage."""
    first, *_, last = stage_parameters(shape, tensor, (0, 0)) if num_ranks * layers_of_rank > 1 else (
        stage_parameters(shape, tensor, (0,))[0], 0
    )  # fmt: skip
    total = 0.0
    for rank, count in crowd.items():
        own = layers_of_rank * layer_parameters(shape, tensor) + (rank == 0) * first + (rank == num_ranks - 1) * last
        leaving = max(0, layers_of_rank - 1 - (rank == 0))
        held = state.weights(own, num_versions=1) + state.gradients(own, num_buffers=1)
        total += count * (held + state.optimizer(own, num_versions=1) + leaving * stash_of_layer)
    return total
