"""Break the connections of this process, so that none of its threads waits for another rank any longer.

Problem: after a rank is lost, threads of the other ranks still wait in gloo's transfers and collectives. They wait for
the lost rank, which may only be stopped and so keep its connections, or for a rank that has left the batch. Or they
wait for a key that the lost rank was to write to the job's store. Such a wait ends only at its timeout of many minutes,
and no call can end it earlier.

Solution: shut down the sockets themselves. gloo's own thread finds each socket closed, and the waits end with an error,
on both ranks. The connections over which the surviving ranks agree stay open. They are identified by the inode numbers
of their sockets, because the next connection may reuse the descriptor number of a closed one.

Problem: gloo forgets sends. If a write fails because the connection has just been broken, or if a part of a message is
still to be written then, gloo queues the send, and the error that follows does not end it (`Pair::signalException`
passes over unbound buffers in the queue). Its thread waits for the timeout of the group, and the collective with it.

Solution: sockets are shut down for reading only, so that this rank's own writes do not fail. For what is left, such as
writes to a process that was killed, `interrupt_waits` lets a wait for a collective or a send that has no timeout look
whether connections were broken meanwhile, and end. The thread of the group stays behind until the group's timeout. A
group that is destroyed waits for its threads, so `leave_behind` keeps all groups until then.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import OpType
from torch.distributed import AllreduceOptions, ProcessGroup, ProcessGroupGloo, ReduceScatterOptions, Work

from megatron.backend.gloo import remember_groups, take_groups

_POLL_INTERVAL = timedelta(seconds=0.2)
_PATIENCE = 1.0  # seconds after a break in which gloo may end a collective by itself
_RECEIVES = {int(each) for each in (OpType.RECV, OpType.RECVANYSOURCE)}
_SEND = int(OpType.SEND)

_num_breaks = 0
_left_behind: list[tuple[float, list[ProcessGroupGloo]]] = []  # groups, and until when their threads may wait


def open_connections() -> frozenset[int]:
    """Return the inode numbers of this process's TCP connections. No later connection has one of them."""
    return frozenset(inode for number, inode in _descriptors() if _is_connected(number))


def break_connections(*, kept: Collection[int]) -> int:
    """Shut down the TCP connections of this process, and return their number.

    Args:
        kept: the inode numbers of connections that stay, as `open_connections` returns them.
    """
    global _num_breaks
    broken = 0
    for number, inode in _descriptors():
        if inode not in kept and _is_connected(number):
            with suppress(OSError), _socket(number) as connection:
                connection.shutdown(socket.SHUT_RD)
                broken += 1
    _num_breaks += 1
    return broken


def interrupt_waits() -> None:
    """Let waits for gloo's collectives and sends end after `break_connections`, in this process from now on.

    Such a wait, if it has no timeout, raises RuntimeError; with a timeout it is torch's own. Groups that are made from
    now on can be left behind. Later calls are no-ops.
    """
    remember_groups()
    if Work.wait is _interrupted_wait:
        return
    Work.wait = _interrupted_wait
    atexit.register(_keep_to_the_end)
    for kind in (ProcessGroup, ProcessGroupGloo):
        for name in _REDUCE_SCATTERS:
            if hasattr(kind, name):
                setattr(kind, name, partialmethod(_reduce_scatter, getattr(kind, name)))


def leave_behind(timeout: timedelta) -> None:
    """Keep the gloo groups that this process has made since the last call, for the timeout of their operations.

    Groups that were left behind before are dropped when their time is over.
    """
    now = time.monotonic()
    _left_behind[:] = [each for each in _left_behind if each[0] > now]
    _left_behind.append((now + timeout.total_seconds() + _PATIENCE, take_groups()))


def _keep_to_the_end() -> None:
    """Let the interpreter end without destroying groups, whose threads may still wait."""
    leave_behind(timedelta())
    for _, groups in _left_behind:
        for group in groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


_wait: Callable[..., bool] = Work.wait
_REDUCE_SCATTERS = ("_reduce_scatter_base", "reduce_scatter_single")
"""The methods of torch's versions that `dist.reduce_scatter_tensor` and its like call."""


def _interrupted_wait(work: Work, timeout: timedelta | None = None) -> bool:
    """As `Work.wait`. With a timeout, and for a receive, it is torch's own wait."""
    if timeout is not None or (kind := work._get_op_type()) in _RECEIVES:
        return _wait(work) if timeout is None else _wait(work, timeout)
    look = _LooksAtSend(work) if kind == _SEND else partial(_look_at_collective, work)
    begun_at, broken_at = _num_breaks, None
    while not look():
        if _num_breaks > begun_at:
            broken_at = broken_at or time.monotonic()
            if time.monotonic() > broken_at + _PATIENCE:
                raise RuntimeError("connection reset, since a rank is lost, and gloo does not end the wait")
    return True


def _look_at_collective(work: Work) -> bool:
    """Wait a moment for a collective. Return whether it is done, or raise its error."""
    try:
        return _wait(work, _POLL_INTERVAL)
    except RuntimeError as error:
        if "Operation timed out" not in str(error):  # the collective's own error
            raise
    return work.is_completed() and _wait(work)


class _LooksAtSend:
    """Waits for a send in a thread of its own: a wait with a timeout would break the connection when the time is over.

    Each call waits a moment and returns whether the send is done, or raises its error.
    """

    def __init__(self, work: Work) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="send", daemon=True)
        self._thread.start()

    def _run(self, work: Work) -> None:
        try:
            _wait(work)
        except BaseException as error:
            self._error = error

    def __call__(self) -> bool:
        self._thread.join(_POLL_INTERVAL.total_seconds())
        is_over = not self._thread.is_alive()  # before the error, which the thread may note meanwhile
        if self._error is not None:
            raise self._error
        return is_over


class _ReduceScatter:
    """gloo's reduce-scatter: an all-reduce, of which each rank takes its part.

    torch's own work waits for the all-reduce where nobody can interrupt it.
    """

    def __init__(
        self, group: ProcessGroup | ProcessGroupGloo, output: Tensor, whole: Tensor, options: ReduceScatterOptions
    ) -> None:
        if output.numel() * group.size() != whole.numel():
            raise ValueError(f"{whole.numel()} numbers are not {output.numel()} for each of {group.size()} ranks")
        self._output, self._whole = output, whole.clone().reshape(-1)
        self._place = group.rank(), group.size()
        sums = AllreduceOptions()
        sums.reduceOp = options.reduceOp
        self._work = group.allreduce([self._whole], sums)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        _interrupted_wait(self._work, timeout)
        rank, size = self._place
        self._output.copy_(self._whole.chunk(size)[rank].view_as(self._output))
        return True


def _reduce_scatter(
    group: ProcessGroup | ProcessGroupGloo, of_torch: Callable[..., Work], output: Tensor, whole: Tensor,
    *options: ReduceScatterOptions,
) -> Any:  # fmt: skip
    if output.device.type != "cpu":
        return of_torch(group, output, whole, *options)
    return _ReduceScatter(group, output, whole, *(options or (ReduceScatterOptions(),)))


def _descriptors() -> Iterator[tuple[int, int]]:
    """Yield (file descriptor, inode number) of this process's open files."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            yield int(name), os.fstat(int(name)).st_ino


def _is_connected(number: int) -> bool:
    with suppress(OSError), _socket(number) as each:  # raised if it is no socket, or a listening one
        each.getpeername()
        return each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM
    return False


@contextmanager
def _socket(number: int) -> Iterator[socket.socket]:
    duplicate = os.dup(number)
    try:
        each = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    with each:
        yield each
