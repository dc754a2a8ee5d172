"""What travels over an edge of a graph of stages: several tensors, in one transfer.

Problem: a stage may hand several tensors to another (hidden states, a mask, the position of a tied weight), of which
only some have gradients. Each in a transfer of its own would cost a message each, and links that one has to wait for in
turn.

Solution: they are packed into one flat piece of bytes, aligned as torch's own memory is, and unpacked as views of it. A
single tensor goes as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from megatron.pipeline.runtime.flat_layout import ALIGNMENT
from megatron.pipeline.runtime.stage import TensorSpec


class EdgeTensors:
    """The tensors of one microbatch on an edge. `specs`: of the activations; those of floating dtype have gradients.

    Attributes:
        activations, gradients: what one transfer carries; None where there is nothing.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        if not specs:
            raise ValueError("an edge carries no tensor; leave it out")
        self.specs = tuple(specs)
        self.have_gradients = tuple(spec.dtype.is_floating_point for spec in self.specs)
        self.gradient_specs = tuple(spec for spec in self.specs if spec.dtype.is_floating_point)

    @cached_property
    def activations(self) -> TensorSpec:
        return _packed_spec(self.specs)

    @cached_property
    def gradients(self) -> TensorSpec | None:
        return _packed_spec(self.gradient_specs) if self.gradient_specs else None

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The activations as one tensor, contiguous; a single one is itself."""
        return _pack(tensors, self.specs)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """What was packed, as views."""
        return _unpack(packed, self.specs)

    def pack_gradients(self, tensors: Sequence[Tensor]) -> Tensor:
        """The same of gradients, of the activations that have one, in their order."""
        return _pack(tensors, self.gradient_specs)

    def unpack_gradients(self, packed: Tensor) -> tuple[Tensor, ...]:
        return _unpack(packed, self.gradient_specs)


def _starts(specs: Sequence[TensorSpec]) -> list[int]:
    """Where each begins, and one past the last; bytes."""
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
        return tensors[0].contiguous()
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
