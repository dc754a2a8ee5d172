"""NCCL's process groups: work of a stream of their own, which gloo carries out behind the scenes.

Every call waits for the stream that is current, is work of the group's stream, and returns at once. `wait` of its Work
makes the current stream wait. That the values are there by then is no matter of the account: the host really waits for
gloo.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from tests.pipeline.runtime.cuda.recording.clocks import Clock, joined

_numbers = itertools.count()


class RecordedWork:
    """What a call returns. `keeps`: NCCL's Work holds its tensors."""

    def __init__(self, recorder, clock: Clock, keeps: list[Tensor]) -> None:
        self._recorder = recorder
        self._clock = clock
        self._keeps = keeps
        self.num_in_vain = recorder.lateness()
        self._carried = threading.Event()
        self._error: Exception | None = None

    def carried(self, error: Exception | None) -> None:
        self._error = error
        self._carried.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._carried.wait()
        if self._error is not None:
            raise self._error
        with self._recorder.lock:
            self._recorder.look()
            joined(self._recorder.current.clock, self._clock)
        return True

    def is_completed(self) -> bool:
        with self._recorder.lock:
            self._recorder.look()
            if not self._carried.is_set() or self._recorder.asks_in_vain(self):
                return False
            joined(self._recorder.host.clock, self._clock)
        return True


class HostWork:
    """A transfer over gloo: who waits for it knows that it has read or written its memory."""

    def __init__(self, recorder, clock: Clock, work) -> None:
        self._recorder, self._clock, self._work = recorder, clock, work

    def wait(self, timeout: timedelta) -> None:
        self._work.wait(timeout)
        with self._recorder.lock:
            self._recorder.look()
            joined(self._recorder.host.clock, self._clock)


class HostGroup:
    """A gloo group of two, as links use it: it reads and writes memory of the host."""

    def __init__(self, recorder, group: ProcessGroupGloo) -> None:
        self._recorder = recorder
        self._group = group
        self._timeline = recorder.make(name="gloo")

    def send(self, tensors: list[Tensor], to: int, tag: int) -> HostWork:
        return self._note(tensors, "send over gloo", self._group.send(tensors, to, tag), writes=False)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> HostWork:
        return self._note(tensors, "receive over gloo", self._group.recv(tensors, source, tag), writes=True)

    def _note(self, tensors: list[Tensor], name: str, work, *, writes: bool) -> HostWork:
        recorder = self._recorder
        with recorder.lock:
            recorder.look()
            joined(self._timeline.clock, recorder.host.clock)
            step = self._timeline.step()
            for tensor in tensors:
                recorder.ledger.of(tensor, self._timeline).is_host = True
                recorder.ledger.note(tensor, self._timeline, step, writes=writes, what=name)
            return HostWork(recorder, dict(self._timeline.clock), work)


class RecordedGroup:
    """A ProcessGroupNCCL as far as the runtime uses it."""

    def __init__(self, recorder, store: Store, rank: int, size: int, *, timeout: timedelta) -> None:
        self._recorder = recorder
        self._name = f"communicator {next(_numbers)}"
        self._stream = recorder.make(name=self._name)
        self._carrier = ProcessGroupGloo(PrefixStore("carrier", store), rank, size, timeout)
        self._calls: SimpleQueue = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"carrier of {self._name}", daemon=True)
        self._thread.start()
        self.is_shut_down = False

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            work, call = item
            try:
                call()
            except Exception as error:
                work.carried(error)
            else:
                work.carried(None)
            del item, work, call

    def _give(
        self, operation: str, reads: list[Tensor], writes: list[Tensor], call: Callable[[], object]
    ) -> RecordedWork:
        recorder = self._recorder
        assert not self.is_shut_down, f"{self._name} is used after its end"
        recorder.use(self._name, operation)
        with recorder.lock:
            for tensor in (*reads, *writes):
                recorder.mark_on_device(tensor)  # NCCL takes no others
            joined(self._stream.clock, recorder.current.clock)
            clock = recorder.launch(self._stream, reads, writes, operation)
        work = RecordedWork(recorder, clock, [*reads, *writes])
        self._calls.put((work, call))
        return work

    def rank(self) -> int:
        return self._carrier.rank()

    def size(self) -> int:
        return self._carrier.size()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> RecordedWork:
        with torch.utils._python_dispatch._disable_current_modes():
            sent = [tensor.detach().clone() for tensor in tensors]
        return self._give("send", tensors, [], lambda: self._carrier.send(sent, to, tag).wait())

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> RecordedWork:
        for tensor in tensors:
            self._recorder.receive(tensor)
        return self._give("receive", [], tensors, lambda: self._carrier.recv(tensors, source, tag).wait())

    def allreduce(self, tensors: list[Tensor], options=None) -> RecordedWork:
        options = options or torch.distributed.AllreduceOptions()
        return self._give("all-reduce", [], tensors, lambda: self._carrier.allreduce(tensors, options).wait())

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, options) -> RecordedWork:
        return self._give(
            "reduce-scatter",
            [input],
            [output],
            lambda: self._carrier._reduce_scatter_base(output, input, options).wait(),
        )

    def _allgather_base(self, output: Tensor, input: Tensor) -> RecordedWork:
        return self._give("all-gather", [input], [output], lambda: self._carrier._allgather_base(output, input).wait())

    def shutdown(self) -> None:
        self._calls.put(None)
        self._thread.join()
        self.is_shut_down = True
