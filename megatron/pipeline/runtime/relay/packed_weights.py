"""Frozen weights packed in 4 or 8 bits on the host: the packed form is copied, and the device unpacks it.

A weight is cut into blocks of `BLOCK` elements in memory order. Each block has one FP32 scale and a code for each
element. `NF4` has 16 levels, the quantiles of a normal distribution (QLoRA, Dettmers et al. 2023, appendix E), scaled
by the block's largest magnitude; two codes share a byte, the first in its upper half. `INT8` has whole numbers from
-127 to 127. Scales are not quantized again. Layers compute with the unpacked weights, so a run has the same bits as a
run with weights that were packed and unpacked before (`Packing.rounded`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor

BLOCK = 64
_AT_ONCE = 2**22  # elements; packing in parts bounds the temporary memory


class Packing(ABC):
    """A form of packed weights. `bits`: the bits of an element, without its share of a scale."""

    bits: int

    def takes(self, weight: Tensor) -> bool:
        """Whether a weight can have this form: it has at least two dimensions and a whole number of blocks."""
        return weight.dim() > 1 and weight.is_floating_point() and weight.numel() % BLOCK == 0

    def empty(self, weight: Tensor) -> dict[str, Tensor]:
        """Tensors without memory that have the shapes and dtypes of the parts of a packed weight."""
        count = weight.numel()
        return {
            "codes": torch.empty(count * self.bits // 8, dtype=torch.uint8, device="meta"),
            "scales": torch.empty(count // BLOCK, dtype=torch.float32, device="meta"),
        }

    @torch.no_grad()
    def pack(self, weight: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Pack `weight`: write its codes and scales."""
        for part in _parts(weight.numel()):
            blocks = weight.reshape(-1)[part].float().view(-1, BLOCK)
            scale = blocks.abs().amax(dim=1)
            scales[part.start // BLOCK : part.stop // BLOCK] = scale
            found = self._codes((blocks * (1.0 / scale.clamp(min=1e-38)).unsqueeze(1)).clamp(-1, 1).view(-1))
            codes[part.start * self.bits // 8 : part.stop * self.bits // 8] = found

    @torch.no_grad()
    def unpack(self, codes: Tensor, scales: Tensor, weight: Tensor) -> None:
        """Write the unpacked weight, rounded to its dtype."""
        flat = weight.view(-1)
        for part in _parts(weight.numel()):
            levels = self._levels(codes[part.start * self.bits // 8 : part.stop * self.bits // 8])
            scale = scales[part.start // BLOCK : part.stop // BLOCK].unsqueeze(1)
            flat[part] = (levels.view(-1, BLOCK) * scale).view(-1).to(flat.dtype)

    def rounded(self, weight: Tensor) -> Tensor:
        """The weight after packing and unpacking."""
        codes, scales = (torch.empty(each.shape, dtype=each.dtype) for each in self.empty(weight).values())
        self.pack(weight, codes, scales)
        found = torch.empty_like(weight)
        self.unpack(codes, scales, found)
        return found

    @abstractmethod
    def _codes(self, scaled: Tensor) -> Tensor:
        """Return the uint8 codes of FP32 numbers from -1 to 1."""

    @abstractmethod
    def _levels(self, codes: Tensor) -> Tensor:
        """Return the FP32 numbers, from -1 to 1, of uint8 codes."""


class Nf4(Packing):
    bits = 4

    def _codes(self, scaled: Tensor) -> Tensor:
        levels = _nf4_levels(scaled.device)
        found = torch.bucketize(scaled, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8)
        return (found[::2] << 4) | found[1::2]

    def _levels(self, codes: Tensor) -> Tensor:
        return torch.nn.functional.embedding(codes.int(), _nf4_pairs(codes.device)).view(-1)


class Int8(Packing):
    bits = 8

    def _codes(self, scaled: Tensor) -> Tensor:
        return (scaled * 127).round().to(torch.int8).view(torch.uint8)

    def _levels(self, codes: Tensor) -> Tensor:
        return codes.view(torch.int8).float() / 127


@cache
def _nf4_levels(device: torch.device) -> Tensor:
    return torch.tensor(
        [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
         -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
         0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
        device=device,
    )  # fmt: skip


@cache
def _nf4_pairs(device: torch.device) -> Tensor:
    """[256, 2]: the two levels of each byte."""
    codes = torch.arange(256, device=device)
    return _nf4_levels(device)[torch.stack((codes >> 4, codes & 15), dim=1)]


def _parts(count: int) -> list[slice]:
    return [slice(first, min(first + _AT_ONCE, count)) for first in range(0, count, _AT_ONCE)]


PACKINGS: dict[int, Packing] = {4: Nf4(), 8: Int8()}
"""Bits of an element -> the form of packed weights."""
