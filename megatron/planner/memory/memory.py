"""The memory that each rank of a pipeline needs, by part, and tables of it.

The parts are those of BPipe's equation 1, M(s) = W(s) + A(s) mu(s): the bytes of a parameter (`TrainingState`) times
the parameters of the rank (parameters.py), the bytes that a microbatch saves (activations.py) times the microbatches
that the program holds at once (demand.py). Buffers are added, on request including the buffers of this project's
communicators. Each part is counted at its own peak. Not counted: the allocator's fragmentation, the CUDA context, and
other communicators.

**NCCL's buffers.** NCCL gives every connection of a communicator buffers, one set for each CTA (channel) that may use
it, for its three protocols. The sizes are those of its sources (src/init.cc and src/include/device.h, 2.21 to 2.30)
where NCCL_BUFFSIZE, NCCL_LL_BUFFSIZE and NCCL_LL128_BUFFSIZE are not set:

    Simple   4 MiB
    LL       8 lines x 512 threads x 8 steps x 16 bytes       0.5 MiB
    LL128    120 elements x 640 threads x 8 steps x 8 bytes   4.7 MiB

This is an estimate that no GPU has confirmed. It counts one set of buffers for each CTA and each peer. NCCL's P2P
transport allocates that much between two GPUs of a node that send both ways. A link of a pipeline sends one way, so one
of its ends has less. Across nodes the buffers of point-to-point transfers are smaller (2 MiB a CTA), and the buffers of
a ring are larger, since both ends have buffers; a tree has up to three peers. Not counted: NCCL's memory beside buffers
(a few MiB a communicator), its use of NVLink SHARP, and the communicators of megatron.core, whose CTAs are not limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING

from megatron.documents import GIB
from megatron.documents.tables import plain_table
from megatron.pipeline.communicators import Communicator, chain_of_rank, links_of_rank, move_link_of_rank
from megatron.pipeline.program.edges import stages_by_rank
from megatron.planner.memory.activations import ActivationSetting
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.demand import Demand
from megatron.planner.memory.encoder_decoder import activations_of
from megatron.planner.memory.hosted import (
    Hosting,
    HostParts,
    device_inputs,
    gradient_buffers,
    host_parts,
    resident_weights,
)
from megatron.planner.memory.owned_parameters import fullest_part
from megatron.planner.memory.parameters import (
    TrainingState,
    largest_parameter,
    stage_expert_parameters,
    stage_matrices,
    stage_parameters,
)
from megatron.planner.memory.saved_on_rank import saved_on_rank, sizes_of_stages
from megatron.planner.memory.unquantized import unquantized_matrices

if TYPE_CHECKING:
    from rich.table import Table


SIMPLE_BYTES = 1 << 22
LL_BYTES = 8 * 512 * 8 * 16
LL128_BYTES = 120 * 640 * 8 * 8
CONNECTION_BYTES = SIMPLE_BYTES + LL_BYTES + LL128_BYTES
"""Bytes of the buffers for one CTA and one peer: 9.2 MiB."""


def buffer_bytes(communicators: Iterable[Communicator]) -> float:
    """Bytes of NCCL's buffers on a rank with the given communicators."""
    return float(sum(each.max_ctas * each.num_peers * CONNECTION_BYTES for each in communicators))


def communicator_bytes(
    rank_of_stage: tuple[int, ...],
    *,
    tensor: int,
    data: int,
    tied_embeddings: bool,
    sums_over_tensor: bool,
    moves: bool,
    tied_stages: tuple[int, int] = (0, -1),
) -> tuple[float, ...]:
    """Bytes of NCCL's buffers by rank of a pipeline. Only communicators that a rank uses have buffers.

    `moves`: saved activations move between the ranks of some pair, so that all pairs connect. `tied_stages`: those that
    share an embedding if embeddings are tied. The other arguments are those of `chain_of_rank`.
    """
    links = _link_bytes(rank_of_stage, moves)
    degrees = {"tensor": tensor, "pipeline": len(links), "data": data}
    ends = rank_of_stage[tied_stages[0]], rank_of_stage[tied_stages[1]]
    sums = {"tied_embeddings": tied_embeddings, "sums_over_tensor": sums_over_tensor, "ends": ends}
    return tuple(own + buffer_bytes(chain_of_rank(rank, **degrees, **sums)) for rank, own in enumerate(links))


