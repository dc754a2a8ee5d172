"""One-directional links that carry tensors between two processes.

Problem: the executor has to post a send or a receive and continue to compute. Only the instruction that needs a tensor
waits for it. The transport depends on the device: gloo between CPUs, NCCL between GPUs, or gloo through pinned host
memory where NCCL cannot connect the GPUs (several ranks on one GPU, as in a test).

Solution: a link class for each transport, with one interface, chosen from a table (`LINKS`). Every link owns a process
group of its two ranks, so that no transfer queues behind an independent one. A link keeps sent tensors alive until they
have been read: it holds an alias of the tensor, so the stage may drop its own reference when the send is posted.

With gloo, posting itself takes time: a send copies into the socket, a receive allocates its memory. Only the return of
``wait()`` shows that a send has been read; ``is_completed()`` does not show it. So one thread per link posts in order,
waits for the sends and drops the aliases. With NCCL posting is quick and ``is_completed()`` is right, so the link needs
no thread: it drops read tensors whenever it is used (`drop_read`).
"""

from __future__ import annotations

import abc
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from megatron.backend.gloo import options_on_shared_device
from megatron.backend.streams import shut_down, streams_of
from megatron.pipeline.communicators import COMMUNICATOR_CTAS
from megatron.pipeline.runtime.contract.tensors import TensorSpec, as_real, num_holders

NUM_TAGS = 4096  # a tag names the microbatch, so that a mismatch hangs visibly instead of delivering a wrong tensor
FOREVER = timedelta(days=3650)
_SENDER, _RECEIVER = 0, 1


class Receive(Protocol):
    """A posted receive. After `wait` it holds no tensor."""

    def wait(self, timeout: timedelta) -> Tensor:
        """Return the received tensor. Raises RuntimeError after `timeout` or if the connection breaks."""


