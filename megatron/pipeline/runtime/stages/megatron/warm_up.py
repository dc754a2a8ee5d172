"""Every collective of training, once, before the first batch.

Problem: NCCL connects a group with its first collective, and again with the first one that takes another algorithm,
which the operation and the size decide. Connecting allocates and waits for the whole device. In the middle of training
receives spin there, posted ahead for what the peer may send only after that very collective: nobody goes on.

Solution: use each group as training will while nothing else runs: the chain's on gradients of a batch that are zero,
the optimizer's on the weights, which are equal on all replicas, the tensor ranks' in small, in the middle and in large.
All ranks go through the groups in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import backend
from megatron.backend.streams import streams_of
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.pipeline.runtime.stages.megatron.gradients import GradientSlot
from megatron.pipeline.runtime.stages.megatron.groups import ChainGroup, uses_nccl
from megatron.pipeline.runtime.stages.megatron.reduction import GradientReduction

_BYTES = (8, 1 << 20, 1 << 26)
"""Below, between and above where NCCL changes its algorithm within a node."""


@torch.no_grad()
def warm_up(
    chunks: list[DistributedDataParallel],
    reduction: GradientReduction,
    zeros: GradientSlot,
    world: ChainGroup | None,
    *,
    distributed_optimizer: bool,
    reduces_partial: bool = False,
) -> None:
    """Use the chain's groups, and those of megatron.core's that forwards, backwards and steps use. Collective.

    `zeros`: gradients that no batch has begun to add to. `reduces_partial`: predictions read the mean over the
    replicas, of tied embeddings too, and with the distributed optimizer its norm.
    """
    reduction.over_data(zeros)
    reduction.over_embedding(zeros)
    reduction.over_tensor(zeros)
    if reduces_partial:
        reduction.over_partial_embedding(zeros, over_data=True)
    for chunk in chunks if distributed_optimizer else ():
        chunk.start_param_sync()  # what a step ends with
        if reduces_partial:
            dist.all_reduce(_probe(_BYTES[0], 1), group=chunk.intra_dp_cp_group)
    warm_up_common(chunks, world)


@torch.no_grad()
def warm_up_common(chunks: Sequence[DistributedDataParallel], world: ChainGroup | None) -> None:
    """Use the groups that every update's batches use, and wait until all is done. Collective."""
    if world is not None:
        world.all_reduce(_probe(_BYTES[0], 1))  # the norm's is small
    _warm_up_tensor_group(sequence_parallel=chunks[0].config.sequence_parallel)
    dist.all_reduce(_probe(_BYTES[0], 1))  # evaluations, and stop requests between stretches
    streams = streams_of(backend.device())
    streams.finish(streams.record())


def _warm_up_tensor_group(*, sequence_parallel: bool) -> None:
    group = parallel_state.get_tensor_model_parallel_group()  # of one rank, too: its losses go through it
    for num_bytes in _BYTES if uses_nccl() else _BYTES[:1]:
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            dist.all_reduce(_probe(num_bytes, 1), operation, group=group)
        dist.broadcast(_probe(num_bytes, 1), dist.get_process_group_ranks(group)[0], group=group)
        if sequence_parallel:
            whole = _probe(num_bytes, group.size())
            share = whole.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(whole, share, group=group)
            dist.reduce_scatter_tensor(share, whole, group=group)


def _probe(num_bytes: int, parts: int) -> Tensor:
    """Zeros of at least so many bytes, in equal parts."""
    length = -(-num_bytes // (4 * parts)) * parts
    return torch.zeros(length, device=backend.device())
