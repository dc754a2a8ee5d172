"""Tensors in the runtime: shapes, dtypes, alignment, holders of a storage, and the tensors of an edge.

Problem: a stage of a graph may send several tensors to another stage (hidden states, a mask, a tied weight), and only
some of them have gradients. A transfer for each tensor would cost a message for each.

Solution: the tensors of an edge are packed into one flat tensor of bytes, with torch's own alignment, and unpacked as
views of it. A single tensor is sent as it is. Both ends know which tensors a transfer leaves out: a shared parameter
moves only when its value changes (`SharedParameters`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes. All memory that torch allocates, on the CPU or on a GPU, begins at a multiple of this number."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that an edge of the pipeline carries with each microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def has_gradients(dtype: torch.dtype) -> bool:
    """Return whether tensors of the dtype can have gradients: floating and complex dtypes."""
    return dtype.is_floating_point or dtype.is_complex


def as_real(tensor: Tensor) -> Tensor:
    """Return the tensor. A complex tensor becomes a view of real and imaginary parts, in a new last dimension of 2."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_memory(tensor: Tensor) -> Tensor:
    """Return the tensor, contiguous and without lazy conjugation or negation, so that its bytes are its values."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def num_holders(tensor: Tensor) -> int:
    """Return the number of tensors that share the storage of `tensor`, `tensor` included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # `storage` counts too


class TravellingTensors:
    """The tensors of a microbatch that cross an edge in one direction.

    Args:
        specs: one for each tensor.
        owners: one for each tensor: the stage that steps the shared parameter (also for its gradient), or None for the
            microbatch's own tensors.
    """

    def __init__(self, specs: Sequence[TensorSpec], owners: Sequence[int | None]) -> None:
        self.specs = tuple(specs)
        self.owners = tuple(owners)
        self.has_shared = any(owner is not None for owner in owners)
        self._packed: dict[tuple[bool, ...], TensorSpec | None] = {}

    @cached_property
    def whole(self) -> TensorSpec | None:
        """The packed form of all tensors; None if the edge has none in this direction."""
        return self.spec_of((True,) * len(self.specs))

    def spec_of(self, present: tuple[bool, ...]) -> TensorSpec | None:
        """Return the packed form of the tensors marked in `present`; None if none is marked."""
        if present not in self._packed:
            specs = self._present(present)
            self._packed[present] = _packed_spec(specs) if specs else None
        return self._packed[present]

    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """Pack all tensors that are not None into one contiguous tensor. A single tensor is only made contiguous.

        Returns None if all are None. Raises ValueError if a shape or dtype differs from its specification.
        """
        specs = self._present(tuple(tensor is not None for tensor in tensors))
        return _pack([tensor for tensor in tensors if tensor is not None], specs) if specs else None

    def unpack(self, packed: Tensor | None, present: tuple[bool, ...] | None = None) -> tuple[Tensor | None, ...]:
        """Return the packed tensors as views, with None for each tensor not marked in `present` (default: all are)."""
        present = present or (True,) * len(self.specs)
        found = iter(_unpack(packed, self._present(present)) if packed is not None else ())
        return tuple(next(found) if here else None for here in present)

    def _present(self, present: tuple[bool, ...]) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec, here in zip(self.specs, present, strict=True) if here)


class EdgeTensors:
    """The tensors of one microbatch on an edge.

    Args:
        specs: one for each tensor.
        owners: for each tensor the stage that owns the shared parameter, or None for an activation. Default: all are
            activations.
        trained: for each tensor whether a gradient comes back. Default: for each of a floating or complex dtype.

    Attributes:
        trained: as the argument.
        activations: the tensors from the edge's source to its target.
        gradients: the tensors from its target back to its source.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        owners: Sequence[int | None] | None = None,
        trained: Sequence[bool] | None = None,
    ) -> None:
        if not specs:
            raise ValueError("an edge carries no tensor; leave it out")
        owners = (None,) * len(specs) if owners is None else owners
        self.trained = tuple(has_gradients(spec.dtype) for spec in specs) if trained is None else tuple(trained)
        with_gradients = list(compress(zip(specs, owners, strict=True), self.trained))
        self.activations = TravellingTensors(specs, owners)
        self.gradients = TravellingTensors(*zip(*with_gradients, strict=True)) if with_gradients else _NOTHING


def _starts(specs: Sequence[TensorSpec]) -> list[int]:
    """Return the offset of each tensor in the packed bytes, then the total number of bytes."""
    return list(accumulate((-(-spec.num_bytes // ALIGNMENT) * ALIGNMENT for spec in specs), initial=0))


def _packed_spec(specs: Sequence[TensorSpec]) -> TensorSpec:
    return specs[0] if len(specs) == 1 else TensorSpec((_starts(specs)[-1],), torch.uint8)


def _pack(tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> Tensor:
    for tensor, spec in zip(tensors, specs, strict=True):
        if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
            raise ValueError(
                f"an edge gets {tuple(tensor.shape)} {tensor.dtype} where its specification says {spec.shape} "
                f"{spec.dtype}; every microbatch must have the same shapes"
            )
    if len(tensors) == 1:
        return as_memory(tensors[0])
    starts = _starts(specs)
    packed = torch.empty(starts[-1], dtype=torch.uint8, device=tensors[0].device)
    for tensor, spec, start in zip(tensors, specs, starts, strict=False):
        packed[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape).copy_(tensor)
    return packed


def _unpack(packed: Tensor, specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    if len(specs) == 1:
        return (packed,)
    return tuple(
        packed[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)
        for spec, start in zip(specs, _starts(specs), strict=False)
    )


_NOTHING = TravellingTensors((), ())
