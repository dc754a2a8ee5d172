"""The activations that a stage saves between the forward and the backward of a microbatch, ready for eviction and load.

A stage owns a `CapturedActivations` or a `NotCaptured`. The latter has the same methods, costs nothing and refuses to
evict. All tensors that a forward saves move with its microbatch, except

- parameters, whichever weight version they hold, and buffers;
- arguments of the model's forward other than the stage's input (tokens, masks): they are data;
- tensors that two successive microbatches have saved: cached masks, rotary tables, and weights outside any module.

Hence the first microbatch cannot be evicted before the forward of the second.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.backend.streams import streams_of
from megatron.pipeline.runtime.activations.activation_memory import ActivationMemory
from megatron.pipeline.runtime.activations.saved_tensors import ActivationLayout, SavedTensors, storages_of
from megatron.pipeline.runtime.contract.stage import Eviction


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
        context: any other data that the stage needs to recompute.
        random_state: the generators' states, where a recompute is due.
    """

    input: Tensor | None = None
    root: Any = None
    context: Any = None
    random_state: RandomState | None = None


class ActivationStore:
    """The saved activations of microbatches. `peak` is the largest number saved at once."""

    def __init__(self) -> None:
        self._saved: dict[int, SavedActivations] = {}
        self.peak = 0

    def __len__(self) -> int:
        return len(self._saved)

    def put(self, microbatch: int, saved: SavedActivations) -> None:
        assert microbatch not in self._saved, f"microbatch {microbatch} is saved already"
        self._saved[microbatch] = saved
        self.peak = max(self.peak, len(self._saved))

    def get(self, microbatch: int) -> SavedActivations:
        return self._saved[microbatch]

    def take(self, microbatch: int) -> SavedActivations:
        """Remove and return the saved activations of a microbatch."""
        return self._saved.pop(microbatch)


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

    def seal(self, microbatch: int, *, input: Tensor | None, output: Tensor | None) -> None:
        """Nothing to do."""

    def drop(self, microbatch: int) -> None:
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

    def seal(self, microbatch: int, *, input: Tensor | None, output: Tensor | None) -> None:
        """End the capture of a forward. Drop the values of `input`, a leaf: the graph has saved those it needs."""
        saved = self._saved[microbatch]
        stay = storages_of(self._data) - storages_of((input, output)) | storages_of(self._own) | self._shared.keys()
        self._data = None
        moving = saved.seal(stay=stay, device=self._memory.device)
        self._learn_shared(moving)
        self._num_sealed += 1
        if input is not None:
            input.data = torch.empty(1, dtype=input.dtype, device=input.device).expand(input.shape)
        self._memory.hold(self._stage, microbatch, saved.layout.saved_bytes)

    def _learn_shared(self, moving: dict[int, StorageWeakRef]) -> None:
        """Exclude storages from moves that the previous microbatch has saved, too: for all microbatches not evicted."""
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

    def saved_bytes(self, microbatch: int) -> int:
        """Return the bytes that the graph of `microbatch` saves now; 0 while it is evicted."""
        saved = self._saved[microbatch]
        return 0 if saved.is_evicted else saved.layout.saved_bytes

    def evict(self, microbatch: int) -> Eviction:
        """Begin to move the saved tensors of `microbatch`. `Eviction.pack` copies them, uint8 [layout.buffer_bytes].

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

        def pack() -> Tensor:
            self._streams.wait(made)
            buffer = self._memory.take_buffer(saved.layout.buffer_bytes, instead_of=(self._stage, microbatch))
            left = saved.evict(buffer)
            if self._streams.runs_ahead:
                held.extend(left)
            return buffer

        return Eviction(saved.layout.buffer_bytes, pack, held)

    def load(self, microbatch: int, buffer: Tensor) -> None:
        """Let the backward of `microbatch` read from `buffer`. The pool counts it until nothing refers to it."""
        self._saved[microbatch].restore(buffer)