@lru_cache(maxsize=1024)
def _link_bytes(rank_of_stage: tuple[int, ...], moves: bool) -> tuple[float, ...]:
    """Bytes of the links between stages by rank. The result is cached, since a search asks often for one pipeline."""
    own = []
    for rank in range(max(rank_of_stage) + 1):
        pair = move_link_of_rank(rank_of_stage, rank) if moves else ()
        own.append(buffer_bytes((*links_of_rank(rank_of_stage, rank), *pair)))
    return tuple(own)


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """The bytes on one GPU, by part.

    Attributes:
        weights: all live versions, and their FP8 copies if linear layers multiply in FP8. If versions are predictions,
            also the true weights, unless masters hold them.
        gradients: all gradient buffers, and copies that predictions read.
        optimizer: masters, moments, and FP32 copies of gradients that stay between steps; with optimistic steps also
            the copy of weights, masters and moments.
        activations: saved microbatches, including those accepted from the paired rank; on the last stage with their
            logits. If backwards are split, at the moment when `activations` and `deferred` together are largest.
        deferred: activations and gradients that W needs, of microbatches between I and W; 0 if backwards are whole.
        step: FP32 copies of gradients that only the step holds, after the last backward.
        workspace: recomputed activations of a backward, and the gradient of the logits; or the copies of a prediction,
            if they are larger. If backwards are split, the increase over the peak of `activations` and `deferred`.
        transfers: activations and gradients that arrive or leave, and one evicted microbatch while it is copied.
        communicators: NCCL's buffers for the communicators of this project's runtime; 0 if they are not counted.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    transfers: float
    communicators: float = 0.0
    deferred: float = 0.0
    step: float = 0.0

    @property
    def while_computing(self) -> float:
        """Bytes that are held at once while the pipeline computes."""
        return self.held - self.step

    @property
    def total(self) -> float:
        """The most bytes that are held at once: while the pipeline computes, or in the step."""
        moving = self.activations + self.deferred + self.workspace + self.transfers
        return self.while_computing + max(0.0, self.step - moving)

    @property
    def held(self) -> float:
        """The sum of all parts, whether held at once or not: the allocator's memory if it reuses no blocks."""
        return sum(_all_parts(self))


