"""The third side of `megatron.backend.streams`: everything is done at once, and noted as if it were not."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store
from torch.multiprocessing.reductions import StorageWeakRef

from tests.pipeline.runtime.recording.clocks import Clock, Timeline, joined, knows
from tests.pipeline.runtime.recording.ledger import Ledger

_MOST_LATE = 3  # times that the host asks in vain whether something is done


@dataclass
class RecordedEvent:
    clock: Clock
    num_in_vain: int


class Recorder:
    """`Streams` of a CPU that claims to run behind.

    `findings`: (kind, sentence) of what is wrong, each once:

    unordered    two streams at the same bytes, one of them writing
    freed        memory dropped while a stream may still be at it
    host sync    the thread that computes waits for the device
    two threads  a communicator used by two threads that do not know of each other
    late         a communicator's first use of its kind after training has begun
    held         a received tensor that nobody needs any more is still there
    """

    runs_ahead = True

    def __init__(self, *, seed: int = 0) -> None:
        self.device = torch.device("cpu")
        self.findings: list[tuple[str, str]] = []
        self.counts: Counter[str] = Counter()
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.ledger = Ledger(self.report, _place)
        self._streams: dict[int, Timeline] = {}
        self._hosts: dict[int, Timeline] = {}
        self._num_timelines = 0
        self._default = self.make(name="compute")
        self._local = threading.local()
        self._used: dict[str, tuple[tuple[int, int], str]] = {}  # communicator -> its last use by a host thread
        self._known_uses: set[tuple[str, str]] = set()
        self._computes: int | None = None  # the thread that trains now
        self._received: list[StorageWeakRef] = []

    # -- the face ---------------------------------------------------------------------------------------------------

    def enter_thread(self) -> None:
        from tests.pipeline.runtime.recording.operations import watch_this_thread

        watch_this_thread(self)

    def make(self, *, name: str | None = None) -> Timeline:
        with self.lock:
            stream = self._timeline(name or f"stream {self._num_timelines}")
            self._streams[stream.number] = stream
            return stream

    @contextmanager
    def on(self, stream: Timeline):
        before = self.current
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def record(self) -> RecordedEvent:
        with self.lock:
            self._look()
            clock = dict(self.current.clock)
            joined(clock, self.host.clock)
            return RecordedEvent(clock, self.random.randint(0, _MOST_LATE))

    def wait(self, event: RecordedEvent | None) -> None:
        if event is not None:
            with self.lock:
                self._look()
                joined(self.current.clock, event.clock)

    def is_done(self, event: RecordedEvent | None) -> bool:
        if event is None:
            return True
        with self.lock:
            self._look()
            if event.num_in_vain:
                event.num_in_vain -= 1
                return False
            joined(self.host.clock, event.clock)
            return True

    def finish(self, event: RecordedEvent | None) -> None:
        if event is not None:
            self.sync(event.clock, "waits for an event")

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def communicator(self, store: Store, rank: int, size: int, *, max_ctas: int, timeout: timedelta) -> Any:
        from tests.pipeline.runtime.recording.groups import RecordedGroup

        return RecordedGroup(self, store, rank, size, timeout=timeout)

    # -- notes ------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Timeline:
        """The calling thread's current stream."""
        return getattr(self._local, "stream", self._default)

    @property
    def host(self) -> Timeline:
        """The calling thread."""
        with self.lock:
            ident = threading.get_ident()
            if ident not in self._hosts:
                self._hosts[ident] = self._timeline(f"thread {ident}")  # asking for its name may come here again
                self._hosts[ident].name = f"thread {threading.current_thread().name!r}"
            return self._hosts[ident]

    def launch(self, stream: Timeline, reads: list[Tensor], writes: list[Tensor], name: str) -> Clock:
        """Note work of `stream` that the calling thread gives it; the clock that knows of it."""
        with self.lock:
            self._look()
            self.counts["operations"] += 1
            joined(stream.clock, self.host.clock)
            step = stream.step()
            what = f"{name} on {stream.name} ({_place()})"
            on_device = any(self.ledger.of(tensor, stream).on_device for tensor in (*reads, *writes))
            for tensor in reads:
                self.ledger.note(tensor, stream, step, writes=False, what=what)
            for tensor in writes:
                self.ledger.note(tensor, stream, step, writes=True, what=what)
                if on_device:
                    self.ledger.of(tensor, stream).on_device = True
            return dict(stream.clock)

    def sync(self, clock: Clock, what: str) -> None:
        """The calling thread waits until all that `clock` knows of is done."""
        with self.lock:
            self._look()
            self.counts["host syncs"] += 1
            if self.is_computing and not all(knows(self.host.clock, step) for step in clock.items()):
                self.report("host sync", f"the computing thread {what} ({_place()})")
            joined(self.host.clock, clock)

    def read(self, tensor: Tensor, name: str) -> bool:
        """The calling thread reads values of a tensor. Whether that lies on the device."""
        with self.lock:
            on_device = self.ledger.of(tensor, self.current).on_device
            if on_device:
                self.sync(self.launch(self.current, [tensor], [], name), f"reads a value: {name}")
            return on_device

    def mark_on_device(self, tensor: Tensor) -> Tensor:
        """This tensor, and what is made from it, lies on the device; everything else on the host."""
        with self.lock:
            self.ledger.of(tensor, self.current).on_device = True
        return tensor

    def use(self, communicator: str, operation: str) -> None:
        """The calling thread gives a communicator an operation."""
        with self.lock:
            host = self.host
            last = self._used.get(communicator)
            if last is not None and not knows(host.clock, last[0]):
                self.report("two threads", f"{communicator} is used on {host.name}, not in order with {last[1]}")
            self._used[communicator] = host.step(), f"its use on {host.name}"
            if (communicator, operation) not in self._known_uses:
                self._known_uses.add((communicator, operation))
                if self._computes is not None:
                    self.report("late", f"{communicator} does its first {operation} in training ({_place()})")

    def report(self, kind: str, sentence: str) -> None:
        if (kind, sentence) not in self.findings:
            self.findings.append((kind, sentence))

    def receive(self, tensor: Tensor) -> None:
        """A tensor that is to be received; `find_held` asks later whether somebody still has it."""
        with self.lock:
            self._received.append(StorageWeakRef(tensor.untyped_storage()))
            self.mark_on_device(tensor)

    def find_held(self, *, pooled: Iterable[Tensor] = ()) -> None:
        """To be called drained, when nobody needs a received tensor any more, but for buffers of a pool."""
        gc.collect()
        kept = {tensor.untyped_storage()._cdata for tensor in pooled}
        num_held = sum(not each.expired() and each.cdata not in kept for each in self._received)
        if num_held:
            self.report("held", f"{num_held} received tensors are still there after a drain")

    # -- phases -----------------------------------------------------------------------------------------------------

    @contextmanager
    def training(self):
        """The calling thread computes: it should not wait for the device, and all communicators are connected."""
        self._computes = threading.get_ident()
        try:
            yield
        finally:
            self._computes = None

    @property
    def is_computing(self) -> bool:
        return self._computes == threading.get_ident()

    # -- parts ------------------------------------------------------------------------------------------------------

    def _timeline(self, name: str) -> Timeline:
        self._num_timelines += 1
        return Timeline(self._num_timelines, name)

    def _look(self) -> None:
        self.ledger.find_freed(self._streams, list(self._hosts.values()))


def _place() -> str:
    """The innermost line of the runtime that is being executed."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/megatron/pipeline/" in path or "/megatron/backend/" in path or "/megatron/trainer/" in path:
            return f"{path.rsplit('/', 1)[-1]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside of the runtime"
