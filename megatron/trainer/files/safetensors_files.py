"""Weights in safetensors files, plain and quantized, read and written by parts to save memory.

A file has the length of a header (8 bytes, little-endian), the header in JSON (name -> dtype, shape, place of the
data), and the data, row by row. A folder has `model.safetensors`, or several files and
`model.safetensors.index.json`, which names the file of each tensor. The package safetensors maps whole files into
memory, where their pages count as the process's own, and it can write only whole files. This module reads single rows,
and writes tensors as they come. https://huggingface.co/docs/safetensors/index#format

Quantized weights are read as bf16 tensors. Two formats are supported. DeepSeek's FP8: a matrix `NAME.weight` of e4m3
numbers with a matrix `NAME.weight_scale_inv`, which has a factor for each block of 128 x 128. MXFP4 of GPT-OSS (OCP's
Microscaling Formats, 1.0): the matrices of all experts are `NAME_blocks`, with two e2m1 numbers in a byte, the lower
half first, and `NAME_scales`, with the exponent, plus 127, of each 32 numbers; the unquantized matrix is their
transpose. Products are rounded to bf16 once, as in transformers.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from megatron.documents.faults import shown
from megatron.documents.files import read_json, write_whole

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Name in a header -> dtype of weights."""
_OTHERS = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I64": torch.int64, "BOOL": torch.bool}
"""Name in a header -> dtype of quantized weights and of buffers."""
_LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


UNREAD = (
    "weights in FP32, BF16, FP16, MXFP4 and in FP8 (e4m3) with a scale for each 128 x 128 block are read; save the "
    "model in bf16 first"
)
"""The reason why a dtype is refused."""

_OLD_NAMES = re.compile(r"LayerNorm\.(gamma|beta)$")


