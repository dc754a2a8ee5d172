"""Reductions of a batch's gradients over replicas, tensor ranks and tied embeddings, their norm, and a warm-up.

Problem: megatron.core reduces gradients in `finalize_model_grads` and in `prepare_grads` of its optimizers. These work
on the buffers to which backwards write and on megatron.core's own groups, and take two or three collectives for norm
and overflow.

Solution: every method of `GradientReduction` takes the gradient slot of one finished batch, so the backwards of the
next batch may run at the same time.

Problem: NCCL connects a group at its first collective, and again at the first collective whose operation or size needs
another algorithm. Connecting allocates memory and waits for the whole device. During training the device may run a
receive that was posted ahead for data which the peer sends only after that collective. This is a deadlock.

Solution: `warm_up` uses each group before the first batch, while nothing else runs. It uses the chain's groups with
zero gradients, the optimizer's groups with the weights, which are equal on all replicas, and the tensor group with
small, medium and large tensors. All ranks use the groups in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron import backend
from megatron.backend.streams import streams_of
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import unwrap_model
from megatron.pipeline.runtime.stages.megatron.groups import (
    ChainGroups,
    is_formed,
    shares_out_experts,
    uses_nccl,
)
from megatron.pipeline.runtime.stages.megatron.optimizers import (
    GradientSlot,
    Owners,
    bucket_of,
    is_dense,
    is_distributed,
    named_parameters,
    optimizers_of,
)
from megatron.pipeline.runtime.stages.megatron.pipeline_position import tied_embeddings
from megatron.pipeline.runtime.update.gradients import norms_of, sum_of_squares


class GradientReduction:
    """Reduces gradient slots of one rank's chunks on the groups of the chain.

    A slot may hold the gradients of only some of the rank's parameters, for example where weights live on the host and
    gradients leave the device stage by stage. The other parameters are then ignored.

    Args:
        chunks: the model chunks of the rank.
        optimizer: megatron.core's optimizer of the chunks.
        buffers: megatron.core's gradient buffers, in the order of a slot's flat tensors. `over_data` takes the scaling
            factors and the buckets from them; empty if `over_data` is not called.
        groups: the groups of the chain.

    Attributes:
        counted: the parameters whose gradients this rank counts in the norm, in the order of the sum.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        buffers: Sequence[Any],
        groups: ChainGroups,
    ) -> None:
        self._optimizer = optimizer
        self._distributed = is_distributed(optimizer)
        self._buffers = buffers
        self._of_experts = {id(buffer) for chunk in chunks for buffer in chunk.expert_parallel_buffers}
        self._groups = groups
        self._per_token = chunks[0].config.calculate_per_token_loss
        self._embeddings = tied_embeddings(chunks)
        summed, averaged = tensor_parallel_parameters(chunks)
        self._over_tensor = ((summed, dist.ReduceOp.SUM), (averaged, dist.ReduceOp.AVG))
        self.counted = self._find_counted(chunks)

    def over_data(self, slot: GradientSlot) -> None:
        """Average a slot over the replicas, or sum it where megatron.core's buffers do not scale (per-token loss).

        Copies share the microbatches of a batch, so their gradients are summed. Ranks that share a microbatch of the
        program, parts of sequences or replicas that share out experts, scale their losses as if each had all of it, so
        their gradients are averaged.

        An expert that ranks share out has gradients from the tokens of all these ranks. So its gradients are summed
        only over the ranks with the same experts, but scaled by the factor for all replicas.

        With the distributed optimizer only this rank's shards are valid afterwards.
        """
        for buffer, flat in zip(self._buffers, slot.flats, strict=True):
            group = self._groups.expert_data if id(buffer) in self._of_experts else self._groups.data
            factor = self._scaling_factor(buffer)
            if factor != 1.0:
                flat.mul_(factor)
            if group is None:
                continue
            if not self._distributed:
                group.all_reduce(flat)
                continue
            for bucket in buffer.buckets:
                group.reduce_scatter(bucket_of(flat, bucket))

    def _scaling_factor(self, buffer: Any) -> float:
        """The factor of the gradients of one of megatron.core's buffers when they are summed over the replicas."""
        copies = self._groups.copies
        if copies is None:
            return buffer.gradient_scaling_factor
        return 1.0 if self._per_token else 1.0 / copies.sharing

    def over_embedding(self, slot: GradientSlot) -> None:
        """Add up the gradients of the word embedding that stages on two ranks share."""
        if not self._embeddings or self._groups.embedding is None:
            return
        [embedding] = self._embeddings
        if self._distributed and self._groups.copies is not None:
            self._over_shards_of_embedding(embedding, slot)
            return
        gradient = self._owned(embedding, slot)
        if gradient is not None:
            if not self._groups.adds_embedding:
                gradient.zero_()
            self._groups.embedding.all_reduce(gradient)

    def _over_shards_of_embedding(self, embedding: Parameter, slot: GradientSlot) -> None:
        """Add up the gradients of a shared embedding whose two stages cut it into different shards.

        They do so if they have different numbers of copies. Each element is valid on one copy of each stage.
        """
        whole, part = torch.zeros_like(slot.views[embedding]), self._owned(embedding, slot)
        if part is not None:
            own = self._ranges[embedding]
            whole.view(-1)[own.start : own.end].copy_(part)
        self._groups.embedding.all_reduce(whole)
        if part is not None:
            part.copy_(whole.view(-1)[own.start : own.end])

    @property
    def tied_key(self) -> Parameter:
        """The rank's copy of the word embedding that it shares with another rank."""
        [embedding] = self._embeddings
        return embedding

    def over_partial_embedding(self, partial: Tensor | GradientSlot, *, over_data: bool) -> None:
        """Add up the gradients of the shared embedding on the two stages that have it, in place.

        Args:
            partial: the gradient of the embedding, or a slot. With a slot, nothing is done if this rank shares no
                embedding with another rank.
            over_data: first reduce over the replicas, as the method `over_data` does.
        """
        if isinstance(partial, GradientSlot):
            if len(self._embeddings) != 1 or self._groups.embedding is None:
                return
            partial = partial.views[self.tied_key]
        gradient = partial
        if over_data and self._groups.data is not None:
            self._groups.data.all_reduce(gradient)
            gradient.mul_(self._scaling_factor(self._buffers[0]))
        if self._groups.embedding is not None:
            if not self._groups.adds_embedding:
                gradient.zero_()
            self._groups.embedding.all_reduce(gradient)

    def over_embedding_copies(self, slot: GradientSlot) -> None:
        """Give both copies of the shared embedding the sum of their gradients, if both are on this rank."""
        if len(self._embeddings) < 2:
            return
        first, last = (self._owned(each, slot) for each in self._embeddings)  # both have the same shards
        if first is not None:
            first.add_(last)
            last.copy_(first)

    def over_tensor(self, slot: GradientSlot) -> None:
        """Reduce the gradients of replicated parameters of which each tensor rank has computed a part.

        See `tensor_parallel_parameters`.
        """
        for all_params, operation in self._over_tensor:
            params = [param for param in all_params if param in slot.views]
            if params and self._groups.tensor is not None:
                views = [slot.views[param] for param in params]
                flat = torch.cat([view.reshape(-1) for view in views])
                self._groups.tensor.all_reduce(flat, operation)
                for view, reduced in zip(views, flat.split([view.numel() for view in views]), strict=True):
                    view.copy_(reduced.view_as(view))

    def local_norm_squared(self, slot: GradientSlot) -> Tensor:
        """The squared norm of the gradients that this rank counts. Each element of the model is counted on one rank.

        It is the sum in float64 of the squares of one FP32 norm per parameter. So the sum over all ranks depends on the
        cut into stages only in its last bits.
        """
        return self.norm_squared(self.local_norms(slot))

    def local_norms(self, slot: GradientSlot) -> dict[Parameter, Tensor]:
        """The norms of those gradients of the slot that this rank counts, FP32 scalars."""
        held = [param for param in self.counted if param in slot.views]
        parts = {param: part for param in held if (part := self._owned(param, slot)) is not None}
        return dict(zip(parts, norms_of(parts.values()), strict=True))

    def norm_squared(self, norms: Mapping[Parameter, Tensor]) -> Tensor:
        """The squared norm from the `local_norms` of all parameters that this rank counts."""
        ordered = [norms[param] for param in self.counted if param in norms]
        return sum_of_squares(ordered, device=backend.device())

    def _owned(self, param: Parameter, slot: GradientSlot) -> Tensor | None:
        """The part of a parameter's gradient that is valid on this rank after `over_data`; None if no part is valid."""
        view = slot.views[param]
        if not self._distributed:
            return view
        if param not in self._ranges:
            return None
        part = self._ranges[param]
        return view.view(-1)[part.start : part.end]

    def _find_counted(self, chunks: list[DistributedDataParallel]) -> list[Parameter]:
        params = [
            param
            for param in named_parameters(chunks).values()
            if param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param)
        ]
        self._ranges = {}
        for optimizer in optimizers_of(self._optimizer) if self._distributed else ():
            for param in () if optimizer.is_stub_optimizer else optimizer.model_param_gbuf_map:
                self._ranges[param] = optimizer._get_model_param_range_map(param)["param"]
        return params if self._distributed else [param for param in params if self._is_first_replica(param)]

    def _is_first_replica(self, param: Parameter) -> bool:
        group = self._groups.data if is_dense(param) else self._groups.expert_data
        return group is None or group.rank == 0


