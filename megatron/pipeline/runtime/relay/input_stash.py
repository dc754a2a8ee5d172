"""Inputs that wait for their recompute in host memory, and the bytes of a rank's relay.

**Bytes (`RelayLedger`).** Problem: weights live on the host to save device memory, so users want to see how much of
that is used. On CUDA torch's allocator reports its peak. On a CPU the "device" is the private memory of the process,
and the bytes of the relay cannot be told from other bytes there.

Solution: on a CPU the ledger counts the bytes of the relay. It counts the arena of weights and the gradient buffers for
the whole run, and each tensor that stages exchange from its creation until its storage is freed. It does not count the
memory of a running computation, such as the recompute of a microbatch.

On the host the ledger counts the store (weights, gradients, masters), the moments that steps have made, and the buffers
of inputs. A store that replicas share counts in full on each of them.

**Inputs (`InputStash`).** Problem: each stage of a relay saves the inputs of a whole batch from its forwards to its
recomputes, so the bytes on the device would grow with the number of stages.

Solution: OFFLOAD takes the input from its stage and copies it to host memory (`Streams.host_buffer`: pinned on CUDA, a
shared mapping on a CPU). RELOAD copies it into new memory on the device, which the recompute uses. The copies run in
the lanes.

The main thread allocates and frees at fixed places of its row, and not when a copy happens to end. So memory follows
from the program, and on CUDA all blocks are allocated and freed in the order of one stream. An offloaded input is
therefore held on the device until a computation has waited for its OFFLOAD or for a later OFFLOAD of the lane. A host
buffer is reused after a computation has waited for the RELOAD from it. The stash of saved activations
(`activation_stash`) has the same base class, `HostStash`.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron import backend
from megatron.backend.streams import streams_of
from megatron.pipeline.program.instruction import STASH_WORDS, Instruction
from megatron.pipeline.runtime.activations.transfers import SavedMicrobatches
from megatron.pipeline.runtime.contract.stage import Microbatch, Stage

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

    def take_over(self, before: RelayLedger) -> None:
        """Take over the recent peak of the rank's earlier ledger, whose relay is closed."""
        with self._lock:
            self._recent_peak = max(self._recent_peak, before._recent_peak)

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
        """Count a buffer on the host until `note_dropped`."""
        with self._lock:
            self._buffer_bytes += buffer.nbytes

    def note_dropped(self, buffer: Tensor) -> None:
        with self._lock:
            self._buffer_bytes -= buffer.nbytes

    def _forget(self, address: int, num_bytes: int) -> None:
        with self._lock:
            self._counted.discard(address)
            self._device_bytes -= num_bytes


_Key = tuple[int, int]  # stage, microbatch


