"""The activations that a stage saves for its backwards: their eviction and load, their buffers and their bytes.

**Buffers.** Problem: activations are moved at every microbatch. Allocating memory for each move fragments the memory
and costs time. But a buffer may be used again only when its last reader is done: a backward, a gradient that is a view
of a saved tensor, or, on CUDA, a kernel that the host has only queued.

Solution: a buffer is free when only the pool holds its storage. So no caller returns buffers, none can be returned too
early, and the bytes in use can be counted at any time. Where the device lags behind the host, a caller that has queued
work on a buffer calls `mark_used` while it still holds the buffer. The stream that takes the buffer next waits for that
work.

**Captures.** A stage owns a `CapturedActivations` or a `NotCaptured`. The latter has the same methods, costs nothing
and refuses to evict. All tensors that a forward saves move with its microbatch, except

- parameters, whichever weight version they hold, and buffers;
- arguments of the model's forward other than the stage's input (tokens, masks): they are data;
- tensors that two successive microbatches have saved: cached masks, rotary tables, and weights outside any module.

Hence the first microbatch cannot be evicted before the forward of the second. Where a stage recomputes some of its
microbatches, the recomputed ones do not move. They are skipped when successive microbatches are compared.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.backend.streams import Event, streams_of
from megatron.pipeline.runtime.activations.saved_tensors import ActivationLayout, SavedTensors, storages_of
from megatron.pipeline.runtime.contract.stage import Eviction, Microbatch
from megatron.pipeline.runtime.contract.tensors import num_holders


@dataclass(slots=True)
class _Buffer:
    memory: Tensor
    last_use: Event  # the next user's stream waits for it

    @property
    def is_free(self) -> bool:
        return num_holders(self.memory) == 1


class BufferPool:
    """A pool of byte buffers on `device`. A buffer is made when none of its size is free, and is kept. Thread-safe."""

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
        self.peak_bytes = self._recent_peak_bytes = self._last_peak_bytes = 0
        self._in_graphs: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()  # the move thread takes buffers, too

    @property
    def current_bytes(self) -> int:
        with self._lock:
            return self._count()

    def take_recent_peak(self) -> int:
        """Return the maximum number of bytes since the last call, or since the start.

        If no bytes were saved in that time, return the previous result again: where batches overlap, all computations
        of a batch may have ended before the call for the previous batch.
        """
        with self._lock:
            self._last_peak_bytes = self._recent_peak_bytes or self._last_peak_bytes
            self._recent_peak_bytes = self._count()
            return self._last_peak_bytes

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


@dataclass(slots=True)
class RandomState:
    """The random generators' states at one moment, used to repeat a forward with the same random numbers."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


@dataclass(slots=True)
class SavedActivations:
    """The saved activations of a microbatch in flight at one stage.

    Attributes:
        input: the leaf that receives the input's gradient; None on the first stage.
        root: the start of the backward: an edge of the graph, which does not hold the output's storage. None while a
            recompute is due.
        kept_input: the input, as `CapturedActivations` keeps it for a recompute.
        random_state: the generators' states, where a recompute is due.
    """

    input: Tensor | None = None
    root: Any = None
    kept_input: Any = None
    random_state: RandomState | None = None


class NotCaptured:
    """The interface of `CapturedActivations` where activations stay in the graph and are never evicted."""

    def __init__(self, stage: int) -> None:
        self._stage = stage

    def capture(self, microbatch: int) -> AbstractContextManager:
        return nullcontext()

    def keep(self, microbatch: int, tensor: Tensor | None) -> Tensor | None:
        return tensor

    def kept(self, tensor: Tensor | None) -> Tensor | None:
        return tensor

    def seal(self, microbatch: int, *, input: Tensor | None, output: Tensor | None, may_move: bool = True) -> None:
        """Nothing to do."""

    def drop(self, microbatch: int) -> None:
        """Nothing to do."""

    def clear(self) -> None:
        """Nothing to do."""

    def saved_bytes(self, microbatch: int) -> int:
        raise self._refusal()

    def evict(self, microbatch: int) -> Eviction:
        raise self._refusal()

    def load(self, microbatch: int, buffer: Tensor) -> None:
        raise self._refusal()

    def _refusal(self) -> RuntimeError:
        return RuntimeError(
            f"stage {self._stage} does not capture its activations, so they cannot move: build it with "
            "activation_memory=ActivationMemory(device)"
        )