def tensor_parallel_parameters(chunks: list[DistributedDataParallel]) -> tuple[list[Parameter], list[Parameter]]:
    """The parameters whose gradients are summed over the tensor ranks, and those whose gradients are averaged.

    These follow megatron.core's rules. Tensor ranks hold copies of these parameters and compute different gradients of
    them. Without sequence parallelism megatron.core also sums the gradients of the norms of latents. They are left out
    here, because each rank computes their whole gradients.
    """
    summed, averaged = [], []
    for chunk in chunks:
        norms_heads = chunk.config.qk_layernorm and not chunk.config.multi_latent_attention
        for name, param in unwrap_model(chunk).named_parameters():
            if not param.requires_grad:
                continue
            if getattr(param, "average_gradients_across_tp_domain", False):
                averaged.append(param)
            elif (chunk.config.sequence_parallel and getattr(param, "sequence_parallel", False)) or (
                norms_heads and ("q_layernorm" in name or "k_layernorm" in name)
            ):
                summed.append(param)
    return summed, averaged


_BYTES = (8, 1 << 20, 1 << 26)
"""Small, medium and large: NCCL changes its algorithm within a node between these sizes."""


def probes() -> tuple[int, ...]:
    """The sizes in bytes with which a group is warmed up; without NCCL only the smallest size."""
    return _BYTES if uses_nccl() else _BYTES[:1]


