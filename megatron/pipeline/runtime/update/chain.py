"""The chain: the reductions between the last backward of a batch and its step, on a background thread.

Problem: the reductions over replicas, over tied embeddings and of the global norm depend on other ranks. If the main
thread waited for a reduction where the program posts it, the pipeline would stall after every batch.

Solution: one background thread per rank runs the reductions in program order, so all members of a group start its
collectives in the same order. The main thread waits only where it needs the result, as in STEP. On CUDA the background
thread has its own stream. Before each reduction this stream waits for the work that the compute stream had received
when the reduction was posted. If a reduction fails, the next `post` or `wait` of the main thread raises the error. The
error also goes to `on_error` at once, since the main thread may be blocked in a transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from megatron.backend.streams import Event, streams_of
from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.runtime.contract.trace import CHAIN, Tracer


class Chain:
    """Runs posted calls in order on one background thread, on CUDA also on one stream.

    Args:
        device: the device of the calls.
        timeout: seconds that `wait` and `close` wait at most.
        tracer: records start and end of each call.
        on_error: called on the background thread with the error of a call.
        annotate: called before `on_error` with the error and the instruction whose call failed.

    Attributes:
        error: the error of the call that failed; no call runs after it.
        current: the instruction whose call runs now.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        timeout: float,
        tracer: Tracer | None = None,
        on_error: Callable[[Exception], None] = lambda error: None,
        annotate: Callable[[Exception, Instruction], None] = lambda error, instruction: None,
    ) -> None:
        self._streams = streams_of(device)
        self._timeout = timeout
        self._tracer = tracer
        self._on_error = on_error
        self._annotate = annotate
        self._stream = self._streams.make()
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._posted: dict[int, int] = {}  # version -> number of the last call posted for it
        self._num_posted = 0
        self._num_done = 0
        self._done: Event = None
        self._progress = threading.Condition()
        self.error: Exception | None = None
        self.current: Instruction | None = None
        self._thread: threading.Thread | None = None

    def post(self, instruction: Instruction, call: Callable[[], None]) -> None:
        """Run `call` on the background thread after all calls posted before.

        Raises the error of an earlier call.
        """
        self.raise_error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pipeline chain", daemon=True)
            self._thread.start()
        self._num_posted += 1
        self._posted[instruction.version] = self._num_posted
        self._queue.put((instruction, call, self._streams.record()))

    def wait(self, version: int) -> None:
        """Wait until all calls posted so far for `version` are done; on CUDA the current stream waits for them as well.

        Raises the error of a call that failed, or TimeoutError with the call that has not ended.
        """
        ticket = self._posted.pop(version, 0)
        if self._num_done < ticket:
            with self._progress:
                done = self._progress.wait_for(lambda: self._num_done >= ticket or self.error, self._timeout)
            if not done:
                raise TimeoutError(
                    f"{self.current} has not ended after {self._timeout:g} s: another rank has not joined it"
                )
        self.raise_error()
        if ticket:
            self._streams.wait(self._done)

    def is_done(self, version: int) -> bool:
        """Whether all calls posted so far for `version` are done, so that `wait` would not wait."""
        return self._num_done >= self._posted.get(version, 0)

    def close(self) -> None:
        """Stop the thread after all posted calls; waits at most `timeout` seconds."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(self._timeout)
            self._thread = None

    def raise_error(self) -> None:
        """Raise the error of a call, if a call has failed."""
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        try:
            self._streams.enter_thread()
            while (item := self._queue.get()) is not None:
                self.current = item[0]
                self._run(*item)
                self.current = None
                with self._progress:
                    self._num_done += 1
                    self._progress.notify_all()
        except Exception as error:
            if self.current is not None:
                self._annotate(error, self.current)
            with self._progress:
                self.error = error
                self._progress.notify_all()
            self._on_error(error)

    def _run(self, instruction: Instruction, call: Callable[[], None], ready: Event) -> None:
        with self._streams.on(self._stream), torch.no_grad():
            self._streams.wait(ready)
            start = self._tracer.now() if self._tracer else None
            call()
            self._done = self._streams.record()
            if self._tracer:
                self._tracer.record_background(CHAIN, instruction, start, self._tracer.now())