class Link(Protocol):
    """One direction between two ranks. Sends and receives must be posted in the same order."""

    host_waits: bool
    """Whether ``Receive.wait`` blocks the host until the tensor is there. If not, only the current stream waits."""

    def send(self, tensor: Tensor, tag: int) -> None: ...

    def receive(self, spec: TensorSpec, tag: int) -> Receive: ...

    def drop_read(self) -> None:
        """Drop the tensors that have been read. Called on the thread that sends."""

    def num_unread(self) -> int:
        """Return the number of sends whose storage is still held."""

    def close(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until all sends are read, then end the link's thread and group."""


def gloo_pair(name: str, store: Store, *, member: int, timeout: timedelta) -> ProcessGroupGloo:
    """Make a gloo group of two ranks under a name that both pass. `member`: 0 at one end, 1 at the other.

    The group is built directly, not through ``new_group(use_local_synchronization=True)``. That function derives the
    name from the number of groups of the process. The number differs between neighbours in a pipeline, so they would
    never connect.
    """
    options = options_on_shared_device("links", timeout, num_threads=1)
    return ProcessGroupGloo(PrefixStore(name, store), member, 2, options)


class GlooReceive:
    """A receive that the link's thread posts. `make` allocates its memory."""

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
        except RuntimeError as error:  # torch is out of memory: an error of this rank, not a lost peer
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
        tensor, self._tensor, self._work = self._tensor, None, None
        return tensor


class _GlooEnd(abc.ABC):
    """One end of a link over gloo, with a thread that posts its transfers in order and then drops them."""

    host_waits = True

    def __init__(
        self, name: str, store: Store, *, sends: bool, timeout: timedelta, device: torch.device, on_error: Callable
    ) -> None:
        self._group = gloo_pair(name, store, member=_SENDER if sends else _RECEIVER, timeout=timeout)
        self._timeout, self._on_error = timeout, on_error
        self._streams = streams_of(device)
        self._finish = self._finish_send if sends else GlooReceive.post
        self._sends = sends
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._num_put = self._num_finished = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @abc.abstractmethod
    def _finish_send(self, item: Any) -> None:
        """Send a queued tensor and return when it has been read. Runs on the link's thread."""

    def _put(self, item: Any) -> None:
        self._num_put += 1
        self._queue.put(item)

    def _work(self) -> None:
        try:
            self._streams.enter_thread()
            while (item := self._queue.get()) is not None:
                self._finish(item)
                del item
                self._num_finished += 1
        except Exception as error:
            self._on_error(error)

    def drop_read(self) -> None:
        """Do nothing: the link's thread drops read tensors."""
        return

    def num_unread(self) -> int:
        return self._num_put - self._num_finished if self._sends else 0

    def close(self, timeout: float) -> None:
        self._queue.put(None)
        self._thread.join(timeout)


class GlooLink(_GlooEnd):
    """CPU tensors over gloo."""

    def send(self, tensor: Tensor, tag: int) -> None:
        self._put((tensor.detach(), tag % NUM_TAGS))

    def _finish_send(self, item: tuple[Tensor, int]) -> None:
        alias, tag = item
        self._group.send([alias], _RECEIVER, tag).wait(self._timeout)

    def receive(self, spec: TensorSpec, tag: int) -> Receive:
        receive = GlooReceive(self._group, lambda: torch.empty(spec.shape, dtype=spec.dtype), tag)
        self._put(receive)
        return receive


class HostStagedLink(_GlooEnd):
    """CUDA tensors over gloo, through pinned host memory: for ranks that NCCL cannot connect."""

    def __init__(self, name: str, store: Store, *, device: torch.device, **options: Any) -> None:
        super().__init__(name, store, device=device, **options)
        self._device = device
        self._stream = self._streams.make()

    def send(self, tensor: Tensor, tag: int) -> None:
        host = self._streams.host_buffer(tensor.shape, tensor.dtype)
        alias = tensor.detach()
        made = self._streams.record()
        with self._streams.on(self._stream):
            self._streams.wait(made)
            host.copy_(alias, non_blocking=True)
            copied = self._streams.record()
        self._put((copied, alias, host, tag % NUM_TAGS))

    def _finish_send(self, item: tuple[Any, Tensor, Tensor, int]) -> None:
        copied, _, host, tag = item
        self._streams.finish(copied)
        self._group.send([host], _RECEIVER, tag).wait(self._timeout)

    def receive(self, spec: TensorSpec, tag: int) -> Receive:
        receive = _HostStagedReceive(self._group, lambda: self._streams.host_buffer(spec.shape, spec.dtype), tag)
        receive.device = self._device
        self._put(receive)
        return receive


class _HostStagedReceive(GlooReceive):
    """A receive into pinned memory. `wait` copies the tensor to the device."""

    __slots__ = ("device",)

    def wait(self, timeout: timedelta) -> Tensor:
        return super().wait(timeout).to(self.device, non_blocking=True)


class NcclLink:
    """CUDA tensors over NCCL, on the group's own stream. A wait blocks the current stream, not the host."""

    host_waits = False

    def __init__(
        self, name: str, store: Store, *, sends: bool, timeout: timedelta, device: torch.device, on_error: Callable
    ) -> None:
        self._device = device
        self._streams = streams_of(device)
        self._group = self._streams.communicator(
            PrefixStore(name, store),
            _SENDER if sends else _RECEIVER,
            2,
            max_ctas=COMMUNICATOR_CTAS["link"],
            timeout=timeout * 2,  # `Channels.check_overdue` reports earlier and names who waits for whom
        )
        self._on_error = on_error
        self._unread: deque[tuple[Any, Tensor]] = deque()
        self._buffers: list[Tensor] = []
        self._meet(sends)

    def _meet(self, sends: bool) -> None:
        """Connect now, since both ends are here. NCCL would connect at the first use, and block until both come."""
        probe = torch.zeros(1, device=self._device)
        work = self._group.send([probe], _RECEIVER, 0) if sends else self._group.recv([probe], _SENDER, 0)
        work.wait()
        self._streams.finish(self._streams.record())

    def send(self, tensor: Tensor, tag: int) -> None:
        self.drop_read()
        alias = tensor.detach()
        self._unread.append((self._group.send([as_real(alias)], _RECEIVER, 0), alias))

    def receive(self, spec: TensorSpec, tag: int) -> Receive:
        tensor = self._free_buffer(spec)
        return _NcclReceive(self._group.recv([as_real(tensor)], _SENDER, 0), tensor)

    def _free_buffer(self, spec: TensorSpec) -> Tensor:
        """Return a free receive buffer, which the link keeps for reuse.

        Receives are posted far ahead, and the allocator would not reuse the memory before all later work of the group's
        stream is done. Reuse is safe: the last user has queued its work on the current stream, and NCCL waits for that
        stream.
        """
        for buffer in self._buffers:
            if num_holders(buffer) == 1 and buffer.shape == spec.shape and buffer.dtype == spec.dtype:
                return buffer.detach()
        self._buffers.append(torch.empty(spec.shape, dtype=spec.dtype, device=self._device))
        return self._buffers[-1].detach()

    def drop_read(self) -> None:
        while self._unread and self._unread[0][0].is_completed():
            work, _ = self._unread.popleft()
            try:
                work.wait()  # returns at once, or raises the error that ended the send
            except RuntimeError as error:
                self._on_error(error)

    def num_unread(self) -> int:
        self.drop_read()
        return len(self._unread)

    def close(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.num_unread() and time.monotonic() < deadline:
            time.sleep(0.001)
        self._buffers.clear()
        if not self._unread:
            shut_down(self._group)


class _NcclReceive:
    __slots__ = ("_tensor", "_work")

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, timeout: timedelta) -> Tensor:
        self._work.wait()
        tensor, self._tensor, self._work = self._tensor, None, None  # `_work` holds the tensor, too
        return tensor


LINKS: dict[tuple[str, str], type] = {
    ("gloo", "cpu"): GlooLink,
    ("gloo", "cuda"): HostStagedLink,
    ("nccl", "cuda"): NcclLink,
}
"""(backend, device type) -> class of the links between two ranks."""