def _new_name(old: re.Match[str]) -> str:
    """Rename a norm of a BERT that was converted from TensorFlow, as transformers does."""
    return f"LayerNorm.{'weight' if old[1] == 'gamma' else 'bias'}"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its dtype and shape, and the offset of its first byte in the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class SafetensorsFolder:
    """The tensors of a folder of safetensors files: name -> tensor in `tensors`.

    Raises ValueError for a folder without such files, a file that is missing, damaged or truncated, an index that does
    not agree with its files, and a tensor with a dtype of neither weights, quantized weights nor buffers.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self._open: tuple[Path, BinaryIO] | None = None
        for path, names in self._files().items():
            found = _header(path)
            if names is not None and names != found.keys():
                raise ValueError(
                    f"{path} and {INDEX} do not agree about {min(names ^ found.keys())}; download both again"
                )
            self.tensors |= {_OLD_NAMES.sub(_new_name, name): tensor for name, tensor in found.items()}

    def _files(self) -> dict[Path, set[str] | None]:
        """File -> the names of its tensors in the index; None without an index."""
        index = self.folder / INDEX
        if not index.exists():
            if not (self.folder / ONE).exists():
                raise ValueError(f"{self.folder} has neither {ONE} nor {INDEX}; save the model as safetensors there")
            return {self.folder / ONE: None}
        try:
            places = read_json(index.read_text(encoding="utf-8"))["weight_map"]
            files: dict[Path, set[str] | None] = {}
            for name, file in places.items():
                files.setdefault(self.folder / Path(file).name, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} has no weight_map; download it again") from error
        return files

    def rows(self, name: str, first: int, last: int, *, axes: int = 1) -> torch.Tensor:
        """Read rows `first` to `last` (exclusive) of a tensor to the CPU, in the file's dtype. Raises ValueError.

        `axes`: the number of first axes that together count as the rows.
        """
        stored = self.tensors[name]
        bytes_of_row = math.prod(stored.shape[axes:]) * stored.dtype.itemsize
        data = torch.empty((last - first, *stored.shape[axes:]), dtype=stored.dtype)
        if data.numel() == 0:
            return data
        stream = self._stream(stored.path)
        stream.seek(stored.offset + first * bytes_of_row)
        if stream.readinto(memoryview(data.view(-1).view(torch.uint8).numpy())) != data.nbytes:
            raise ValueError(f"{stored.path} is truncated; download it again")
        return data

    def _stream(self, path: Path) -> BinaryIO:
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = (path, open(path, "rb"))  # noqa: SIM115 (open until another file is read)
        return self._open[1]

    def close(self) -> None:
        """Close the open file."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _header(path: Path) -> dict[str, StoredTensor]:
    try:
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = os.fstat(stream.fileno()).st_size
            if not 0 < length <= min(_LARGEST_HEADER, size - 8):
                raise ValueError("its header has no end")
            header = read_json(stream.read(length).decode("utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; download it again") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no safetensors file that can be read ({error}); download it again") from error
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = (DTYPES | _OTHERS).get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{name} in {path} is of dtype {shown(entry['dtype'])}: {UNREAD}")
        shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
        elements = torch.Size(shape).numel()
        if last - first != elements * dtype.itemsize or 8 + length + last > size:
            raise ValueError(f"{path} is truncated or damaged at {name}; download it again")
        found[name] = StoredTensor(path, dtype, shape, 8 + length + first)
    return found


def write_folder(
    folder: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    parts: Iterator[tuple[str, torch.Tensor]],
    *,
    largest_file: int,
) -> None:
    """Write a model's tensors into a folder. The files are synced.

    Args:
        tensors: name -> dtype and shape, in the order in which the tensors are written.
        parts: names and data, in the order of `tensors`; a tensor may come in several parts, row by row.
        largest_file: bytes of a file; a larger tensor has its own file.
    """
    groups: list[dict[str, int]] = [{}]
    for name, (dtype, shape) in tensors.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if groups[-1] and sum(groups[-1].values()) + size > largest_file:
            groups.append({})
        groups[-1][name] = size
    files = [ONE] if len(groups) == 1 else [
        f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)
    ]  # fmt: skip
    names_of = {torch_dtype: name for name, torch_dtype in DTYPES.items()}
    for file, sizes in zip(files, groups, strict=True):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        place = 0
        for name, size in sizes.items():
            dtype, shape = tensors[name]
            header[name] = {"dtype": names_of[dtype], "shape": list(shape), "data_offsets": [place, place + size]}
            place += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8 bytes
        with open(folder / file, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for expected, size in sizes.items():
                written = 0
                while written < size:
                    name, data = next(parts)
                    assert name == expected and data.dtype == tensors[name][0], f"{name} comes before {expected}"
                    written += stream.write(memoryview(data.contiguous().view(-1).view(torch.uint8).numpy()))
                assert written == size, f"{expected} has {written} bytes and not {size}"
            stream.flush()
            os.fsync(stream.fileno())
    assert next(parts, None) is None, "more parts than tensors"
    if len(files) > 1:
        places = {name: file for file, sizes in zip(files, groups, strict=True) for name in sizes}
        total = sum(sum(sizes.values()) for sizes in groups)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_whole(folder / INDEX, json.dumps(index, indent=1, sort_keys=True) + "\n")


# --- quantized weights ------------------------------------------------------------------------------------------------

_BLOCK = 128  # rows and columns of an FP8 block with one factor
_GROUP = 32  # MXFP4 numbers with one exponent
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NOT_A_NUMBER = 255
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
"""Suffixes of the names of FP8's factors, of MXFP4's numbers and of MXFP4's exponents."""
BUFFERS = (
    ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".position_ids",
    ".EncDecAttention.relative_attention_bias.weight",  # a table of the original T5 that no layer reads
)  # fmt: skip
"""Suffixes of the names of buffers, which older files have beside the weights."""


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Convert MXFP4, uint8 [..., groups, 16] with scales uint8 [..., groups], to bf16 [..., 32 * groups].

    Raises ValueError for a scale that is no number.
    """
    if (scales == _NOT_A_NUMBER).any():
        raise ValueError("MXFP4 has a scale that is no number; download the file again")
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    numbers = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), dim=-1).flatten(-2)
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - 127).to(torch.bfloat16).flatten(-2)


def from_fp8(numbers: torch.Tensor, factors: torch.Tensor, first: int) -> torch.Tensor:
    """Convert FP8, e4m3 [rows, columns], to bf16.

    `factors`: the factors of the blocks that contain these rows. `first`: the number of the first row in the whole
    matrix.
    """
    rows, columns = numbers.shape
    block_of_row = torch.arange(first, first + rows) // _BLOCK - first // _BLOCK
    wide = factors.float().repeat_interleave(_BLOCK, 1)[:, :columns]
    return (numbers.float() * wide[block_of_row]).to(torch.bfloat16)


class WeightsFolder:
    """The tensors of a folder as weights: name -> tensor in `tensors`.

    FP32, BF16 and FP16 are unchanged; other dtypes become bf16.

    Raises ValueError as `SafetensorsFolder` does, and for quantized weights in another format.
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
        """Read rows as `SafetensorsFolder.rows` does. For MXFP4 the rows must be of one expert, with `axes` 2."""
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
        """Close the open file."""
        self._files.close()