@torch.no_grad()
def warm_up(
    chunks: list[DistributedDataParallel],
    reduction: GradientReduction,
    zeros: GradientSlot,
    groups: ChainGroups,
    *,
    distributed_optimizer: bool,
    owners: Owners | None = None,
    reduces_partial: bool = False,
) -> None:
    """Use once the chain's groups and megatron.core's groups of forwards, backwards and steps. Collective.

    Args:
        zeros: a slot to which no batch has added gradients yet.
        distributed_optimizer: the chunks have the distributed optimizer.
        owners: the owners of the parameters, if replicas own whole parameters.
        reduces_partial: predictions read the mean of the gradients over the replicas. They then reduce the gradient of
            a tied embedding over the replicas, and with the distributed optimizer the norm over the shards.
    """
    reduction.over_data(zeros)
    reduction.over_embedding(zeros)
    reduction.over_tensor(zeros)
    if reduces_partial:
        reduction.over_partial_embedding(zeros, over_data=True)
    if owners is not None:
        owners.exchange()  # as at the end of a step
    for chunk in chunks if distributed_optimizer else ():
        chunk.start_param_sync()  # as at the end of a step
        if reduces_partial:
            for group in (chunk.intra_dp_cp_group, chunk.intra_expt_dp_group):
                dist.all_reduce(_probe(_BYTES[0], 1), group=group)
    warm_up_common(chunks, groups)


@torch.no_grad()
def warm_up_common(chunks: Sequence[DistributedDataParallel], groups: ChainGroups) -> None:
    """Use once the groups that every kind of update uses, and wait until all work is done. Collective."""
    if groups.world is not None:
        groups.world.all_reduce(_probe(_BYTES[0], 1))  # for the norm, whose vector is small
    _warm_up_tensor_group(sequence_parallel=chunks[0].config.sequence_parallel)
    _warm_up_context_group()
    if shares_out_experts():
        _warm_up_expert_groups()
    if chunks[0].config.fp8 and chunks[0].config.fp8_recipe == "delayed":
        dist.all_reduce(
            _probe(_BYTES[0], 1), dist.ReduceOp.MAX, parallel_state.get_amax_reduction_group(with_context_parallel=True)
        )
    if groups.spans_default:
        dist.all_reduce(_probe(_BYTES[0], 1))  # for evaluations, and for stop requests between stretches
    streams = streams_of(backend.device())
    streams.finish(streams.record())


def _warm_up_tensor_group(*, sequence_parallel: bool) -> None:
    group = parallel_state.get_tensor_model_parallel_group()  # also if it has one rank: losses use it
    if not is_formed(group):
        return
    for num_bytes in probes():
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            dist.all_reduce(_probe(num_bytes, 1), operation, group=group)
        dist.broadcast(_probe(num_bytes, 1), dist.get_process_group_ranks(group)[0], group=group)
        if sequence_parallel:
            _exchange_shares(group, num_bytes)


def _warm_up_context_group() -> None:
    """Run the exchanges of local attention, and the sum of the numbers of tokens."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1 or not is_formed(group):
        return
    for num_bytes in probes():
        _exchange_shares(group, num_bytes, all_to_all=True)
    dist.all_reduce(_probe(_BYTES[0], 1), group=group)


def _warm_up_expert_groups() -> None:
    """Send tokens as dispatchers do: over the ranks that share out experts, and over these and their tensor ranks."""
    for group in (
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_tensor_and_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
    ):
        if not is_formed(group):
            continue
        for num_bytes in probes():
            _exchange_shares(group, num_bytes, all_to_all=True)
        dist.all_reduce(_probe(_BYTES[0], 1), group=group)  # of the norms of predictions


def _exchange_shares(group: dist.ProcessGroup, num_bytes: int, *, all_to_all: bool = False) -> None:
    """Use a group for a gather and a reduction of shares, and with `all_to_all` also for an exchange of shares."""
    whole = _probe(num_bytes, group.size())
    share = whole.chunk(group.size())[group.rank()].clone()
    dist.all_gather_into_tensor(whole, share, group=group)
    dist.reduce_scatter_tensor(share, whole, group=group)
    if all_to_all:
        dist.all_to_all_single(whole, whole.clone(), group=group)


def _probe(num_bytes: int, parts: int) -> Tensor:
    """FP32 zeros of at least `num_bytes` bytes, whose number of elements is divisible by `parts`."""
    length = -(-num_bytes // (4 * parts)) * parts
    return torch.zeros(length, device=backend.device())
