"""A generation: the properties that decide the bits of a frozen prefix's output.

A value is found only under an equal generation. A matrix kernel rounds differently with another number of rows, threads
or tensor ranks, and so does another attention kernel. So all these properties are in the key, beside the weights, and
an epoch that reads values is equal to an epoch that computes them, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from math import prod

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes of values that can be stored."""
_PIECE_BYTES = 1 << 24
_PACKAGES = ("megatron-core", "transformer-engine", "flash-attn", "flash-attn-3")
_VARIABLES = ("NVTE_", "MKL_", "ONEDNN_", "DNNL_", "CUBLAS_", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32")


def software_of_this_process() -> str:
    """The versions, CPU instructions and environment variables that decide the last bits or the choice of kernels."""
    found = [f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"]
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    found += sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_VARIABLES))
    return " ".join(found)


@dataclass(frozen=True)
class Generation:
    """A frozen prefix, and all properties of its computation that decide the bits of its output.

    Attributes:
        weights: `weights_digest` of the prefix, on this tensor rank.
        depth: number of frozen layers.
        dtype: dtype of the output.
        shape: shape of one sample's output, such as (sequence length, hidden size).
        tensor_ranks: tensor parallel size t.
        tensor_rank: tensor rank of this process.
        microbatch_rows: number of samples that are computed together.
        padding: a text on how samples are padded.
        threads: number of threads of a CPU's kernels.
        kernels: a text on the transformer implementation, the attention kernel and the device.
        data: a text on the data set and the making of its samples.
        software: the versions of the software that computes.

    Raises:
        ValueError: the dtype cannot be stored.
    """

    weights: str
    depth: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    tensor_ranks: int
    tensor_rank: int
    microbatch_rows: int
    padding: str
    threads: int
    kernels: str
    data: str
    software: str = field(default_factory=software_of_this_process)

    def __post_init__(self) -> None:
        assert self.depth >= 1 and self.microbatch_rows >= 1 and self.threads >= 1
        assert 0 <= self.tensor_rank < self.tensor_ranks
        assert 1 <= len(self.shape) <= 8 and all(each >= 1 for each in self.shape)
        if self.dtype not in DTYPES:
            names = ", ".join(_name(each) for each in DTYPES)
            raise ValueError(
                f"outputs in {_name(self.dtype)} cannot be cached, since values are stored in {names}; compute the "
                "frozen layers in one of these, or leave the cache off"
            )

    @property
    def num_bytes(self) -> int:
        """The number of bytes of one sample's output."""
        return prod(self.shape) * self.dtype.itemsize

    @cached_property
    def text(self) -> str:
        """All attributes as a JSON text, equal in every process."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        said |= {"dtype": _name(self.dtype), "shape": list(self.shape)}
        return json.dumps(said, sort_keys=True)

    @cached_property
    def digest(self) -> bytes:
        """The digest of `text`, 16 bytes."""
        return digest_of(self.text.encode())

    def deepens(self, other: Generation) -> bool:
        """Whether this generation adds layers to `other`, and all properties but weights and depth are equal.

        Only then the new layers, computed from values of `other`, give the same bits as the whole prefix.
        """
        return self.depth > other.depth and replace(self, weights="", depth=1) == replace(other, weights="", depth=1)


def key_of_sample(sample: Hashable) -> bytes:
    """The digest of a sample's name, 16 bytes.

    Raises:
        ValueError: the name is neither a whole number from 0 to 2**64 - 1 nor a text.
    """
    if isinstance(sample, str):
        name = b"t" + sample.encode()
    else:
        try:
            name = b"i" + operator.index(sample).to_bytes(8, "big")  # type: ignore[arg-type]
        except (TypeError, OverflowError):
            raise ValueError(
                f"sample {sample!r} cannot be named in the cache; name it by a whole number from 0 to 2**64 - 1 or a "
                "text"
            ) from None
    return digest_of(name)


def digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of tensors' names, shapes, dtypes and bits, as 32 hexadecimal digits.

    It is equal in every process, and does not depend on the order of the tensors.

    Args:
        tensors: the prefix's parameters and buffers, under names that do not depend on the layout of the pipeline.

    Raises:
        ValueError: a name is given twice.
    """
    found = dict[str, Tensor]()
    for name, tensor in tensors:
        if name in found:
            raise ValueError(
                f"two tensors of the frozen layers are named {name}; name them by their layer in the model"
            )
        found[name] = tensor
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(found):
        tensor = found[name].detach()
        total.update(json.dumps([name, _name(tensor.dtype), list(tensor.shape)]).encode())
        content = tensor.contiguous().view(-1).view(torch.uint8)
        for piece in content.split(_PIECE_BYTES):
            total.update(piece.cpu().numpy())
    return total.hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
