"""A lane: calls in order on one thread, beside the computation.

Problem: copies, moves of activations and updates on the host take time in which a rank should compute, and each kind of
them has an order of its own.

Solution: one background thread (on CUDA with a stream of its own) runs the calls in order. A request returns at once. A
failure is handed to `on_error` at once, since the compute thread may be blocked in a transfer, and raised by the next
request or wait; later calls do not run.

The queue of a rank's moves is such a lane: evictions and loads have to run beside forwards and backwards, and memory
may only be taken when the move before has freed as much (see `program.move_order`). A call that has begun is *posted*,
a call that has returned is *complete*. The compute thread waits for the first n moves to be complete. On CUDA a call
returns when both hosts have reached the move and the device has it in its queue; the compute thread waits for that
only, its stream waits for the rest (`follow`), and the tensors that the move reads are held until then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from megatron.backend.streams import Event, streams_of
from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.runtime.contract.trace import MOVES, Tracer

_Call = Callable[[], Any]


class LaneThread:
    """Runs calls in order on one thread, which starts with the first call.

    `track`: the thread's name in traces. `annotate(error, instruction)`: called for an error and its instruction.
    """

    def __init__(
        self,
        track: str,
        *,
        device: torch.device,
        tracer: Tracer | None = None,
        on_error: Callable[[Exception], None] = lambda error: None,
        annotate: Callable[[Exception, Instruction], None] = lambda error, instruction: None,
    ) -> None:
        self.num_requested = self.num_complete = 0
        self.error: Exception | None = None
        self._track = track
        self._streams = streams_of(device)
        self._tracer = tracer
        self._on_error = on_error
        self._annotate = annotate
        self._incomplete: deque[Instruction] = deque()
        self._calls: SimpleQueue[tuple[Instruction, _Call, _Call | None, bool] | None] = SimpleQueue()
        self._progress = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def num_incomplete(self) -> int:
        return len(self._incomplete)

    @property
    def current(self) -> Instruction | None:
        """The instruction that runs or is next."""
        incomplete = self._incomplete
        try:
            return incomplete[0]
        except IndexError:
            return None

    def request(
        self, instruction: Instruction, call: _Call, *, ready: _Call | None = None, traced: bool = True
    ) -> None:
        """Queue `ready` and then `call`, behind the calls before; the request is complete when `call` has returned.

        In a trace it begins when `ready` has returned.
        """
        self._raise_error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"pipeline {self._track}", daemon=True)
            self._thread.start()
        self.num_requested += 1
        self._incomplete.append(instruction)
        self._calls.put((instruction, call, ready, traced))

    def wait(self, count: int, timeout: float) -> bool:
        """Wait until the first `count` calls are complete, at most `timeout` seconds; returns whether they are.

        Raises the error of a call.
        """
        with self._progress:
            self._progress.wait_for(lambda: self.num_complete >= count or self.error is not None, timeout)
            if self.num_complete < count:
                self._raise_error()
            return self.num_complete >= count

    def close(self, timeout: float) -> None:
        """Stop the thread when all requests are done, on the device too."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(timeout)
            self._thread = None

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        item = None
        try:
            self._streams.enter_thread()
            with self._streams.on(self._streams.make()), torch.no_grad():
                while (item := self._calls.get()) is not None:
                    result = self._carry_out(*item)
                    item = item[:1]  # and not what the call holds
                    self._note_complete(result)
                    del result
                self._streams.finish(self._streams.record())
        except Exception as error:
            if item is not None:
                self._annotate(error, item[0])
            with self._progress:
                self.error = error
                self._progress.notify_all()
            self._on_error(error)

    def _carry_out(self, instruction: Instruction, call: _Call, ready: _Call | None, traced: bool) -> Any:
        if ready is not None:
            ready()
        if self._tracer is None or not traced:
            return call()
        start = self._tracer.now()
        result = call()
        self._tracer.record_background(self._track, instruction, start, self._tracer.now())
        return result

    def _note_complete(self, result: Any) -> None:
        """Note that the call has returned `result`."""
        with self._progress:
            self._incomplete.popleft()
            self.num_complete += 1
            self._progress.notify_all()


# --- the queue of a rank's moves --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Given:
    """A move that the device works on: its number, its end, and the tensors that it reads until then."""

    count: int
    event: Event
    held: Any


class MoveQueue(LaneThread):
    """Runs moves in order on one thread. On CUDA a call's result is held until the device is done or a stream waits
    for it.
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
        self._given: deque[_Given] = deque()  # moves that the device may still work on; empty on a CPU

    def incomplete_move(self, count: int) -> Instruction | None:
        """The last of the first `count` moves if it is incomplete, else None."""
        with self._progress:
            return self._incomplete[count - self.num_complete - 1] if count > self.num_complete else None

    def follow(self, count: int) -> None:
        """Make the current stream wait until the device is done with the first `count` moves, which are complete.

        Their tensors are dropped: later users of the memory come after them on that stream.
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
