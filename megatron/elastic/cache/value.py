"""One sample's output as bytes that prove what they are.

    header, 128 bytes: name and version of the format, dtype, shape, length of the payload, checksum
    payload: the tensor's bytes

The checksum (CRC-32) is over key, header and payload. So a value that was torn, or lies under another key, or is of
another format or shape, is found out and never returned.
"""

from __future__ import annotations

import operator
import struct
import zlib
from collections.abc import Hashable
from hashlib import blake2b
from math import prod

import numpy
import torch
from torch import Tensor

from megatron.backend.streams import Streams
from megatron.elastic.cache.generation import DTYPES, Generation

HEADER_BYTES = 128
"""The header's length, by which the payload is aligned as the buffer is, to 64 bytes."""
VERSION = 1
_MAGIC = b"frozen\r\n"
_HEADER = struct.Struct("<8sHBB4xQ8Q")
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_AT = _HEADER.size
_LONGEST_NAME = 255


class Layout:
    """How the values of one generation are named and what they look like."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.prefix = b"g" + generation.digest
        self.num_bytes = prod(generation.shape) * generation.dtype.itemsize
        if self.num_bytes > 1 << 31:
            raise ValueError(
                f"the output of one sample takes {self.num_bytes} bytes, and the cache holds values of 2 GiB at most; "
                "leave the cache off"
            )
        shape = (*generation.shape, *[0] * (8 - len(generation.shape)))
        self._header = _HEADER.pack(
            _MAGIC, VERSION, DTYPES[generation.dtype], len(generation.shape), self.num_bytes, *shape
        ).ljust(HEADER_BYTES, b"\0")

    def key(self, sample: Hashable) -> bytes:
        """Raises ValueError where the sample is named by something else than a whole number or a text."""
        return self.prefix + _sample_key(sample)

    def require(self, tensor: Tensor) -> None:
        """Raises ValueError where the tensor is not what the generation says."""
        expected = self.generation
        if tensor.dtype != expected.dtype or tuple(tensor.shape) != expected.shape:
            raise ValueError(
                f"an output of {tuple(tensor.shape)} in {tensor.dtype} does not belong to a generation of "
                f"{expected.shape} in {expected.dtype}; give it a generation of its own"
            )

    def new_value(self, streams: Streams) -> tuple[Tensor, Tensor]:
        """A value that is to be filled from a device, as bytes and as the tensor in it."""
        num_bytes = HEADER_BYTES + self.num_bytes
        if streams.runs_ahead:
            value = streams.host_buffer((num_bytes,), torch.uint8)
        else:
            value = torch.empty(num_bytes, dtype=torch.uint8)
        return value, value[HEADER_BYTES:].view(self.generation.dtype).view(self.generation.shape)

    def seal(self, key: bytes, value: Tensor) -> memoryview:
        """Write the header of a value that is filled. What is to be stored."""
        content = memoryview(value.numpy())
        content[:HEADER_BYTES] = self._header
        _CHECKSUM.pack_into(content, _CHECKSUM_AT, self._checksum(key, content[HEADER_BYTES:]))
        return content

    def open(self, key: bytes, stored: memoryview) -> Tensor | str:
        """The tensor in memory of its own, or why there is none."""
        if len(stored) < HEADER_BYTES:
            return "it is shorter than a header"
        if stored[:_CHECKSUM_AT] != self._header[:_CHECKSUM_AT]:
            return "its header is of another format, dtype or shape"
        if len(stored) != HEADER_BYTES + self.num_bytes:
            return f"it has {len(stored)} bytes and not {HEADER_BYTES + self.num_bytes}"
        (checksum,) = _CHECKSUM.unpack_from(stored, _CHECKSUM_AT)
        payload = torch.empty(self.num_bytes, dtype=torch.uint8)
        # Copied by numpy, since torch would start threads of its own for each thread that copies.
        numpy.copyto(payload.numpy(), numpy.frombuffer(stored, numpy.uint8, offset=HEADER_BYTES))
        # Of the copy: whatever happens to the file, what is returned is what was proved.
        if self._checksum(key, memoryview(payload.numpy())) != checksum:
            return "its checksum is wrong"
        return payload.view(self.generation.dtype).view(self.generation.shape)

    def _checksum(self, key: bytes, payload: memoryview) -> int:
        return zlib.crc32(payload, zlib.crc32(key + self._header))


def _sample_key(sample: Hashable) -> bytes:
    if isinstance(sample, str):
        name = sample.encode()
        return b"t" + name if len(name) <= _LONGEST_NAME else b"h" + blake2b(name, digest_size=32).digest()
    try:
        number = operator.index(sample)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise ValueError(
            f"sample {sample!r} cannot be named in the cache; name it by a whole number from 0 to 2**64 - 1 or a text"
        )
    return b"i" + number.to_bytes(8, "big")
