"""The memory of hosts: the bytes of all ranks of a node together, whether they fit, and the largest model that fits.

Each rank has weights, gradients and optimizer state of its part of the model on its host. Replicas on the same node
share a single store of weights, gradients and optimizer state, if they hold the same experts. Each rank stashes its own
inputs of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.pipeline.placement.mapping import NAMED, Degrees, standard
from megatron.planner.memory.architecture import Architecture, ExpertDegrees
from megatron.planner.memory.memory import GIB, RankMemory
from megatron.planner.memory.parameters import TrainingState, layer_parameters, stage_matrices, stage_parameters

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
    """The largest model of a shape that fits in the memory of the hosts: its numbers of layers and of parameters."""

    num_layers: int
    num_parameters: int


@dataclass(frozen=True)
class Crew:
    """The GPUs of a node with the same pipeline rank. `stores`: the number of different parts of the model among them,
    by tensor rank and experts."""

    gpus: int
    stores: int


Crowd = Mapping[int, Crew]
"""The GPUs of a node by pipeline rank."""


def crowds(
    degrees: Degrees, mapping: Sequence[int], node_of_slot: Sequence[int], experts: ExpertDegrees | None = None
) -> list[Crowd]:
    """The crowd of each node that has ranks. `mapping`: the logical rank of each slot. `experts`: how
    experts are split over ranks; None: they are not."""
    parts: dict[int, dict[int, list[tuple[int, int]]]] = {}
    own = experts or ExpertDegrees(tensor=degrees.tensor)
    for slot, rank in enumerate(mapping):
        place = degrees.coordinates(rank)
        of_experts = (place.data * degrees.tensor + place.tensor) // own.tensor % own.parallel
        parts.setdefault(node_of_slot[slot], {}).setdefault(place.stage, []).append((place.tensor, of_experts))
    return [
        {stage: Crew(len(there), len(set(there))) for stage, there in parts[node].items()} for node in sorted(parts)
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
    experts: ExpertDegrees | None = None,
) -> LargestModel | None:
    """The deepest model of a shape that nodes with `gib` GiB hold, with one layer a stage and equal ranks.

    If some layers have experts, each counts as the mean layer of `shape`.

    Args:
        experts: how experts are split over ranks; None: they are not.
        num_ranks: p.
        stash_of_layer: bytes of a layer's inputs on the host; 0: the stash is on the device.

    Returns:
        The largest model, or None if not even one layer on each rank fits.
    """

    def fits(of_rank: int) -> bool:
        return max(host_bytes_of(shape, state, crowd, of_rank, tensor, num_ranks, stash_of_layer, experts)
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
    if shape.experts is None:
        return LargestModel(num_layers=layers, num_parameters=sum(stage_parameters(shape, 1, (1,) * layers)))
    ends = sum(stage_parameters(shape, 1, (0,)))
    return LargestModel(num_layers=layers, num_parameters=round(ends + layers * _of_layer(shape, 1, None)))


def _of_layer(shape: Architecture, tensor: int, experts: ExpertDegrees | None) -> float:
    """Parameters of a layer on one rank: with experts, the mean over the layers of the model."""
    if shape.experts is None:
        return layer_parameters(shape, tensor)
    of_all, ends = (sum(stage_parameters(shape, tensor, (layers,), experts)) for layers in (shape.num_layers, 0))
    return (of_all - ends) / shape.num_layers


def host_bytes_of(
    shape: Architecture,
    state: TrainingState,
    crowd: Crowd,
    layers_of_rank: int,
    tensor: int,
    num_ranks: int,
    stash_of_layer: float,
    experts: ExpertDegrees | None = None,
) -> float:
    """Bytes of a node's host memory with `layers_of_rank` layers on each pipeline rank and one layer a stage."""
    first, *_, last = stage_parameters(shape, tensor, (0, 0)) if num_ranks * layers_of_rank > 1 else (
        stage_parameters(shape, tensor, (0,))[0], 0
    )  # fmt: skip
    total, of_layer = 0.0, _of_layer(shape, tensor, experts)
    for rank, crew in crowd.items():
        ends = [first] * (rank == 0) + [last] * (rank == num_ranks - 1)
        own = layers_of_rank * of_layer + sum(ends)
        largest = of_layer + (sum(ends) if layers_of_rank == 1 else max(ends, default=0))
        leaving = max(0, layers_of_rank - 1 - (rank == 0))
        held = state.weights(own, num_versions=1) + state.gradients(own, num_buffers=1)
        matrices = stage_matrices(shape, tensor, (shape.num_layers,), experts)[0] / shape.num_layers * layers_of_rank
        kept = held + state.optimizer(own, num_versions=1, matrices=matrices, stepped=largest)
        total += crew.stores * kept + crew.gpus * leaving * stash_of_layer
    return total