_all_parts = attrgetter(*(part.name for part in fields(MemoryParts)))


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one rank of a pipeline. Each tensor rank and replica of the rank needs the same.

    Attributes:
        stages, layers: the stages of the rank, and the number of layers of each.
        num_parameters: trained parameters of one tensor rank.
        saved_microbatches: the most microbatches that the rank holds at once, over all its stages.
        bytes_per_microbatch: bytes that the largest stage of the rank saves of one microbatch.
        parts: bytes on the GPU by part.
        host: bytes in the host's memory, if weights live there.
        swapped: bytes of saved activations in the host's memory.
    """

    rank: int
    stages: tuple[int, ...]
    layers: tuple[int, ...]
    num_parameters: int
    saved_microbatches: int
    bytes_per_microbatch: float
    parts: MemoryParts
    host: HostParts | None = None
    swapped: float = 0.0

    @property
    def total(self) -> float:
        """The most bytes on the GPU at once."""
        return self.parts.total


def estimate_memory(
    shape: Architecture,
    setting: ActivationSetting,
    state: TrainingState,
    demand: Demand,
    *,
    layers: Sequence[int],
    counts_communicators: bool = False,
    hosting: Hosting | None = None,
) -> tuple[RankMemory, ...]:
    """The memory of each rank of the pipeline.

    Args:
        shape: the model.
        setting: how activations are saved.
        state: the bytes of each parameter.
        demand: the number of microbatches, weight versions and gradient buffers that each rank holds.
        layers: the number of layers of each stage; together fewer than the model's for a lower bound.
        counts_communicators: count the buffers of this project's communicators over NCCL.
        hosting: how weights live on the host; `setting` must recompute whole stages. None: weights are on the device.
    """
    assert len(layers) == len(demand.rank_of_stage) and sum(layers) <= shape.num_layers
    assert hosting is None or setting.recompute.whole_stage
    activations = activations_of(shape, setting)
    parameters = stage_parameters(shape, setting.tensor, layers, setting.expert_degrees)
    of_experts = stage_expert_parameters(shape, layers, setting.expert_degrees)
    further = shape.further_of_stages(len(layers))
    sizes = sizes_of_stages(shape, setting, layers, demand)
    boundary = activations.boundary
    one_layer = activations.workspace(1, is_first=False, is_last=False)  # held by a forward that saves nothing
    embedding = shape.vocabulary_size // setting.tensor * shape.hidden_size
    matrices = stage_matrices(shape, setting.tensor, layers, setting.expert_degrees)
    uncast = unquantized_matrices(shape, setting, layers)
    fp8_copies = [state.fp8_copies(a - b) if setting.fp8 else 0.0 for a, b in zip(matrices, uncast, strict=True)]
    communicators = (0.0,) * demand.num_ranks
    if counts_communicators:
        communicators = communicator_bytes(
            demand.rank_of_stage, tensor=setting.tensor, data=state.data, tied_embeddings=shape.shares_embedding,
            sums_over_tensor=setting.sequence_parallel or shape.qk_norm, moves=any(demand.accepts),
            tied_stages=shape.tied_stages(len(layers)),
        )  # fmt: skip
    result = []
    for rank, stages in enumerate(stages_by_rank(demand.rank_of_stage)):
        count = sum(parameters[stage] for stage in stages if stage >= demand.num_frozen)
        experts = sum(of_experts[stage] for stage in stages if stage >= demand.num_frozen)
        frozen = sum(parameters[stage] for stage in stages if stage < demand.num_frozen)
        versions = demand.live_versions[rank]
        # One transfer is in flight on each side with a neighbour, besides receives that are not used yet.
        sides = _num_sides(stages, demand.rank_of_stage)
        unread = demand.unread[rank] if demand.num_frozen else 0
        trained = [stage for stage in stages if stage >= demand.num_frozen]
        largest_saved = max((sizes.saved[stage] for stage in trained), default=0.0)
        largest_moved = max((sizes.moved[stage] for stage in trained), default=0.0)
        moving = largest_moved if demand.evicts[rank] else 0.0
        in_a_forward = one_layer if len(trained) < len(stages) else 0.0
        copies, predicts = 0.0, demand.predicts[rank]
        of_rank = state
        if state.owns_parameters:
            of_rank = replace(state, owned_part=fullest_part(state, shape, setting.tensor, layers, trained))
        if predicts:
            ends = {"is_first": 0 in stages, "is_last": len(layers) - 1 in stages}
            largest = largest_parameter(shape, setting.tensor, **ends)
            copies = of_rank.prediction(count, largest=largest, experts=experts)
            if demand.repeats_update:
                copies = of_rank.last_update(count, experts=experts)
        saved = saved_on_rank(rank, sizes, demand)
        step = of_rank.copies_in_step(count, num_versions=versions, experts=experts)
        own_matrices = sum(matrices[stage] for stage in trained)
        iterating = of_rank.muon.bytes_of_step(shape, setting.tensor, setting.expert_degrees) if of_rank.muon else 0.0
        parts = MemoryParts(
            weights=of_rank.weights(count, num_versions=versions, predicts=predicts)
            + frozen * of_rank.weight_bytes
            + versions * sum(fp8_copies[stage] for stage in stages),
            gradients=of_rank.gradients(count, num_buffers=demand.gradient_buffers[rank] + demand.held_gradients[rank])
            + of_rank.gradients(embedding, num_buffers=demand.held_embeddings[rank]),
            optimizer=of_rank.optimizer(count, num_versions=versions, matrices=own_matrices, experts=experts)
            - step
            + of_rank.kept_state(count)
            + (iterating if versions > 1 else 0.0),
            activations=saved.activations,
            deferred=saved.deferred,
            workspace=max(copies, in_a_forward, saved.workspace),
            transfers=(demand.receives_ahead[rank] + sides + unread) * boundary * _outputs(shape, stages, further)
            + moving,
            communicators=communicators[rank],
            step=step + (iterating if versions == 1 else 0.0),
        )
        host = None
        if hosting:
            own = [parameters[stage] for stage in stages]
            parts = replace(
                parts,
                weights=resident_weights(of_rank, own, hosting.stages),
                gradients=gradient_buffers(of_rank, own),
                optimizer=0.0,
                step=0.0,
                activations=device_inputs(rank, boundary, demand, hosting),
                # Gradients of tied embeddings return to be summed after the last recomputation.
                workspace=max(
                    parts.workspace, of_rank.gradients(embedding, num_buffers=_num_tied(shape, stages, layers))
                ),
            )
            host = host_parts(rank, boundary, of_rank, own, own_matrices, demand.rank_of_stage, hosting)
        result.append(
            RankMemory(
                rank=rank,
                stages=stages,
                layers=tuple(layers[stage] for stage in stages),
                num_parameters=count,
                saved_microbatches=demand.saved_on_rank[rank],
                bytes_per_microbatch=largest_saved,
                parts=parts,
                host=host,
                swapped=demand.on_host[rank] * largest_moved if demand.on_host else 0.0,
            )
        )
    return tuple(result)


def _num_tied(shape: Architecture, stages: Sequence[int], layers: Sequence[int]) -> int:
    """The number of copies of a tied embedding on the given stages: two stages have one each."""
    ends = {*shape.tied_stages(len(layers))}
    return len(ends & set(stages)) if shape.shares_embedding and len(ends) > 1 else 0


def _outputs(shape: Architecture, stages: Sequence[int], further: Sequence[int]) -> int:
    """The most outputs in a transfer of the given stages: 1, and behind layers of multi-token prediction one more for
    each of these layers."""
    if shape.further is None:
        return 1
    last = len(further) - 1
    hands_on = any(further[stage] for each in stages for stage in (each - 1, each) if 0 <= stage < last)
    return 1 + shape.num_further * hands_on


def _num_sides(stages: Sequence[int], rank_of_stage: Sequence[int]) -> int:
    """The least number (1 or 2) of neighbours on other ranks, over the stages that have such neighbours; 0 if none
    has."""
    last = len(rank_of_stage) - 1
    beside = [[other for other in (stage - 1, stage + 1) if 0 <= other <= last] for stage in stages]
    sides = [
        sum(rank_of_stage[other] != rank_of_stage[stage] for other in others)
        for stage, others in zip(stages, beside, strict=True)
    ]
    return min(filter(None, sides), default=0)


def memory_table(memory: Sequence[RankMemory], *, plain: bool) -> Table:
    """A table with a row for each rank of a pipeline: parameters in millions, memory in GiB.

    `plain`: no lines and no colours.
    """
    rare = {name for name in ("deferred", "step") if not any(getattr(rank.parts, name) for rank in memory)}
    parts = [part.name for part in fields(MemoryParts) if part.name not in rare]
    several = any(len(rank.stages) > 1 for rank in memory)
    first = "rank: stages" if several else "stage"
    rows = [
        (
            f"{rank.rank}: {', '.join(map(str, rank.stages))}" if several else str(rank.rank),
            "+".join(map(str, rank.layers)), f"{rank.num_parameters / 1e6:.1f}",
            *(f"{getattr(rank.parts, name) / GIB:.2f}" for name in parts), f"{rank.total / GIB:.2f}",
            f"{rank.saved_microbatches} of {rank.bytes_per_microbatch / GIB:.3f}",
        )
        for rank in memory
    ]  # fmt: skip
    columns = (first, "layers", "params, M", *parts, "total", "saved microbatches")
    return plain_table(columns, rows, plain=plain, left=(first,))


def memory_as_dict(rank: RankMemory) -> dict:
    """A rank's estimate for JSON, in bytes."""
    return {
        "rank": rank.rank,
        "stages": list(rank.stages),
        "layers": list(rank.layers),
        "num_parameters": rank.num_parameters,
        "saved_microbatches": rank.saved_microbatches,
        "bytes_per_microbatch": rank.bytes_per_microbatch,
        **{f"{part.name}_bytes": getattr(rank.parts, part.name) for part in fields(MemoryParts)},
        "total_bytes": rank.total,
        "activations_on_host": rank.swapped,
    }
