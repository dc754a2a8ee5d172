"""The queue of a rank's moves: carried out one after another, in the background.

Problem: evictions and loads have to run while forwards and backwards do, and memory may only be taken when the move
before has freed as much (see `program.move_order`).

Solution: a `LaneThread`. A call that has begun is *posted*, one that has returned is *complete*. The compute thread
asks that the first n moves be complete. On CUDA that a call has returned says that both hosts have come to the move and
that the device has been given it; the compute thread waits for no more, its stream waits for the rest (`follow`), and
what the move still reads is held until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.backend.streams import Event
from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.runtime.contract.trace import MOVES, Tracer
from megatron.pipeline.runtime.transport.lane import LaneThread


@dataclass(slots=True)
class _Given:
    """A move that the device was given: the how manieth, when it is done, and what it reads until then."""

    count: int
    event: Event
    held: Any


class MoveQueue(LaneThread):
    """Moves in order on one thread. What a call returns is held, on CUDA, until the device is done or a stream
    follows.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        tracer: Tracer | None = None,
        on_error: Callable[[Exception], None] = lambda error: None,
        annotate: Callable[[Exception, Instruction], None] = lambda error, instruction: None,
    ) -> None:
        super().__init__(MOVES, device=device, tracer=tracer, on_error=on_error, annotate=annotate)
        self._given: deque[_Given] = deque()  # what the device may still be at; empty on a CPU

    def incomplete_move(self, count: int) -> Instruction | None:
        """The last of the first `count` moves; None if it is complete."""
        with self._progress:
            return self._incomplete[count - self.num_complete - 1] if count > self.num_complete else None

    def follow(self, count: int) -> None:
        """The current stream goes on when the device is done with the first `count` moves, which are complete.

        What they held is let go: whoever is given its memory now comes after them on that stream.
        """
        if not self._given:
            return
        followed = []
        with self._progress:
            while self._given and self._given[0].count <= count:
                followed.append(self._given.popleft())
        if followed:
            self._streams.wait(followed[-1].event)

    def _note_complete(self, result: Any) -> None:
        event = self._streams.record()
        with self._progress:
            while self._given and self._streams.is_done(self._given[0].event):
                self._given.popleft()
            if self._streams.runs_ahead:
                self._given.append(_Given(self.num_complete + 1, event, result))
            super()._note_complete(result)
