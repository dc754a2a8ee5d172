"""Buffers for moved activations, and the count of the bytes that a rank saves.

Problem: activations are moved at every microbatch. Allocating memory for each move fragments the memory and costs time.
But a buffer may be used again only when its last reader is done: a backward, a gradient that is a view of a saved
tensor, or, on CUDA, a kernel that the host has only queued.

Solution: a buffer is free when only the pool holds its storage. So no caller returns buffers, none can be returned too
early, and the bytes in use can be counted at any time. Where the device lags behind the host, a caller that has queued
work on a buffer calls `mark_used` while it still holds the buffer. The stream that takes the buffer next waits for that
work.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.backend.streams import Event, streams_of
from megatron.pipeline.runtime.contract.tensors import num_holders


@dataclass(slots=True)
class _Buffer:
    memory: Tensor
    last_use: Event  # the next user's stream waits for it

    @property
    def is_free(self) -> bool:
        return num_holders(self.memory) == 1


class BufferPool:
    """Byte buffers on `device`, made when no buffer of the size is free, and kept. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = streams_of(device)
        self._buffers: list[_Buffer] = []
        self._lock = threading.Lock()

    def reserve(self, count: int, num_bytes: int) -> None:
        """Make buffers until there are at least `count` of `num_bytes` each."""
        with self._lock:
            for _ in range(count - sum(len(buffer.memory) == num_bytes for buffer in self._buffers)):
                self._make(num_bytes)

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer, uint8 [num_bytes], uninitialised. It is free again when nothing else holds its storage."""
        with self._lock:
            buffers = (buffer for buffer in self._buffers if len(buffer.memory) == num_bytes and buffer.is_free)
            buffer = next(buffers, None) or self._make(num_bytes)
            self._streams.wait(buffer.last_use)
            return buffer.memory.detach()

    def _make(self, num_bytes: int) -> _Buffer:
        buffer = _Buffer(torch.empty(num_bytes, dtype=torch.uint8, device=self._device), self._streams.record())
        self._buffers.append(buffer)
        return buffer

    def mark_used(self, taken: Tensor) -> None:
        """Record that the buffer's last reader has been queued on the current stream.

        Call it while still holding the buffer: otherwise another `take` may get the buffer first.
        """
        with self._lock:
            address = taken.data_ptr()
            buffer = next(buffer for buffer in self._buffers if buffer.memory.data_ptr() == address)
            buffer.last_use = self._streams.record()

    @property
    def num_buffers(self) -> int:
        return len(self._buffers)

    @property
    def allocated_bytes(self) -> int:
        """The bytes of all buffers, free ones included."""
        return sum(len(buffer.memory) for buffer in self._buffers)

    @property
    def used_bytes(self) -> int:
        """The bytes of the buffers in use."""
        with self._lock:
            return sum(len(buffer.memory) for buffer in self._buffers if not buffer.is_free)


class ActivationMemory:
    """Counts the bytes that one rank saves over all of its stages, in graphs and in used buffers.

    Bytes saved between I and W are not included (see `DeferredBytes`).

    Attributes:
        pool: the buffers for moved activations.
        peak_bytes: the maximum over the run so far. Updated when a forward has ended or a buffer is taken, since the
            count grows only then.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        probe = torch.empty(1, device=device)
        assert num_holders(probe) == 1, "this torch counts the holders of a storage in another way"
        self.device = probe.device  # "cuda" becomes the current device, with its number
        self.pool = BufferPool(self.device)
        self.peak_bytes = self._recent_peak_bytes = 0
        self._in_graphs: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()  # the move thread takes buffers, too

    @property
    def current_bytes(self) -> int:
        with self._lock:
            return self._count()

    def take_recent_peak(self) -> int:
        """Return the maximum number of bytes since the last call, or since the start."""
        with self._lock:
            peak, self._recent_peak_bytes = self._recent_peak_bytes, self._count()
        return peak

    def hold(self, stage: int, microbatch: int, num_bytes: int) -> None:
        """Count `num_bytes` for the graph of a microbatch at a stage from now on."""
        with self._lock:
            self._in_graphs[stage, microbatch] = num_bytes
            self._note()

    def drop(self, stage: int, microbatch: int) -> None:
        """Stop counting a graph whose backward has ended."""
        with self._lock:
            self._in_graphs.pop((stage, microbatch), None)

    def take_buffer(self, num_bytes: int, *, instead_of: tuple[int, int] | None = None) -> Tensor:
        """Return a buffer for a microbatch that arrives or leaves.

        `instead_of`: (stage, microbatch) of a graph that leaves. From now on the buffer is counted instead of the
        graph, which is freed as soon as its bytes are copied.
        """
        with self._lock:
            self._in_graphs.pop(instead_of, None)
            buffer = self.pool.take(num_bytes)
            self._note()
            return buffer

    def _count(self) -> int:
        return sum(self._in_graphs.values()) + self.pool.used_bytes

    def _note(self) -> None:
        now = self._count()
        self.peak_bytes = max(self.peak_bytes, now)
        self._recent_peak_bytes = max(self._recent_peak_bytes, now)
