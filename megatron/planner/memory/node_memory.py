"""The memory of hosts: the bytes of all ranks of a node together, whether they fit, and the largest model that fits.

Each rank has weights, gradients and optimizer state of its part of the model on its host. Replicas on the same node
share a single store of weights, gradients and optimizer state. Each rank stashes its own inputs of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.pipeline.placement.mapping import NAMED, Degrees, standard
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.memory import GIB, RankMemory
from megatron.planner.memory.parameters import TrainingState, layer_parameters, matrix_parameters, stage_parameters

_MOST_LAYERS = 1 << 30


@dataclass(frozen=True, kw_only=True)
class HostVerdict:
    """The verdict whether hosts have enough memory, judged by the fullest node.

    `spare_gib`: the free GiB of that node; negative: the missing GiB.
    """

    node: int
    needed_gib: float
    spare_gib: float

    @property
    def fits(self) -> bool:
        return self.spare_gib >= 0


@dataclass(frozen=True, kw_only=True)
class LargestModel:
    """The largest model of a shape that fits in the memory of hosts: its layers, and the parameters of all of it."""

    num_layers: int
    num_parameters: int


@dataclass(frozen=True)
class Crew:
    """The GPUs of a node with the same pipeline rank. `stores`: the number of different tensor ranks among them."""

    gpus: int
    stores: int


Crowd = Mapping[int, Crew]
"""The GPUs of a node by pipeline rank."""


def crowds(degrees: Degrees, mapping: Sequence[int], node_of_slot: Sequence[int]) -> list[Crowd]:
    """The crowd of each node that has ranks. `mapping`: the logical rank of each slot."""
    tensor_ranks: dict[int, dict[int, list[int]]] = {}
    for slot, rank in enumerate(mapping):
        place = degrees.coordinates(rank)
        tensor_ranks.setdefault(node_of_slot[slot], {}).setdefault(place.stage, []).append(place.tensor)
    return [
        {stage: Crew(len(there), len(set(there))) for stage, there in tensor_ranks[node].items()}
        for node in sorted(tensor_ranks)
    ]


def crowds_by_name(degrees: Degrees, rank_mapping: str, node_of_slot: Sequence[int]) -> list[Crowd]:
    """The crowds of `crowds` for a mapping given by its name.

    A mapping that depends on more than the degrees is taken as standard.
    """
    return crowds(degrees, NAMED.get(rank_mapping, standard)(degrees), node_of_slot)


def fewest_sharing(nodes: Sequence[Crowd]) -> int:
    """The least number of replicas that share a store. Each of n replicas steps 1 / n of its store."""
    return min(crew.gpus // crew.stores for crowd in nodes for crew in crowd.values())


def host_bytes(memory: Sequence[RankMemory], nodes: Sequence[Crowd]) -> list[float]:
    """Bytes of host memory that the ranks of each node take; 0 for ranks with weights on the device."""
    parts = [rank.host for rank in memory]
    return [
        sum(
            crew.stores * (part.total - part.stash) + crew.gpus * part.stash
            for stage, crew in crowd.items()
            if (part := parts[stage])
        )
        for crowd in nodes
    ]


def judge_host(memory: Sequence[RankMemory], nodes: Sequence[Crowd], gib: float) -> HostVerdict:
    """The verdict on nodes with `gib` GiB of host memory each."""
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
    """The deepest model of a shape that nodes with `gib` GiB hold, with one layer a stage and equal ranks.

    Args:
        num_ranks: p.
        stash_of_layer: bytes of a layer's inputs on the host; 0: the stash is on the device.

    Returns:
        The largest model, or None if not even one layer on each rank fits.
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
    """Bytes of a node's host memory with `layers_of_rank` layers on each pipeline rank and one layer a stage."""
    first, *_, last = stage_parameters(shape, tensor, (0, 0)) if num_ranks * layers_of_rank > 1 else (
        stage_parameters(shape, tensor, (0,))[0], 0
    )  # fmt: skip
    total = 0.0
    for rank, crew in crowd.items():
        ends = [first] * (rank == 0) + [last] * (rank == num_ranks - 1)
        own = layers_of_rank * layer_parameters(shape, tensor) + sum(ends)
        largest = layer_parameters(shape, tensor) + (sum(ends) if layers_of_rank == 1 else max(ends, default=0))
        leaving = max(0, layers_of_rank - 1 - (rank == 0))
        held = state.weights(own, num_versions=1) + state.gradients(own, num_buffers=1)
        matrices = matrix_parameters(shape, tensor, layers_of_rank)
        kept = held + state.optimizer(own, num_versions=1, matrices=matrices, stepped=largest)
        total += crew.stores * kept + crew.gpus * leaving * stash_of_layer
    return total
