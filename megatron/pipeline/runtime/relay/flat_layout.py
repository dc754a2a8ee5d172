"""Where the tensors of a stage lie in flat memory: one flat tensor for each dtype, and a view of it for each name.

A copy between host and device, or a reduction, is then one call. Every view begins at a multiple of `ALIGNMENT` bytes,
as torch's own memory does: a kernel may add in another order where its operands begin elsewhere, and what is computed
with a copy shall equal, bit for bit, what is computed without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.pipeline.runtime.contract.tensors import ALIGNMENT

Flat = Mapping[torch.dtype, Tensor]


class FlatLayout:
    """The places of tensors of these names and shapes. `dtype`: of all of them; None: each one's own. `parts`: into how
    many equal, aligned parts each flat tensor can be cut; it is padded to that.

    Attributes:
        num_elements: dtype -> length of the flat tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None, parts: int = 1) -> None:
        self.num_elements: dict[torch.dtype, int] = {}
        self._places: dict[str, tuple[torch.dtype, int, torch.Size]] = {}
        for name, tensor in tensors.items():
            its = dtype or tensor.dtype
            start = self.num_elements.get(its, 0)
            self._places[name] = its, start, tensor.shape
            step = ALIGNMENT // its.itemsize
            self.num_elements[its] = start + -(-tensor.numel() // step) * step
        for its, count in self.num_elements.items():
            step = parts * ALIGNMENT // its.itemsize
            self.num_elements[its] = -(-count // step) * step

    @property
    def num_bytes(self) -> int:
        return sum(count * dtype.itemsize for dtype, count in self.num_elements.items())

    def allocate(self, make: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> dict[torch.dtype, Tensor]:
        """Flat tensors, which `make(shape, dtype)` makes."""
        return {dtype: make((count,), dtype) for dtype, count in self.num_elements.items()}

    def spans(self, parts: Mapping[str, slice]) -> dict[torch.dtype, slice]:
        """dtype -> from the first to the last of these elements of the tensors, in the flat tensor."""
        found: dict[torch.dtype, slice] = {}
        for name, part in parts.items():
            dtype, start, _ = self._places[name]
            if part.stop > part.start:
                first = found[dtype].start if dtype in found else start + part.start
                found[dtype] = slice(first, start + part.stop)
        return {dtype: found.get(dtype, slice(0, 0)) for dtype in self.num_elements}

    def views(self, flat: Flat) -> dict[str, Tensor]:
        """name -> its part of the flat tensors, in its shape."""
        return {
            name: flat[dtype][start : start + shape.numel()].view(shape)
            for name, (dtype, start, shape) in self._places.items()
        }
