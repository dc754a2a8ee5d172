"""The third side of `megatron.backend.streams`: everything is done at once, and noted as if it were not."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from megatron.pipeline.runtime.contract.tensors import num_holders
from tests.pipeline.runtime.cuda.recording.clocks import Clock, Timeline, joined, knows
from tests.pipeline.runtime.cuda.recording.ledger import Ledger

_MOST, _AS_LONG_AS_IT_TRAINS = 3, 1 << 30
"""Times that the host asks in vain whether something is done."""


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
    stranger     a thread asks something of the device that has not said which device it works on
    held         a received tensor that nobody needs any more is still there
    """

    runs_ahead = True
    threads: dict[str, set[str]]
    """name of a thread -> the streams that it gave operations to."""

    def __init__(self, *, seed: int = 0) -> None:
        self.device = torch.device("cpu")
        self.findings: list[tuple[str, str]] = []
        self.counts: Counter[str] = Counter()
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.ledger = Ledger(self.report, _place)
        self._streams: dict[int, Timeline] = {}
        self._hosts: list[Timeline] = []
        self._num_timelines = 0
        self._default = self.make(name="compute")
        self._local = threading.local()
        self._used: dict[str, tuple[tuple[int, int], str]] = {}  # communicator -> its last use by a host thread
        self._known_uses: set[tuple[str, str]] = set()
        self._computes: int | None = None  # the thread that trains now
        self._received: list[StorageWeakRef] = []
        self.threads = defaultdict(set)

    # -- the face ---------------------------------------------------------------------------------------------------

    def enter_thread(self) -> None:
        from tests.pipeline.runtime.cuda.recording.operations import watch_this_thread

        if not getattr(self._local, "has_entered", False):
            self.entered_by_the_caller()
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
            self.look()
            self._know_thread()
            clock = dict(self.current.clock)
            joined(clock, self.host.clock)
            return RecordedEvent(clock, self.lateness())

    def lateness(self) -> int:
        """How often the host asks in vain: a few times, or as long as it trains."""
        return self.random.choice((0, 1, 3, _AS_LONG_AS_IT_TRAINS))

    def wait(self, event: RecordedEvent | None) -> None:
        if event is not None and not getattr(self._local, "is_deaf", False):
            with self.lock:
                self.look()
                self._know_thread()
                joined(self.current.clock, event.clock)

    @contextmanager
    def deaf(self):
        """In this context the calling thread's streams wait for no event, for tests of what is found then."""
        self._local.is_deaf = True
        try:
            yield
        finally:
            self._local.is_deaf = False

    def is_done(self, event: RecordedEvent | None) -> bool:
        if event is None:
            return True
        with self.lock:
            self.look()
            self._know_thread()
            if self.asks_in_vain(event):
                return False
            joined(self.host.clock, event.clock)
            return True

    def asks_in_vain(self, event: RecordedEvent) -> bool:
        """Whether this question comes too early; what is asked for between batches has been done."""
        early = event.num_in_vain > 0 and not (event.num_in_vain > _MOST and self._computes is None)
        event.num_in_vain -= 1
        return early

    def finish(self, event: RecordedEvent | None) -> None:
        if event is not None:
            self.sync(event.clock, "waits for an event")

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.pin(torch.empty(shape, dtype=dtype))

    def kept_host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.pin(torch.zeros(shape, dtype=dtype))

    def pin_mapping(self, tensor: Tensor) -> Tensor:
        return self.pin(tensor)

    def communicator(self, store: Store, rank: int, size: int, *, max_ctas: int, timeout: timedelta) -> Any:
        from tests.pipeline.runtime.cuda.recording.groups import RecordedGroup

        return RecordedGroup(self, store, rank, size, timeout=timeout)

    # -- notes ------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Timeline:
        """The calling thread's current stream."""
        return getattr(self._local, "stream", self._default)

    @property
    def host(self) -> Timeline:
        """The calling thread."""
        if not hasattr(self._local, "host"):
            with self.lock:
                self._local.host = self._timeline("a thread")  # asking for its name may come here again
                self._hosts.append(self._local.host)
            self._local.host.name = f"thread {threading.current_thread().name!r}"
        return self._local.host

    def launch(self, stream: Timeline, reads: list[Tensor], writes: list[Tensor], name: str) -> Clock:
        """Note work of `stream` that the calling thread gives it; the clock that knows of it."""
        with self.lock:
            self.look()
            self.counts["operations"] += 1
            on_device = any(self.ledger.of(tensor, stream).on_device for tensor in (*reads, *writes))
            if on_device:
                self.threads[threading.current_thread().name].add(stream.name)
                joined(stream.clock, self.host.clock)
            else:
                stream = self.host  # works on memory of its own, at once
            step = stream.step()
            what = f"{name} on {stream.name} ({_place()})"
            for tensor in reads:
                self.ledger.note(tensor, stream, step, writes=False, what=what)
            for tensor in writes:
                self.ledger.note(tensor, stream, step, writes=True, what=what)
                memory = self.ledger.of(tensor, stream)
                memory.on_device = memory.on_device or (on_device and not memory.is_host)
            return dict(stream.clock)

    def sync(self, clock: Clock, what: str) -> None:
        """The calling thread waits until all that `clock` knows of is done."""
        with self.lock:
            self.look()
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

    def copy(self, target: Tensor, source: Tensor) -> None:
        """The calling thread copies, and waits for it where one of the two lies on the host."""
        with self.lock:
            if not (self.ledger.has(target) and self.ledger.has(source)):
                return  # gloo's own, for a collective that NCCL does at once
            if self.ledger.of(target, self.current).on_device != self.ledger.of(source, self.current).on_device:
                self.sync(self.launch(self.current, [source], [target], "copy"), "copies between host and device")

    def copied_from_python(self, tensor: Tensor) -> None:
        """A number or list of Python's became a tensor on the device: the host waits for the copy."""
        if _is_called_by_tests():
            return
        with self.lock:
            self.sync(self.launch(self.current, [], [tensor], "copy from Python"), "copies a number to the device")

    def entered_by_the_caller(self) -> None:
        """The calling thread works on this device already."""
        self._local.has_entered = True

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
        """To be called drained, when nobody needs a received tensor any more, but its pool, which alone has it then."""
        gc.collect()
        free = {tensor.untyped_storage()._cdata for tensor in pooled if num_holders(tensor) == 1}
        num_held = len({each.cdata for each in self._received if not each.expired()} - free)
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

    def look(self) -> None:
        """To be called ahead of everything that lets a thread or a stream know more: what was dropped until now?"""
        self.ledger.find_freed(self._streams, self._hosts)

    def pin(self, tensor: Tensor) -> Tensor:
        """This tensor lies in memory of the host that the device can copy from while the host goes on."""
        with self.lock:
            self.ledger.of(tensor, self.current).is_host = True
        return tensor

    def make_like(self, models: list[Tensor], made: list[Tensor]) -> None:
        """New tensors lie where those do after which they are made."""
        with self.lock:
            if any(self.ledger.of(tensor, self.current).on_device for tensor in models):
                for tensor in made:
                    self.mark_on_device(tensor)

    def on_host(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor's values that the host has read."""
        with _disable_current_modes():
            return tensor.clone()

    def on_device(self, tensor: Tensor, *, non_blocking: bool) -> Tensor:
        """A tensor's copy on the device; the tensor itself where it lies there."""
        with self.lock:
            memory = self.ledger.of(tensor, self.current)
            if memory.on_device:
                return tensor
            with _disable_current_modes():
                copy = tensor.detach().clone()
            self.mark_on_device(copy)
            clock = self.launch(self.current, [tensor], [copy], "copy to the device")
            if not (non_blocking and memory.is_host) and not _is_called_by_tests():
                self.sync(clock, "copies to the device, and waits for it")
            return copy

    def _know_thread(self) -> None:
        if not getattr(self._local, "has_entered", False):
            self.report("stranger", f"{self.host.name} has not entered ({_place()})")


def _is_called_by_tests() -> bool:
    """Whether the innermost code that is neither torch's nor a stand-in's is the model or the data of a test."""
    frame = sys._getframe(1)
    while any(part in frame.f_code.co_filename for part in ("/recording/", "/torch/", "/backend/cpu.py")):
        frame = frame.f_back
    return "/tests/" in frame.f_code.co_filename and "test_recording" not in frame.f_code.co_filename


def _place() -> str:
    """The innermost line of the runtime that is being executed."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/megatron/pipeline/" in path or "/megatron/backend/" in path or "/megatron/trainer/" in path:
            return f"{path.rsplit('/', 1)[-1]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside of the runtime"
