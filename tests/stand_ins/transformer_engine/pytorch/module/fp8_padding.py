"""Rows of zeros behind the tokens of each expert, so that FP8 products have whole blocks."""

import torch
from torch import Tensor

from ...common.recipe import MXFP8BlockScaling
from ..fp8 import FP8GlobalStateManager


class _Padding(torch.nn.Module):
    def __init__(self, num_gemms, align_size=None):
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def _padded(self, splits: list[int]) -> list[int]:
        if self.align_size is None:
            self.align_size = 32 if isinstance(FP8GlobalStateManager.get_fp8_recipe(), MXFP8BlockScaling) else 16
        return [-(-each // self.align_size) * self.align_size for each in splits]


class Fp8Padding(_Padding):
    def forward(self, inp: Tensor, m_splits) -> tuple[Tensor, list[int]]:
        splits = [int(each) for each in m_splits]
        padded = self._padded(splits)
        parts = zip(inp.split(splits), splits, padded, strict=True)
        rows = [torch.nn.functional.pad(part, (0, 0, 0, more - number)) for part, number, more in parts]
        return torch.cat(rows), padded


class Fp8Unpadding(_Padding):
    def forward(self, inp: Tensor, m_splits) -> Tensor:
        splits = [int(each) for each in m_splits]
        parts = zip(inp.split(self._padded(splits)), splits, strict=True)
        return torch.cat([part[:number] for part, number in parts])
