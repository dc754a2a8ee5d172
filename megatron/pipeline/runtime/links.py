"""One-directional links between two ranks: how a tensor gets from one process to another.

Problem: the executor wants to post a send or a receive and go on computing; only the instruction that needs a tensor
waits for it. How that is done depends on where tensors live and what carries them: gloo between CPUs, NCCL between
GPUs, or gloo through pinned host memory where GPUs are not joined by NCCL (several ranks on one GPU, as in a test).

Solution: a link class for each of them under one face, chosen by data (`LINKS`; the CUDA classes run in `gpu` tests
only). Every link owns a process group of its two ranks, so that nothing queues behind what it does not depend on. A
link keeps what it sends alive until it has been read: it holds an alias of the tensor, so the stage may drop its own
hold as soon as the send is posted. With gloo, posting itself takes time (a send copies into the socket, a receive makes
its memory), and a send counts as read only once ``wait()`` has returned, while ``is_completed()`` says nothing. So one
thread per link posts in order, waits for the sends and drops the aliases; the compute thread does neither.
"""

from __future__ import annotations

import abc
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from megatron.pipeline.runtime.stage import TensorSpec

NUM_TAGS = 4096  # tags tell microbatches apart, so that a mismatch hangs visibly instead of delivering a wrong tensor
FOREVER = timedelta(days=3650)
_SENDER, _RECEIVER = 0, 1


class Receive(Protocol):
    """A posted receive."""

    def wait(self, timeout: timedelta) -> Tensor:
        """The received tensor; RuntimeError when `timeout` has passed or the connection broke."""


class Link(Protocol):
    """One direction between two ranks; both see sends and receives in the same order."""

    def send(self, tensor: Tensor, tag: int) -> None: ...

    def receive(self, spec: TensorSpec, tag: int) -> Receive: ...

    def num_unread(self) -> int:
        """Sends whose storage is still held."""

    def close(self, timeout: float) -> None:
        """Wait until all sends were read, then stop the link's thread."""


@lru_cache(maxsize=4)
def _gloo_devices(interfaces: str) -> list[Any]:
    """Those of the process, on the interfaces that GLOO_SOCKET_IFNAME lists, or else the host's own.

    Shared by all links, since each device has a thread that wakes a hundred times a second.
    """
    if not interfaces:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]


def gloo_pair(name: str, store: Store, *, member: int, timeout: timedelta) -> ProcessGroupGloo:
    """A gloo group of two ranks under a name that both agree on.

    Built directly and not through ``new_group(use_local_synchronization=True)``: that derives the name from the
    number of groups the process belongs to, which differs between neighbours in a pipeline, so that they would never
    meet.
    """
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = _gloo_devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    options._threads = 1
    return ProcessGroupGloo(PrefixStore(name, store), member, 2, options)


class _Worker:
    """A thread that finishes what it is given, in order, and then drops it."""

    def __init__(self, name: str, finish: Callable[[Any], None], on_error: Callable[[Exception], None]) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._finish = finish
        self._on_error = on_error
        self._num_put = 0
        self.num_finished = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        self._num_put += 1
        self._queue.put(item)

    def num_unfinished(self) -> int:
        return self._num_put - self.num_finished

    def close(self, timeout: float) -> None:
        self._queue.put(None)
        self._thread.join(timeout)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._finish(item)
            except Exception as error:
                self._on_error(error)
                return
            del item
            self.num_finished += 1


class GlooReceive:
    """A receive that the link's thread posts; `make` makes the memory that it fills."""

    __slots__ = ("_error", "_group", "_make", "_posted", "_tag", "_tensor", "_work")

    def __init__(self, group: ProcessGroupGloo, make: Callable[[], Tensor], tag: int) -> None:
        self._group = group
        self._make = make
        self._tag = tag % NUM_TAGS
        self._tensor: Tensor | None = None
        self._work: Any = None
        self._error: Exception | None = None
        self._posted = threading.Lock()  # held until the receive is posted
        self._posted.acquire()

    def post(self) -> None:
        try:
            self._tensor = self._make()
        except RuntimeError as error:  # torch's, out of memory: this rank's own, not a lost peer's
            self._error = MemoryError(str(error))
        else:
            self._post()
        finally:
            self._posted.release()

    def _post(self) -> None:
        try:
            self._work = self._group.recv([self._tensor], _SENDER, self._tag)
        except RuntimeError as error:
            self._error = error

    def wait(self, timeout: timedelta) -> Tensor:
        if not self._posted.acquire(timeout=timeout.total_seconds()):
            raise RuntimeError(f"the link's thread did not post the receive within {timeout.total_seconds():g} s")
        self._posted.release()
        if self._error is not None:
            raise self._error
        self._work.wait(timeout)
        return self._tensor


