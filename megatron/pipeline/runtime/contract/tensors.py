"""What rooms of the runtime have to agree on about tensors: shapes, alignment, who holds a storage."""

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


def num_holders(tensor: Tensor) -> int:
    """Tensors that share the storage of `tensor`, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # `storage` counts too
