"""The chain: the reductions between a batch's last backward and its step, off the path of the computation.

Problem: reductions over replicas, tied embeddings and the global norm depend on all ranks; waiting for them where
they are posted would stall the pipeline at every batch border.

Solution: one background thread per rank runs them in program order, so every group of ranks sees its collectives in one
order. Only STEP waits. On CUDA the thread works on a stream of its own, which first waits for what the compute stream
had been given when the reduction was posted. A failure in the thread is raised by the next post or wait of the main
thread, and handed to `on_error` at once, since the main thread may be blocked in a transfer.
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
    """Runs posted calls in order on one background thread (and, on CUDA, one stream)."""

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
        """Run `call` after all calls posted before it."""
        self.raise_error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pipeline chain", daemon=True)
            self._thread.start()
        self._num_posted += 1
        self._posted[instruction.version] = self._num_posted
        self._queue.put((instruction, call, self._streams.record()))

    def wait(self, version: int) -> None:
        """Wait until everything posted so far for `version` is done; on CUDA the current stream waits as well.

        Raises the error that a call raised, or TimeoutError naming the call that does not end.
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

    def close(self) -> None:
        """Stop the thread when it has run all posted calls."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(self._timeout)
            self._thread = None

    def raise_error(self) -> None:
        """Raise the error of a call, if one failed."""
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
