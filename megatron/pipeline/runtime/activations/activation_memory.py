"""Buffers for moved activations, and the count of the bytes that a rank saves.

Problem: activations are moved at every microbatch. Allocating their memory each time fragments it and costs time, but
when a buffer may be used again depends on who still reads it: a backward, a gradient that happens to be a view of a
saved tensor, on CUDA kernels that the host has only queued.

Solution: a buffer is free when nobody but the pool holds its storage. So nobody gives buffers back, none can be given
back too early, and what is in use can be counted at any moment. Where the device lags behind the host, whoever has
given it work on a buffer says so while still holding it (`mark_used`), and the stream that takes it next waits.
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
    """Byte buffers on `device`, made when no buffer of the size is free, and kept. Safe from several threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = streams_of(device)
        self._buffers: list[_Buffer] = []
        self._lock = threading.Lock()

    def reserve(self, count: int, num_bytes: int) -> None:
        """Make buffers until there are at least `count` of this size."""
        with self._lock:
            for _ in range(count - sum(len(buffer.memory) == num_bytes for buffer in self._buffers)):
                self._make(num_bytes)

    def take(self, num_bytes: int) -> Tensor:
        """A buffer, uint8 [num_bytes] with any content, which is free again when nothing refers to its storage."""
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
        """Note that the buffer's last reader has been queued on the current stream.

        To be called while the buffer is still held: otherwise another `take` may get it first.
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
    """The bytes that one rank saves over all of its stages, in graphs and in used buffers.

    `peak_bytes` is the maximum over the run so far, updated when a forward has ended or a buffer is taken, the only
    moments at which it grows. Bytes saved between I and W are not included (`DeferredBytes`).
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        probe = torch.empty(1, device=device)
        assert num_holders(probe) == 1, "this torch counts the holders of a storage in another way"
        self.device = probe.device  # "cuda" with the number of the current one
        self.pool = BufferPool(self.device)
        self.peak_bytes = self._recent_peak_bytes = 0
        self._in_graphs: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()  # buffers are taken by the thread of the moves, too

    @property
    def current_bytes(self) -> int:
        with self._lock:
            return self._count()

    def take_recent_peak(self) -> int:
        """The maximum of bytes since the last call, or since the start."""
        with self._lock:
            peak, self._recent_peak_bytes = self._recent_peak_bytes, self._count()
        return peak

    def hold(self, stage: int, microbatch: int, num_bytes: int) -> None:
        """Count the bytes that a graph saves from now on."""
        with self._lock:
            self._in_graphs[stage, microbatch] = num_bytes
            self._note()

    def drop(self, stage: int, microbatch: int) -> None:
        """Forget the bytes of a graph whose backward has ended."""
        with self._lock:
            self._in_graphs.pop((stage, microbatch), None)

    def take_buffer(self, num_bytes: int, *, instead_of: tuple[int, int] | None = None) -> Tensor:
        """A buffer for a microbatch that is to arrive, or to leave: it counts instead of the graph of that (stage,
        microbatch), which is freed as soon as its bytes are copied.
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
