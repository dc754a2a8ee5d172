"""The queue of a rank's moves: carried out one after another, in the background.

Problem: evictions and loads have to run while forwards and backwards do, and memory may only be taken when the move
before has freed as much (see `megatron.pipeline.moves`).

Solution: one background thread per rank (on CUDA with a stream of its own) calls what it is given, in order. A call
that has begun is *posted*, one that has returned is *complete*. The compute thread asks that the first n moves be
complete. A failure is handed to `on_error` at once, since the compute thread may be blocked in a transfer, and raised
by the next request or wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue

import torch

from megatron.pipeline.instruction import Instruction
from megatron.pipeline.runtime.trace import Tracer


class MoveQueue:
    """Calls in order on one thread, which starts with the first one."""

    def __init__(
        self,
        *,
        device: torch.device,
        tracer: Tracer | None = None,
        on_error: Callable[[Exception], None] = lambda error: None,
        annotate: Callable[[Exception, Instruction], None] = lambda error, instruction: None,
    ) -> None:
        self.num_complete = 0
        self.error: Exception | None = None
        self._device = device
        self._tracer = tracer
        self._on_error = on_error
        self._annotate = annotate
        self._incomplete: deque[Instruction] = deque()
        self._calls: SimpleQueue[tuple[Instruction, Callable[[], None]] | None] = SimpleQueue()
        self._progress = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def num_incomplete(self) -> int:
        return len(self._incomplete)

    @property
    def current(self) -> Instruction | None:
        """The move that is posted, or about to be."""
        incomplete = self._incomplete
        try:
            return incomplete[0]
        except IndexError:
            return None

    def request(self, instruction: Instruction, call: Callable[[], None]) -> None:
        """Have `call` called when the moves before it are complete; it returns when this one is."""
        self._raise_error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pipeline moves", daemon=True)
            self._thread.start()
        self._incomplete.append(instruction)
        self._calls.put((instruction, call))

    def incomplete_move(self, count: int) -> Instruction | None:
        """The last of the first `count` moves; None if it is complete."""
        with self._progress:
            return self._incomplete[count - self.num_complete - 1] if count > self.num_complete else None

    def wait(self, count: int, timeout: float) -> bool:
        """Until the first `count` moves are complete, at most `timeout` seconds. Whether they are.

        Raises what a move raised.
        """
        with self._progress:
            self._progress.wait_for(lambda: self.num_complete >= count or self.error is not None, timeout)
            if self.num_complete < count:
                self._raise_error()
            return self.num_complete >= count

    def close(self, timeout: float) -> None:
        """Stop the thread once it has carried out what was requested."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(timeout)
            self._thread = None

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        is_cuda = self._device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device)) if is_cuda else nullcontext(), torch.no_grad():
            while (item := self._calls.get()) is not None:
                try:
                    self._carry_out(*item)
                except Exception as error:
                    self._annotate(error, item[0])
                    with self._progress:
                        self.error = error
                        self._progress.notify_all()
                    self._on_error(error)
                    return
                del item  # and what the call holds
                with self._progress:
                    self._incomplete.popleft()
                    self.num_complete += 1
                    self._progress.notify_all()

    def _carry_out(self, instruction: Instruction, call: Callable[[], None]) -> None:
        start = self._tracer.now() if self._tracer else None
        call()
        if self._tracer:
            self._tracer.record_move(instruction, start, self._tracer.now())
