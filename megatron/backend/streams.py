"""Streams and events of a device that works asynchronously, and its NCCL process groups.

Problem: on CUDA a call returns before its work is done. A stream that needs what another stream writes has to be told
to wait, and memory may be reused only when no stream works on it any more. On a CPU nothing of that exists. If every
place asked for the device anew, one of the two cases would soon be forgotten, and nobody without a GPU could see it.

Solution: one interface, with an implementation for each kind of device. The runtime always uses events and streams; on
a CPU they are None, and nothing waits. The tests have a third implementation, which runs on a CPU and records what is
ordered before what (`tests/pipeline/runtime/cuda/recording`). `streams_of` chooses from a table (`SIDES`).

Every NCCL communicator has device buffers for each of its blocks (CTAs), and a transfer that waits for its peer keeps
these blocks from computing. A pipeline has many communicators, whose transfers mostly wait. So `nccl_communicator`
bounds the number of blocks and gives their kernels priority: they are few, and other work waits for them.
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

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts

Event = Any  # None where nothing is ever outstanding
Stream = Any


class Streams(Protocol):
    """The streams of one device, as the calling thread sees them."""

    device: torch.device
    runs_ahead: bool
    """Whether calls return before their work is done."""

    def enter_thread(self) -> None:
        """Prepare a thread that gives the device work; called once, at its start."""

    def make(self) -> Stream:
        """A new stream."""

    def on(self, stream: Stream) -> AbstractContextManager:
        """In this context `stream` is the thread's current one."""

    def record(self) -> Event:
        """An event that happens when all present work of the current stream is done."""

    def wait(self, event: Event) -> None:
        """Make later work of the current stream wait for `event`. The host does not wait."""

    def is_done(self, event: Event) -> bool:
        """Whether `event` has happened. The host does not wait."""

    def finish(self, event: Event) -> None:
        """Make the host sleep until `event` has happened; not for the compute thread."""

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that the device can copy from and to while the host goes on."""

    def kept_host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed `host_buffer` that is kept: it takes longer to allocate, and wastes no memory."""

    def pin_mapping(self, tensor: Tensor) -> Tensor:
        """Pin memory that this process, and perhaps others, have mapped, until the process ends."""

    def communicator(self, store: Store, rank: int, size: int, *, max_ctas: int, timeout: timedelta) -> Any:
        """A process group that works on a stream of its own, with at most `max_ctas` blocks (`nccl_communicator`)."""


class CpuStreams:
    """A CPU has done its work when the call returns."""

    runs_ahead = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def enter_thread(self) -> None:
        pass

    def make(self) -> Stream:
        return None

    def on(self, stream: Stream) -> AbstractContextManager:
        return nullcontext()

    def record(self) -> Event:
        return None

    def wait(self, event: Event) -> None:
        pass

    def is_done(self, event: Event) -> bool:
        return True

    def finish(self, event: Event) -> None:
        pass

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A shared mapping, zeroed: the device is the process's private memory here."""
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
        if device.index is None:  # the caller's current one; other threads have another
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)  # else the thread makes a context on GPU 0 and works there

    def make(self) -> Stream:
        return torch.cuda.Stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager:
        return torch.cuda.stream(stream)

    def record(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # whose waiting host sleeps and takes no core from the others
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
        """From torch's allocator, which keeps what is freed, and rounds up to powers of two.

        Raises ValueError where the system does not let it.
        """
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            raise ValueError(_not_pinned(num_bytes, "", error)) from error

    def kept_host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Raises ValueError where the system does not let it."""

        def pin(tensor: Tensor) -> Callable[[], None]:
            _register(tensor, "")
            address = tensor.data_ptr()
            return lambda: torch.cuda.cudart().cudaHostUnregister(address)

        return host_mapping(shape, dtype, prepare=pin)

    def pin_mapping(self, tensor: Tensor) -> Tensor:
        """Raises ValueError where the system does not let it."""
        _register(tensor, " that replicas share")
        return tensor

    def communicator(self, store: Store, rank: int, size: int, *, max_ctas: int, timeout: timedelta) -> Any:
        return nccl_communicator(store, rank, size, max_ctas=max_ctas, timeout=timeout)


def _register(tensor: Tensor, whose: str) -> None:
    result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, _PORTABLE)
    if int(result):
        raise ValueError(_not_pinned(tensor.nbytes, whose, result))


def _not_pinned(num_bytes: int, whose: str, why: object) -> str:
    return (
        f"{num_bytes / 2**30:.3g} GiB of the host's memory{whose} cannot be pinned ({why}); raise the limit on locked "
        "memory (ulimit -l), or give the host more memory"
    )


SIDES: dict[str, Callable[[torch.device], Streams]] = {"cpu": CpuStreams, "cuda": CudaStreams}
"""device type -> its `Streams`."""


def streams_of(device: torch.device) -> Streams:
    """The streams of `device`."""
    return SIDES[device.type](device)


class Milestone:
    """A point in the work of one thread's stream that other threads and their streams wait for."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._event: Event = None
        self._reached = threading.Event()

    @property
    def is_reached(self) -> bool:
        """Whether the host has reached the milestone; work of its stream may still be running."""
        return self._reached.is_set()

    def reach(self) -> None:
        """Mark the milestone as reached: others wait for the present work of the current stream."""
        self._event = self._streams.record()
        self._reached.set()

    def wait(self, timeout: float) -> bool:
        """Make the host wait until the other thread reaches the milestone, at most `timeout` seconds, and the current
        stream until the work is done. Returns False after the timeout.
        """
        if not self._reached.wait(timeout):
            return False
        self._streams.wait(self._event)
        return True


def nccl_communicator(store: Store, rank: int, size: int, *, max_ctas: int, timeout: timedelta) -> Any:
    """A ProcessGroupNCCL of `size` ranks that meet at `store`."""
    options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.config.max_ctas = max_ctas
    return torch.distributed.ProcessGroupNCCL(store, rank, size, options)


def shut_down(group: Any) -> None:
    """End a group whose work is done. All its ranks do so, in the same order as their other groups.

    A communicator that is only forgotten is torn down when the process exits, in no order, which may hang.
    """
    end = getattr(group, "shutdown", None) or getattr(group, "_shutdown", None)  # underscored in older torch
    if end is not None:
        end()
