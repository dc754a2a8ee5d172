"""Buffers for moved activations, and the count of the bytes that a rank saves.

Problem: activations are moved at every microbatch. Allocating their memory each time fragments it and costs time, but
when a buffer may be used again depends on who still reads it: a send that runs, a backward, a gradient that happens to
be a view of a saved tensor.

Solution: a buffer is free when nobody but the pool holds its storage. So nobody gives buffers back, none can be given
back too early, and what is in use can be counted at any moment.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor


def num_holders(tensor: Tensor) -> int:
    """Tensors that share the storage of `tensor`, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # `storage` counts too


class BufferPool:
    """Byte buffers on `device`, made when none of the size is free and then kept. Safe to use from several threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], with any content. It is free again once nothing refers to its storage."""
        with self._lock:
            for buffer in self._buffers:
                if len(buffer) == num_bytes and num_holders(buffer) == 1:
                    return buffer.detach()
            self._buffers.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
            return self._buffers[-1].detach()

    @property
    def num_buffers(self) -> int:
        return len(self._buffers)

    @property
    def allocated_bytes(self) -> int:
        """Of all buffers, free ones included."""
        return sum(map(len, self._buffers))

    @property
    def used_bytes(self) -> int:
        """Of the buffers that somebody holds now."""
        with self._lock:
            return sum(len(buffer) for buffer in self._buffers if num_holders(buffer) > 1)


class ActivationMemory:
    """What one rank saves, over all of its stages, in bytes: in graphs, and in buffers that are in use.

    `peak_bytes` is the most over the run so far, looked at when a forward has ended or a buffer is taken, the only
    moments at which it grows.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        probe = torch.empty(1, device=device)
        assert num_holders(probe) == 1, "this torch counts the holders of a storage in another way"
        self.device = probe.device  # "cuda" with the number of the current one
        self.pool = BufferPool(self.device)
        self.peak_bytes = 0
        self._recent_peak_bytes = 0
        self._in_graphs: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()  # buffers are taken by the links' threads too

    @property
    def current_bytes(self) -> int:
        with self._lock:
            return self._count()

    def take_recent_peak(self) -> int:
        """The most bytes since the last call, or since the start."""
        with self._lock:
            peak, self._recent_peak_bytes = self._recent_peak_bytes, self._count()
        return peak

    def hold(self, stage: int, microbatch: int, num_bytes: int) -> None:
        """A graph saves these bytes from now on."""
        with self._lock:
            self._in_graphs[stage, microbatch] = num_bytes
            self._note()

    def drop(self, stage: int, microbatch: int) -> None:
        """It does no longer: evicted, or its backward has ended."""
        with self._lock:
            self._in_graphs.pop((stage, microbatch), None)

    def take_buffer(self, num_bytes: int) -> Tensor:
        """A buffer for a microbatch that is to arrive."""
        with self._lock:
            buffer = self.pool.take(num_bytes)
            self._note()
        return buffer

    def _count(self) -> int:
        return sum(self._in_graphs.values()) + self.pool.used_bytes

    def _note(self) -> None:
        now = self._count()
        self.peak_bytes = max(self.peak_bytes, now)
        self._recent_peak_bytes = max(self._recent_peak_bytes, now)
