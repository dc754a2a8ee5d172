"""Moves of saved activations: what EVICT, ACCEPT, RETURN and LOAD do on one rank.

Problem: a microbatch's saved activations go from a stage to its pair and back while both compute (BPipe, section 3.2),
and the evictor's backward must not read them before they are back.

Solution: all four post and none waits. EVICT packs into a buffer of the pool and sends it. ACCEPT receives into a
buffer of the pool. RETURN sends what that ACCEPT brought, as soon as it is there. LOAD receives into a buffer, and the
backward (or recompute) of the microbatch waits for it. Each stage and direction has a link of its own. The size of the
buffers is the evictor's to say: it announces it with its first eviction.
"""

from __future__ import annotations

from megatron.pipeline.instruction import Instruction, Kind
from megatron.pipeline.runtime.activation_memory import ActivationMemory
from megatron.pipeline.runtime.channels import Channels
from megatron.pipeline.runtime.stage import Microbatch, Stage


class ActivationTransfers:
    """The moves of this rank's stages; `memory` is the one that the stages were built with."""

    def __init__(self, channels: Channels, memory: ActivationMemory) -> None:
        self._channels = channels
        self._memory = memory

    def evict(self, stage: Stage, microbatch: Microbatch) -> None:
        buffer = stage.evict(microbatch)
        self._channels.activation_bytes.announce(stage.index, len(buffer))
        self._channels.post_send(Kind.EVICT, stage.index, microbatch.index, buffer)

    def accept(self, stage: int, microbatch: int, evictor: int) -> None:
        """Thread of the link, or at once where receiving needs none: the buffer is taken when its size is known."""

        def make():
            return self._memory.take_buffer(self._channels.activation_bytes.read(evictor))

        self._channels.post_receive(Kind.ACCEPT, stage, microbatch, into=make)

    def give_back(self, stage: int, microbatch: int) -> None:
        self._channels.post_forward(Kind.ACCEPT, Kind.RETURN, stage, microbatch)

    def load(self, stage: int, microbatch: int) -> None:
        buffer = self._memory.take_buffer(self._channels.activation_bytes.read(stage))
        self._channels.post_receive(Kind.LOAD, stage, microbatch, into=lambda: buffer)

    def finish_load(self, stage: Stage, microbatch: Microbatch, during: Instruction) -> bool:
        """If a LOAD is posted, wait until it is complete. Whether it was."""
        if not self._channels.is_posted(Kind.LOAD, stage.index, microbatch.index):
            return False
        stage.load(microbatch, self._channels.wait(Kind.LOAD, stage.index, microbatch.index, during))
        return True