class _GlooEnd(abc.ABC):
    """One end of a link over gloo, with the thread that posts its transfers."""

    def __init__(
        self, name: str, store: Store, *, sends: bool, timeout: timedelta, device: torch.device, on_error: Callable
    ) -> None:
        self._group = gloo_pair(name, store, member=_SENDER if sends else _RECEIVER, timeout=timeout)
        self._timeout = timeout
        self._device = device
        self._sends = sends
        self._worker = _Worker(name, self._finish_send if sends else GlooReceive.post, on_error)

    @abc.abstractmethod
    def _finish_send(self, item: Any) -> None:
        """On the link's thread: send what `send` has put there, and return when it has been read."""

    def num_unread(self) -> int:
        return self._worker.num_unfinished() if self._sends else 0

    def close(self, timeout: float) -> None:
        self._worker.close(timeout)


class GlooLink(_GlooEnd):
    """CPU tensors over gloo."""

    def send(self, tensor: Tensor, tag: int) -> None:
        self._worker.put((tensor.detach(), tag % NUM_TAGS))

    def _finish_send(self, item: tuple[Tensor, int]) -> None:
        alias, tag = item
        self._group.send([alias], _RECEIVER, tag).wait(self._timeout)

    def receive(self, spec: TensorSpec, tag: int) -> Receive:
        receive = GlooReceive(self._group, lambda: torch.empty(spec.shape, dtype=spec.dtype), tag)
        self._worker.put(receive)
        return receive


class HostStagedLink(_GlooEnd):
    """CUDA tensors over gloo, through pinned host memory: for ranks that NCCL cannot join."""

    def __init__(self, name: str, store: Store, *, device: torch.device, **options: Any) -> None:
        super().__init__(name, store, device=device, **options)
        self._stream = torch.cuda.Stream(device)

    def send(self, tensor: Tensor, tag: int) -> None:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(self._stream)
        self._worker.put((self._stream.record_event(), host, tag % NUM_TAGS))

    def _finish_send(self, item: tuple[Any, Tensor, int]) -> None:
        copied, host, tag = item
        copied.synchronize()
        self._group.send([host], _RECEIVER, tag).wait(self._timeout)

    def receive(self, spec: TensorSpec, tag: int) -> Receive:
        receive = _HostStagedReceive(self._group, spec, self._device, tag)
        self._worker.put(receive)
        return receive


class _HostStagedReceive(GlooReceive):
    """Arrives in pinned memory; waiting copies it to the device."""

    __slots__ = ("_device",)

    def __init__(self, group: ProcessGroupGloo, spec: TensorSpec, device: torch.device, tag: int) -> None:
        super().__init__(group, lambda: torch.empty(spec.shape, dtype=spec.dtype, pin_memory=True), tag)
        self._device = device

    def wait(self, timeout: timedelta) -> Tensor:
        return super().wait(timeout).to(self._device, non_blocking=True)


class NcclLink:
    """CUDA tensors over NCCL, on the group's own stream; waiting makes the current stream wait, not the host."""

    def __init__(
        self, name: str, store: Store, *, sends: bool, timeout: timedelta, device: torch.device, on_error: Callable
    ) -> None:
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout * 2  # `check_overdue` speaks first, and names who waits for whom
        member = _SENDER if sends else _RECEIVER
        self._group = torch.distributed.ProcessGroupNCCL(PrefixStore(name, store), member, 2, options)
        self._device = device
        self._meet(sends)
        self._worker = _Worker(name, self._finish, on_error) if sends else None

    def _meet(self, sends: bool) -> None:
        """NCCL connects at the first use and blocks there; do it now, while both ends are known to come."""
        probe = torch.zeros(1, device=self._device)
        work = self._group.send([probe], _RECEIVER, 0) if sends else self._group.recv([probe], _SENDER, 0)
        work.wait()
        torch.cuda.current_stream(self._device).synchronize()

    def send(self, tensor: Tensor, tag: int) -> None:
        alias = tensor.detach()
        self._worker.put((self._group.send([alias], _RECEIVER, 0), alias))

    def _finish(self, item: tuple[Any, Tensor]) -> None:
        while not item[0].is_completed():
            time.sleep(0.0005)
        item[0].wait()

    def receive(self, spec: TensorSpec, tag: int) -> Receive:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        return _NcclReceive(self._group.recv([tensor], _SENDER, 0), tensor)

    def num_unread(self) -> int:
        return self._worker.num_unfinished() if self._worker else 0

    def close(self, timeout: float) -> None:
        if self._worker:
            self._worker.close(timeout)


class _NcclReceive:
    __slots__ = ("_tensor", "_waited_since", "_work")

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor
        self._waited_since: float | None = None

    def wait(self, timeout: timedelta) -> Tensor:
        self._work.wait()
        self._waited_since = time.monotonic()
        return self._tensor

    def is_overdue(self, timeout: timedelta) -> bool | None:
        """None once it has arrived, else whether the stream has waited for it longer than `timeout`."""
        if self._work.is_completed():
            return None
        return self._waited_since is not None and time.monotonic() - self._waited_since > timeout.total_seconds()


LINKS: dict[tuple[str, str], type] = {
    ("gloo", "cpu"): GlooLink,
    ("gloo", "cuda"): HostStagedLink,
    ("nccl", "cuda"): NcclLink,
}
"""(backend, device type) -> link between two ranks."""
