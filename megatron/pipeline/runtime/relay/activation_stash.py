"""Saved activations that wait in host memory: SWAP_OUT and SWAP_IN on one rank.

Problem: a rank may save more microbatches than its device has room for, and no other rank may have room to spare.

Solution: the tensors that a microbatch saves leave its graph as they do for a pair rank (`SavedTensors`), but are
copied span by span into host memory, so that the device needs no buffer for them. They come back into a buffer of the
rank's pool, from which the backward reads. Copies run in the lanes of the host, one in each direction at a time.
Buffers are made for the worst timing that the row allows, so their number depends only on the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.backend.streams import streams_of
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.activations.transfers import SavedMicrobatches
from megatron.pipeline.runtime.contract.stage import Microbatch, Stage
from megatron.pipeline.runtime.relay.input_stash import HostStash, copy


class ActivationStash(HostStash):
    """The saved activations of microbatches on the host, for SWAP_OUT and SWAP_IN.

    Args:
        saved: counts the microbatches that are saved on the device.
        memory: the activation memory with which the stages were built.
        number_of: `index` of each of the rank's stages, its number in the model -> its number in the program.
    """

    def __init__(self, saved: SavedMicrobatches, memory: ActivationMemory, number_of: Mapping[int, int]) -> None:
        super().__init__(saved, device=memory.device)
        self._number_of = number_of
        self._make = streams_of(memory.device).kept_host_buffer  # large, and used again for the whole run
        self._memory = memory
        self._loaded: dict[tuple[int, int], Tensor] = {}  # buffers of microbatches whose backward has not ended
        self._num_coming: Counter[int] = Counter()  # bytes -> buffers from the request to the end of the backward

    def offload(self, stage: Stage, microbatch: Microbatch) -> Callable[[], None]:
        """Take the activations of a microbatch from its graph. Return the function that copies them to the host.

        The lane from the device calls the function.
        """
        eviction = stage.evict(microbatch)
        key = number, _ = self._number_of[stage.index], microbatch.index
        buffer = self._send(key, eviction.held, (eviction.num_bytes,), torch.uint8)

        def leave() -> None:
            eviction.pack(buffer)
            self._saved.remove(number)

        return leave

    def reload(self, stage: Stage, microbatch: Microbatch) -> Callable[[], None]:
        """Return the function that copies the activations to the device.

        The lane to the device calls the function, which then takes memory on the device.
        """
        number = self._number_of[stage.index]
        buffer, place = self._fetch((number, microbatch.index))
        size = len(buffer)
        self._num_coming[size] += 1
        self._memory.pool.reserve(self._num_coming[size], size)

        def come() -> None:
            self._saved.add(number)
            place.append(self._memory.take_buffer(size))
            copy(buffer, place[0])

        return come

    def restore(self, stage: Stage, microbatch: Microbatch) -> None:
        """Give the stage its activations, if they have come back. Called before its recompute or backward."""
        key = self._number_of[stage.index], microbatch.index
        buffer = self._arrived(key)
        if buffer is not None:
            self._loaded[key] = buffer  # hold it until `mark_used`: kernels still read it
            stage.load(microbatch, buffer)

    def end_backward(self, stage: int, microbatch: int) -> None:
        """Drop the buffer from which the backward has read."""
        buffer = self._loaded.pop((stage, microbatch), None)
        if buffer is not None:
            self._num_coming[len(buffer)] -= 1
            self._memory.pool.mark_used(buffer)
