"""Streams and events of a device that works asynchronously, and its NCCL process groups.

Problem: on CUDA a call returns before its work is done. A stream that reads data of another stream must be made to
wait, and memory may be reused only when no stream works on the memory any more. A CPU has neither streams nor events.
If every function asked for the kind of device, one of the two cases would soon be forgotten, and the mistake would not
show on a machine without a GPU.

Solution: one interface, with an implementation for each kind of device. The runtime always uses events and streams; on
a CPU they are None, and nothing waits. The tests have a third implementation, which runs on a CPU and records the order
of operations (`tests/pipeline/runtime/cuda/recording`). `streams_of` chooses from a table (`SIDES`).

Every NCCL communicator has device buffers for each of its blocks (CTAs), and a transfer that waits for its peer keeps
these blocks from computing. A pipeline has many communicators, whose transfers mostly wait. So `communicator`
bounds the number of blocks and gives their kernels priority: these kernels are few, and other work waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Store

from megatron.backend.device import host_mapping
from megatron.documents import GIB

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts

Event = Any  # None on a device whose work is done when a call returns
Stream = Any


class Streams(Protocol):
    """The streams of one device for the calling thread."""

    device: torch.device
    runs_ahead: bool
    """Whether calls return before their work is done."""

    def enter_thread(self) -> None:
        """Prepare a thread that launches work on the device. Each thread calls it once, at its start."""

    def make(self) -> Stream:
        """Make a new stream."""

    def on(self, stream: Stream) -> AbstractContextManager:
        """A block in which `stream` is the thread's current stream."""

    def record(self) -> Event:
        """Record an event that happens when all work launched so far on the current stream is done."""

    def wait(self, event: Event) -> None:
        """Make work that is launched later on the current stream wait for `event`. The host does not wait."""

    def is_done(self, event: Event) -> bool:
        """Whether `event` has happened. The host does not wait."""

    def finish(self, event: Event) -> None:
        """Make the host sleep until `event` has happened. The computing thread must not call it."""

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that the device can copy from and to while the host continues."""

    def kept_host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed `host_buffer` for long use: it takes longer to allocate, and wastes no memory."""

    def pin_mapping(self, tensor: Tensor) -> Tensor:
        """Pin memory that this process, and perhaps other processes, have mapped, until the process ends."""

    def communicator(self, store: Store, rank: int, size: int, *, max_ctas: int, timeout: timedelta) -> Any:
        """A process group that works on a stream of its own, with at most `max_ctas` blocks.

        Its ranks find each other through `store`.
        """


class CpuStreams(Streams):
    """The streams of a CPU, whose work is done when a call returns. Streams and events are None.

    Inherited methods are no-ops.
    """

    runs_ahead = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def on(self, stream: Stream) -> AbstractContextManager:
        return nullcontext()

    def is_done(self, event: Event) -> bool:
        return True

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed shared mapping, since the process's private memory stands for the device's memory."""
        return host_mapping(shape, dtype)

    def kept_host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return host_mapping(shape, dtype)

    def pin_mapping(self, tensor: Tensor) -> Tensor:
        return tensor

    def communicator(self, store: Store, rank: int, size: int, *, max_ctas: int, timeout: timedelta) -> Any:
        raise AssertionError("NCCL joins GPUs; CPUs have gloo groups, whose calls return when they are done")


class CudaStreams:
    """torch's streams and events of one CUDA device."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        if device.index is None:  # take the caller's current device, since other threads have another current device
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)  # otherwise the thread makes a context on GPU 0 and works there

    def make(self) -> Stream:
        return torch.cuda.Stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager:
        return torch.cuda.stream(stream)

    def record(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # a host thread that waits for it sleeps, and leaves its core free
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: Event) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def is_done(self, event: Event) -> bool:
        return event is None or event.query()

    def finish(self, event: Event) -> None:
        if event is not None:
            event.synchronize()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned memory of torch's allocator, which keeps freed blocks and rounds sizes up to powers of two.

        Raises ValueError if the system refuses to pin the memory.
        """
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            raise ValueError(_not_pinned(num_bytes, "", error)) from error

    def kept_host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed mapping that is pinned until it is freed. Raises ValueError if the system refuses to pin it."""

        def pin(tensor: Tensor) -> Callable[[], None]:
            _register(tensor, "")
            address = tensor.data_ptr()
            return lambda: torch.cuda.cudart().cudaHostUnregister(address)

        return host_mapping(shape, dtype, prepare=pin)

    def pin_mapping(self, tensor: Tensor) -> Tensor:
        """Pin a mapping until the process ends. Raises ValueError if the system refuses to pin it."""
        _register(tensor, " that replicas share")
        return tensor

    def communicator(self, store: Store, rank: int, size: int, *, max_ctas: int, timeout: timedelta) -> Any:
        options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        options.config.max_ctas = max_ctas
        return torch.distributed.ProcessGroupNCCL(store, rank, size, options)


def _register(tensor: Tensor, whose: str) -> None:
    result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, _PORTABLE)
    if int(result):
        raise ValueError(_not_pinned(tensor.nbytes, whose, result))


def _not_pinned(num_bytes: int, whose: str, why: object) -> str:
    return (
        f"{num_bytes / GIB:.3g} GiB of the host's memory{whose} cannot be pinned ({why}); raise the limit on locked "
        "memory (ulimit -l), or give the host more memory"
    )


SIDES: dict[str, Callable[[torch.device], Streams]] = {"cpu": CpuStreams, "cuda": CudaStreams}
"""Device type -> implementation of `Streams`."""


def streams_of(device: torch.device) -> Streams:
    """The streams of `device`."""
    return SIDES[device.type](device)


class Milestone:
    """A point in the work of one thread's stream for which other threads and their streams can wait."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._event: Event = None
        self._reached = threading.Event()

    @property
    def is_reached(self) -> bool:
        """Whether the thread has reached the milestone. Work of its stream may still be running."""
        return self._reached.is_set()

    def reach(self) -> None:
        """Mark the milestone as reached: waiting streams wait for all work launched so far on the current stream."""
        self._event = self._streams.record()
        self._reached.set()

    def wait(self, timeout: float) -> bool:
        """Make the calling thread wait until the milestone is reached, for at most `timeout` seconds.

        The current stream then waits until the milestone's work is done. Returns False after the timeout.
        """
        if not self._reached.wait(timeout):
            return False
        self._streams.wait(self._event)
        return True


def shut_down(group: Any) -> None:
    """End a process group whose work is done. All its ranks must call it, and end their groups in the same order.

    A communicator that is not ended is torn down when the process exits, in an arbitrary order, which may hang.
    """
    end = getattr(group, "shutdown", None) or getattr(group, "_shutdown", None)  # underscored in older torch
    if end is not None:
        end()
