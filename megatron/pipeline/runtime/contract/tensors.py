"""What rooms of the runtime have to agree on about tensors: shapes, dtypes, alignment, who holds a storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes, at which torch aligns a CPU's memory; a GPU's allocations begin at multiples of it."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of the tensor that one edge of the pipeline carries per microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def has_gradients(dtype: torch.dtype) -> bool:
    """Whether tensors of the dtype can be differentiated: real and complex ones."""
    return dtype.is_floating_point or dtype.is_complex


def as_real(tensor: Tensor) -> Tensor:
    """The tensor; of a complex one a view of its real and imaginary parts, in a last dimension of 2."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_memory(tensor: Tensor) -> Tensor:
    """The tensor as its bytes say: contiguous, and with no conjugation or negation that is still to be computed."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def num_holders(tensor: Tensor) -> int:
    """Tensors that share the storage of `tensor`, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # `storage` counts too
