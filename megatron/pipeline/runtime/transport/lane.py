"""A lane: a background thread that runs calls in order, beside the computation.

Problem: copies, moves of activations, updates on the host and reductions take time in which a rank should compute. Each
kind has its own order.

Solution: one background thread (on CUDA with its own stream) runs the calls in order. A request returns at once. A
failure goes to `on_error` at once, since the compute thread may be blocked in a transfer. The next request or wait
raises it, and later calls do not run.

**The queue of a rank's moves** is such a lane. Evictions and loads have to run beside forwards and backwards. A move
may take memory only when the move before has freed as much (see `program.lane_order`). A call that has begun is
*posted*, a call that has returned is *complete*. The compute thread waits until the first n moves are complete. On CUDA
a call returns when both hosts have reached the move and the move is queued on the device. The compute thread waits only
for that. Its stream waits until the device has done the move (`follow`), and the tensors that the move reads are held
until then.

**The chain** is another lane. It runs the reductions between the last backward of a batch and its step. Reductions
depend on other ranks, so the pipeline would stall after every batch if the main thread waited where the program posts
them. All ranks run the reductions in the order of the program, so all members of a group start its collectives in the
same order. The main thread waits only where it needs the result, as in STEP. On CUDA the lane's stream waits before
each reduction for the work that the compute stream had received when the reduction was posted.
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
from megatron.pipeline.runtime.contract.trace import CHAIN, MOVES, Tracer

_Call = Callable[[], Any]


class LaneThread:
    """Runs calls in order on one thread, which starts with the first request.

    Args:
        track: the thread's name in traces.
        device: on CUDA, the device of the thread's stream.
        tracer: records a span for each call.
        on_error: called on the thread with the error of a call.
        annotate: called with the error and the instruction of its call, before `on_error`.
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
        """The instruction that runs or is next; None if nothing is requested."""
        incomplete = self._incomplete
        try:
            return incomplete[0]
        except IndexError:
            return None

    def request(
        self, instruction: Instruction, call: _Call, *, ready: _Call | None = None, traced: bool = True
    ) -> None:
        """Queue `ready` and then `call` after earlier requests. The request is complete when `call` has returned.

        In a trace the call begins when `ready` has returned. Raises the error of an earlier call.
        """
        self.raise_error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"pipeline {self._track}", daemon=True)
            self._thread.start()
        self.num_requested += 1
        self._incomplete.append(instruction)
        self._calls.put((instruction, call, ready, traced))

    def wait(self, count: int, timeout: float) -> bool:
        """Wait at most `timeout` seconds until the first `count` calls are complete. Return whether they are.

        Raises the error of a failed call, unless these calls were complete before it.
        """
        with self._progress:
            self._progress.wait_for(lambda: self.num_complete >= count or self.error is not None, timeout)
            if self.num_complete < count:
                self.raise_error()
            return self.num_complete >= count

    def close(self, timeout: float) -> None:
        """Stop the thread when all requests are done, also on the device. Wait at most `timeout` seconds."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(timeout)
            self._thread = None

    def abandon(self, timeout: float) -> bool:
        """Stop the thread after the connections broke, so that its requests fail.

        Returns whether the thread has ended within `timeout` seconds.
        """
        thread = self._thread
        self.close(timeout)
        return thread is None or not thread.is_alive()

    def raise_error(self) -> None:
        """Raise the error of a call, if a call has failed."""
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        item = None
        try:
            self._streams.enter_thread()
            with self._streams.on(self._streams.make()), torch.no_grad():
                while (item := self._calls.get()) is not None:
                    result = self._carry_out(*item)
                    item = item[:1]  # drop the tensors that the call holds
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
        """Count the oldest incomplete call as complete; it has returned `result`."""
        with self._progress:
            self._incomplete.popleft()
            self.num_complete += 1
            self._progress.notify_all()


# --- the queue of a rank's moves --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Given:
    """A move that the device works on.

    Attributes:
        count: number of the move, from 1.
        event: the move's end on the device.
        held: the tensors that the move reads until then.
    """

    count: int
    event: Event
    held: Any


class MoveQueue(LaneThread):
    """Runs moves in order on one thread.

    On CUDA a call's result is held until the device has done the move or another stream waits for it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(MOVES, **options)
        self._given: deque[_Given] = deque()  # moves that the device may still work on; empty on a CPU

    def incomplete_move(self, count: int) -> Instruction | None:
        """Return move number `count` (from 1) if it is incomplete, else None."""
        with self._progress:
            return self._incomplete[count - self.num_complete - 1] if count > self.num_complete else None

    def follow(self, count: int) -> bool:
        """Make the current stream wait until the device has done the first `count` moves, all of them complete.

        Return whether the device may still be at work on them. Their tensors are dropped, since later users of the
        memory come after the moves on that stream.
        """
        if not self._given:
            return False
        followed = []
        with self._progress:
            while self._given and self._given[0].count <= count:
                followed.append(self._given.popleft())
        if followed:
            self._streams.wait(followed[-1].event)
        return bool(followed)

    def _note_complete(self, result: Any) -> None:
        event = self._streams.record()
        with self._progress:
            while self._given and self._streams.is_done(self._given[0].event):
                self._given.popleft()
            if self._streams.runs_ahead:
                self._given.append(_Given(self.num_complete + 1, event, result))
            super()._note_complete(result)


# --- the chain of a rank's reductions ---------------------------------------------------------------------------------


class Chain(LaneThread):
    """Runs reductions in order on one thread. `timeout`: the seconds that `wait_for` and `close` wait at most."""

    def __init__(self, *, timeout: float, **options: Any) -> None:
        super().__init__(CHAIN, **options)
        self._timeout = timeout
        self._posted: dict[int, int] = {}  # version -> number of the last reduction posted for it
        self._done: Event = None  # the end of the last reduction on the device

    def post(self, instruction: Instruction, call: Callable[[], None]) -> None:
        """Run `call` after all reductions posted before. Raises the error of an earlier reduction."""
        given = self._streams.record()
        self.request(instruction, call, ready=lambda: self._streams.wait(given))
        self._posted[instruction.version] = self.num_requested

    def wait_for(self, version: int) -> None:
        """Wait until the reductions posted for `version` are done; on CUDA the current stream waits for them as well.

        Raises the error of a reduction that failed, or TimeoutError with the name of the one that has not ended.
        """
        count = self._posted.pop(version, 0)
        if self.num_complete < count and not self.wait(count, self._timeout):
            raise TimeoutError(
                f"{self.current} has not ended after {self._timeout:g} s: another rank has not joined it"
            )
        self.raise_error()
        if count:
            self._streams.wait(self._done)

    def close(self, timeout: float | None = None) -> None:
        super().close(self._timeout if timeout is None else timeout)

    def is_done(self, version: int) -> bool:
        """Return whether all reductions posted for `version` are done, so that `wait_for` would not wait."""
        return self.num_complete >= self._posted.get(version, 0)

    def _carry_out(self, *posted: Any) -> None:
        super()._carry_out(*posted)
        self._done = self._streams.record()
