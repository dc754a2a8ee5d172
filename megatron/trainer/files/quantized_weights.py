"""Quantized weights in safetensors files, read as the bf16 tensors that they stand for.

Two forms are published. DeepSeek's FP8: a matrix `NAME.weight` of e4m3 numbers with a matrix `NAME.weight_scale_inv`,
which has a factor for each block of 128 x 128. MXFP4 of GPT-OSS (OCP's Microscaling Formats, 1.0): the matrices of all
experts are `NAME_blocks` with two e2m1 numbers in a byte, the lower half first, and `NAME_scales` with the exponent,
plus 127, of each 32 numbers; what is unquantized is their transpose. Products are rounded to bf16 once, as transformers
does.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.trainer.files.safetensors_files import UNREAD, SafetensorsFolder, StoredTensor

_BLOCK = 128  # rows and columns of FP8 with one factor
_GROUP = 32  # numbers of MXFP4 with one exponent
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NOT_A_NUMBER = 255
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
"""What the names of factors, of MXFP4's numbers and of MXFP4's exponents end with."""
BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".position_ids")
"""What the names of buffers end with, which older files have beside the weights."""


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [..., groups, 16] and [..., groups] -> bf16 [..., 32 * groups]. Raises ValueError for a scale that is no
    number."""
    if (scales == _NOT_A_NUMBER).any():
        raise ValueError("MXFP4 has a scale that is no number; download the file again")
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    numbers = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), dim=-1).flatten(-2)
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - 127).to(torch.bfloat16).flatten(-2)


def from_fp8(numbers: torch.Tensor, factors: torch.Tensor, first: int) -> torch.Tensor:
    """e4m3 [rows, columns] -> bf16. `factors`: those of the blocks that the rows lie in, of which the first is row
    `first` of the whole matrix."""
    rows, columns = numbers.shape
    block_of_row = torch.arange(first, first + rows) // _BLOCK - first // _BLOCK
    wide = factors.float().repeat_interleave(_BLOCK, 1)[:, :columns]
    return (numbers.float() * wide[block_of_row]).to(torch.bfloat16)


class WeightsFolder:
    """The tensors of a folder as weights, by name, in `tensors`: FP32, BF16 and FP16 as they are, others in bf16.

    Raises ValueError as `SafetensorsFolder` does, and for quantized weights of another form.
    """

    def __init__(self, folder: Path | str) -> None:
        self._files = SafetensorsFolder(folder)
        self.folder = self._files.folder
        stored = self._files.tensors
        self._fp8 = {name for name in stored if stored[name].dtype == torch.float8_e4m3fn}
        self._mxfp4 = {name.removesuffix(BLOCKS) for name in stored if stored[name].dtype == torch.uint8}
        self._mxfp4 = {name for name in self._mxfp4 if name + BLOCKS in stored and name + SCALES in stored}
        beside = {name + SCALE for name in self._fp8} | {name + end for name in self._mxfp4 for end in (BLOCKS, SCALES)}
        self.tensors = {name: tensor for name, tensor in stored.items() if name not in beside}
        for name in self._fp8:
            self.tensors[name] = self._in_blocks(name)
        for name in self._mxfp4:
            self.tensors[name] = self._unquantized(name)
        for name, tensor in self.tensors.items():
            if not tensor.dtype.is_floating_point and not name.endswith(BUFFERS):
                raise ValueError(f"{name} in {tensor.path} is of dtype {str(tensor.dtype)[6:]}: {UNREAD}")

    def _in_blocks(self, name: str) -> StoredTensor:
        stored, scale = self._files.tensors[name], self._files.tensors.get(name + SCALE)
        blocks = tuple(-(-size // _BLOCK) for size in stored.shape)
        if len(blocks) != 2 or scale is None or scale.shape != blocks:
            found = f"there is no {name}{SCALE}" if scale is None else f"{name}{SCALE} has shape {scale.shape}"
            raise ValueError(f"{name} in {stored.path} is of dtype FP8, and {found}: {UNREAD}")
        return StoredTensor(stored.path, torch.bfloat16, stored.shape, stored.offset)

    def _unquantized(self, name: str) -> StoredTensor:
        blocks, scales = (self._files.tensors[name + end] for end in (BLOCKS, SCALES))
        if len(blocks.shape) != 4 or blocks.shape[3] != _GROUP // 2 or scales.shape != blocks.shape[:3]:
            raise ValueError(
                f"{name}{BLOCKS} in {blocks.path} has shape {blocks.shape} and {name}{SCALES} {scales.shape}, which is "
                "not the MXFP4 of experts; save the model in bf16 first"
            )
        experts, columns, groups, _ = blocks.shape
        return StoredTensor(blocks.path, torch.bfloat16, (experts, groups * _GROUP, columns), blocks.offset)

    def rows(self, name: str, first: int, last: int, *, axes: int = 1) -> torch.Tensor:
        """As `SafetensorsFolder.rows`. Of MXFP4 the rows are of one expert, and `axes` is 2."""
        if name in self._fp8:
            factors = self._files.rows(name + SCALE, first // _BLOCK, -(-last // _BLOCK))
            return from_fp8(self._files.rows(name, first, last), factors, first)
        if name not in self._mxfp4:
            return self._files.rows(name, first, last, axes=axes)
        _, height, width = self.tensors[name].shape
        expert, first = divmod(first, height)
        last -= expert * height
        assert axes == 2 and first < last <= height, (name, first, last)
        groups = slice(first // _GROUP, -(-last // _GROUP))
        quantized = (
            self._files.rows(name + end, expert * width, (expert + 1) * width, axes=2)[:, groups]
            for end in (BLOCKS, SCALES)
        )
        skipped = groups.start * _GROUP
        return from_mxfp4(*quantized)[:, first - skipped : last - skipped].T

    def close(self) -> None:
        """Close the file that is open."""
        self._files.close()