class CapturedActivations:
    """The captured microbatches in flight at a stage.

    Args:
        stage: number of the stage.
        module: the module that the stage runs.
        memory: the activation memory of the rank.
    """

    def __init__(self, stage: int, module: torch.nn.Module, memory: ActivationMemory) -> None:
        self.layout: ActivationLayout | None = None
        """The layout of every microbatch, set by the first eviction."""
        self._stage = stage
        self._memory = memory
        self._streams = streams_of(memory.device)
        # Called as functions of the class, since megatron.core's DDP has a list named `buffers`.
        self._own = [*torch.nn.Module.parameters(module), *torch.nn.Module.buffers(module)]
        self._saved: dict[int, SavedTensors] = {}
        self._num_sealed = 0
        # Storages that the previous forward saved. A weak reference keeps a storage's identity from being reused.
        self._last: dict[int, StorageWeakRef] = {}
        self._shared: dict[int, StorageWeakRef] = {}
        self._data: list[Tensor] | None = None  # arguments of the running forward
        module.register_forward_pre_hook(self._note_arguments, with_kwargs=True)

    @contextmanager
    def capture(self, microbatch: int):
        """Context for the forward of `microbatch`. Call `seal` afterwards."""
        assert microbatch not in self._saved, f"microbatch {microbatch} is saved already"
        saved = self._saved[microbatch] = SavedTensors(f"microbatch {microbatch} at stage {self._stage}")
        self._data = []
        with saved.hooks():
            yield

    def _note_arguments(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._data is not None:
            self._data += [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]

    def keep(self, microbatch: int, tensor: Tensor | None) -> Any:
        """Save a tensor that no graph saves (the input of a forward to be recomputed). Return a handle for `kept`."""
        return None if tensor is None else self._saved[microbatch].pack(tensor)

    def kept(self, handle: Any) -> Tensor | None:
        """Return the tensor of a handle from `keep`. Raises RuntimeError while the microbatch is evicted."""
        return None if handle is None else handle.get()

    def seal(self, microbatch: int, *, input: Tensor | None, output: Tensor | None, may_move: bool = True) -> None:
        """End the capture of a forward. Drop the values of `input`, a leaf: the graph has saved the values it needs.

        `may_move`: False for a microbatch that is recomputed at a stage where others are not: its layout is different.
        """
        saved = self._saved[microbatch]
        stay = storages_of(self._data) - storages_of((input, output)) | storages_of(self._own) | self._shared.keys()
        self._data = None
        moving = saved.seal(stay=stay, device=self._memory.device)
        if may_move:
            self._learn_shared(moving)
            self._num_sealed += 1
        if input is not None:
            input.data = torch.empty(1, dtype=input.dtype, device=input.device).expand(input.shape)
        self._memory.hold(self._stage, microbatch, saved.layout.saved_bytes)

    def _learn_shared(self, moving: dict[int, StorageWeakRef]) -> None:
        """Exclude from moves the storages that the previous microbatch has saved, too.

        Applies to all microbatches that are not evicted.
        """
        shared = moving.keys() & self._last.keys()
        self._last = moving
        if shared:
            self._shared.update((storage, moving[storage]) for storage in shared)
            for microbatch, saved in self._saved.items():
                if not saved.is_evicted:
                    saved.exclude(shared)
                    self._memory.hold(self._stage, microbatch, saved.layout.saved_bytes)

    def drop(self, microbatch: int) -> None:
        """Drop the saved tensors of a microbatch whose backward has ended."""
        del self._saved[microbatch]
        self._memory.drop(self._stage, microbatch)

    def clear(self) -> None:
        """Drop the saved tensors of all microbatches, also of one whose forward or backward was interrupted."""
        for microbatch in list(self._saved):
            self.drop(microbatch)
        self._data = None

    def saved_bytes(self, microbatch: int) -> int:
        """Return the bytes that the graph of `microbatch` saves now; 0 while it is evicted."""
        saved = self._saved[microbatch]
        return 0 if saved.is_evicted else saved.layout.saved_bytes

    def evict(self, microbatch: int) -> Eviction:
        """Begin to move the saved tensors of `microbatch`. `Eviction.pack` copies them, uint8 [layout.buffer_bytes].

        A buffer that is given to `pack` may lie on another device. Without a buffer `pack` takes one from the pool.

        Raises ValueError if the microbatch's layout differs from the stage's. Raises RuntimeError if the microbatch is
        evicted already, or before the stage's second forward.
        """
        saved = self._saved[microbatch]
        if self._num_sealed < 2:
            raise RuntimeError(
                f"{saved.name} cannot be evicted before the stage's second forward: what microbatches share is not "
                "known yet"
            )
        if self.layout is None:
            self.layout = saved.layout
        self.layout.require_equal(saved.layout, saved.name)
        saved.leave()
        made = self._streams.record()
        held: list[Tensor] = []

        def pack(buffer: Tensor | None = None) -> Tensor:
            self._streams.wait(made)
            if buffer is None:
                buffer = self._memory.take_buffer(saved.layout.buffer_bytes, instead_of=(self._stage, microbatch))
            left = saved.evict(buffer)
            self._memory.drop(self._stage, microbatch)
            if self._streams.runs_ahead:
                held.extend(left)
            return buffer

        return Eviction(saved.layout.buffer_bytes, pack, held)

    def load(self, microbatch: int, buffer: Tensor) -> None:
        """Let the backward of `microbatch` read from `buffer`. The pool counts it until nothing refers to it."""
        self._saved[microbatch].restore(buffer)


class CapturingStage:
    """Base of the stages of a chain, whose activations can be counted and moved. A subclass calls `_capture`.

    Attributes:
        index: the number of the stage.
        activations: microbatch -> the object that is saved between its forward and its backward, with the attributes
            `input` and `kept_input`.
    """

    index: int
    activations: dict[int, Any]

    def _capture(self, module: torch.nn.Module, memory: ActivationMemory | None) -> None:
        self._captured = NotCaptured(self.index) if memory is None else CapturedActivations(self.index, module, memory)

    def evict(self, microbatch: Microbatch) -> Eviction:
        return self._captured.evict(microbatch.index)

    def load(self, microbatch: Microbatch, buffer: Tensor) -> None:
        self._captured.load(microbatch.index, buffer)

    def saved_bytes(self, microbatch: Microbatch) -> int:
        return self._captured.saved_bytes(microbatch.index)

    def release_input(self, microbatch: Microbatch) -> Tensor:
        saved = self.activations[microbatch.index]
        input, saved.input, saved.kept_input = saved.input.detach(), None, None
        return input

    def restore_input(self, microbatch: Microbatch, input: Tensor) -> None:
        self.activations[microbatch.index].kept_input = input
