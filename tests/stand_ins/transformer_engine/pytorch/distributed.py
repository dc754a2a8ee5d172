"""Collectives along the sequence, and names of recomputation and random numbers that megatron.core imports."""

import torch
from torch import Tensor

from .._release import missing

[CudaRNGStatesTracker, checkpoint, activation_recompute_forward] = missing(
    "CudaRNGStatesTracker", "checkpoint", "activation_recompute_forward"
)  # the tracker is for CUDA graphs; recomputation comes here with FP8 only


def gather_first_dimension(tensor: Tensor, group) -> Tensor:
    result = tensor.new_empty((tensor.shape[0] * group.size(), *tensor.shape[1:]))
    torch.distributed.all_gather_into_tensor(result, tensor.contiguous(), group=group)
    return result


def scatter_sum_first_dimension(tensor: Tensor, group) -> Tensor:
    result = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    torch.distributed.reduce_scatter_tensor(result, tensor.contiguous(), group=group)
    return result


def sum_of(tensor: Tensor, group) -> Tensor:
    torch.distributed.all_reduce(tensor, group=group)
    return tensor