class HostStash:
    """Tensors of a rank's microbatches that wait in host memory; a subclass says which tensors.

    All calls come from the main thread, except that the lanes call the functions that `offload` and `reload` return.

    Args:
        saved: counts the microbatches that are saved on the device.
        device: the device of the saved tensors.
        ledger: counts the bytes of reloaded inputs and of host buffers; None: they are not counted.

    Attributes:
        num_offloaded, num_bytes_offloaded: the number and the bytes of the copies to the host so far.
        num_buffers: the number of host buffers, each for one microbatch at a stage.
    """

    def __init__(
        self, saved: SavedMicrobatches, *, device: torch.device | str = "cpu", ledger: RelayLedger | None = None
    ) -> None:
        self.num_offloaded = self.num_bytes_offloaded = self.num_buffers = 0
        self._saved = saved
        self._device = torch.device(device)
        self._make = streams_of(self._device).host_buffer
        self._ledger = ledger
        self._free: dict[int, list[Tensor]] = {}  # size in bytes -> free host buffers
        self._away: dict[_Key, tuple[Tensor, Tensor]] = {}  # microbatches on the host -> buffer, and its part in use
        # A list holds the tensors on the device, and the function that copies them refers to the list. So the main
        # thread frees the tensors by emptying the list, even while a lane's thread still refers to the function.
        self._leaving: deque[tuple[_Key, list[Tensor]]] = deque()  # copies to the host, in the order of the lane
        self._coming: dict[_Key, list[Tensor]] = {}  # copies to the device

    @property
    def host_bytes(self) -> int:
        """The bytes of all host buffers, free ones included."""
        in_use = sum(whole.nbytes for whole, _ in self._away.values())
        return in_use + sum(size * len(free) for size, free in self._free.items())

    def note_awaited(self, word: Instruction) -> None:
        """Free the tensors whose copies to the host are done, since a computation has waited for `word`.

        `word` is an instruction of the stash; others are ignored. The copies before `word` in its lane are done, too.
        """
        key = word.stage, word.microbatch
        if word.kind in STASH_WORDS and any(each == key for each, _ in self._leaving):
            left = None
            while left != key:
                left, place = self._leaving.popleft()
                place.clear()
                self._left(left[0])

    def _left(self, stage: int) -> None:
        """Called when the tensors of a microbatch are known to have left the device."""

    def end_backward(self, stage: int, microbatch: int) -> None:
        """Called after the backward of a microbatch, or after its input half."""

    def require_empty(self) -> None:
        """Assert that nothing is on the host or being copied. Called while drained."""
        assert not (self._away or self._leaving or self._coming), f"microbatches {list(self._away)} are still away"

    def _send(self, key: _Key, place: list[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return host memory with this shape and dtype for a microbatch.

        `place`: the list of the tensors that the copy reads, which is emptied to free them.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        whole = self._take(num_bytes)
        buffer = whole[:num_bytes].view(dtype).view(shape)
        self._away[key] = whole, buffer
        self._leaving.append((key, place))
        self.num_offloaded += 1
        self.num_bytes_offloaded += num_bytes
        return buffer

    def _fetch(self, key: _Key) -> tuple[Tensor, list[Tensor]]:
        """Return the host memory of a microbatch, and the list for its copy on the device."""
        assert key in self._away, f"microbatch {key[1]} has never left stage {key[0]}"
        self._coming[key] = []
        return self._away[key][1], self._coming[key]

    def _arrived(self, key: _Key) -> Tensor | None:
        """Return the copy of a microbatch that has come back, and free its host memory; None if nothing has."""
        place = self._coming.pop(key, None)
        if place is None:
            return None
        whole, _ = self._away.pop(key)
        self._free.setdefault(whole.nbytes, []).append(whole)
        return place.pop()

    def _take(self, num_bytes: int) -> Tensor:
        """Return a host buffer of at least `num_bytes`.

        A new buffer replaces a free buffer that is too small. So there are at most as many buffers as there were
        microbatches on the host at once, and no buffer is larger than the largest of these microbatches.
        """
        sizes = sorted(size for size, free in self._free.items() if free)
        fitting = next((size for size in sizes if size >= num_bytes), None)
        if fitting is not None:
            return self._free[fitting].pop()
        if sizes:
            dropped = self._free[sizes[0]].pop()
            if self._ledger is not None:
                self._ledger.note_dropped(dropped)
        else:
            self.num_buffers += 1
        buffer = self._make((num_bytes,), torch.uint8)
        if self._ledger is not None:
            self._ledger.note_on_host(buffer)
        return buffer


class InputStash(HostStash):
    """The inputs of microbatches, for OFFLOAD and RELOAD."""

    def offload(self, stage: Stage, microbatch: Microbatch) -> Callable[[], None]:
        """Take a microbatch's input from the stage. Return the function that copies it to the host, for the lane."""
        input = stage.release_input(microbatch)
        place = [input]
        buffer = self._send((stage.index, microbatch.index), place, input.shape, input.dtype)
        del input
        return lambda: copy(place[0], buffer)

    def reload(self, stage: Stage, microbatch: Microbatch) -> Callable[[], None]:
        """Allocate the input on the device again. Return the function that copies it from the host, for the lane."""
        buffer, place = self._fetch((stage.index, microbatch.index))
        self._saved.add(stage.index)
        place.append(torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device))
        if self._ledger is not None:
            self._ledger.note_on_device(place[0])
        return lambda: copy(buffer, place[0])

    def _left(self, stage: int) -> None:
        self._saved.remove(stage)

    def restore(self, stage: Stage, microbatch: Microbatch) -> None:
        """Give the stage its reloaded input, if there is one. Called after its RELOAD, before its recompute."""
        input = self._arrived((stage.index, microbatch.index))
        if input is not None:
            stage.restore_input(microbatch, input)


def copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)
