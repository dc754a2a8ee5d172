"""The bytes of a rank's relay on the device and on the host, for the report of each batch.

Problem: weights live on the host to save device memory, so users want to see how much of that is used. On CUDA torch's
allocator reports its peak. On a CPU the "device" is the private memory of the process, and the bytes of the relay
cannot be told from other bytes there.

Solution: on a CPU the ledger counts the bytes of the relay. It counts the arena of weights and the gradient buffers for
the whole run, and each tensor that stages exchange from its creation until its storage is freed. It does not count the
memory of a running computation, such as the recompute of a microbatch.

On the host the ledger counts the store (weights, gradients, masters), the moments that steps have made, and the buffers
of inputs. A store that replicas share counts in full on each of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from torch import Tensor

from megatron import backend

DEVICE_PEAK, HOST_PEAK = "device_peak_bytes", "host_peak_bytes"


class RelayLedger:
    """Counts the bytes of one rank. Safe to use from several threads.

    Args:
        always_on_device: the bytes that are on the device for the whole run.
        on_host: returns the present bytes of the host's store and moments.
    """

    def __init__(self, *, always_on_device: int, on_host: Callable[[], int]) -> None:
        self._device_bytes = self._recent_peak = always_on_device
        self._store_bytes = on_host
        self._buffer_bytes = 0
        self._counted: set[int] = set()  # the addresses of storages
        self._lock = threading.RLock()  # reentrant: a storage may be freed while this thread holds the lock

    @property
    def rank_metrics(self) -> dict[str, Callable[[], float]]:
        """The ledger's part of `BatchReport.rank_metrics`: name -> function that is called once per batch."""
        return {DEVICE_PEAK: self.take_device_peak, HOST_PEAK: lambda: self.host_bytes}

    @property
    def device_bytes(self) -> int:
        """The bytes that are counted on the device now."""
        return self._device_bytes

    @property
    def host_bytes(self) -> int:
        """The bytes on the host now. The number never decreases."""
        return self._store_bytes() + self._buffer_bytes

    def take_device_peak(self) -> int:
        """The maximum of bytes on the device since the last call or the start; on CUDA, of torch's allocator."""
        if backend.is_cuda():
            peak = backend.peak_memory_bytes()
            backend.reset_peak_memory()
            return peak
        with self._lock:
            peak, self._recent_peak = self._recent_peak, self._device_bytes
        return peak

    def note_on_device(self, tensor: Tensor | None) -> None:
        """Count the storage of a tensor on the device until the storage is freed. Each storage is counted once."""
        if tensor is None:
            return
        storage = tensor.untyped_storage()
        address, num_bytes = storage._cdata, storage.nbytes()
        with self._lock:
            if address in self._counted:
                return
            self._counted.add(address)
            self._device_bytes += num_bytes
            self._recent_peak = max(self._recent_peak, self._device_bytes)
        weakref.finalize(storage, self._forget, address, num_bytes).atexit = False

    def note_on_host(self, buffer: Tensor) -> None:
        """Count a buffer on the host that is kept for the whole run."""
        with self._lock:
            self._buffer_bytes += buffer.nbytes

    def _forget(self, address: int, num_bytes: int) -> None:
        with self._lock:
            self._counted.discard(address)
            self._device_bytes -= num_bytes
