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
writes to a process that was killed, `interrupt_waits` lets a wait for a collective look whether connections were broken
meanwhile, and end. The thread of the group stays behind until its timeout. So the group must not be destroyed, which
would wait for the thread: `leave_behind` keeps such groups until the process ends.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceScatterOptions, Work

_BETWEEN_LOOKS = timedelta(seconds=0.2)
_PATIENCE = 1.0  # seconds after a break in which gloo may end a collective by itself
_WAITS_BY_ITSELF = (12, 13, 14)  # c10d::OpType SEND, RECV, RECVANYSOURCE: a wait with a timeout breaks connections

_num_breaks = 0
_has_left_waits = False


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
    """Let waits for gloo's collectives end after `break_connections`, in this process from now on.

    Such a wait raises RuntimeError. Later calls are no-ops.
    """
    if Work.wait is _interrupted_wait:
        return
    Work.wait = _interrupted_wait
    for name in _REDUCE_SCATTERS:
        setattr(ProcessGroup, name, _reduce_scatter)


def leave_behind(groups: Iterable[ProcessGroup]) -> None:
    """If a wait has left a thread of a group behind, keep the groups until the process ends."""
    global _has_left_waits
    if _has_left_waits:
        for group in groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # also at exit nobody waits for the thread
    _has_left_waits = False


_wait: Callable[..., bool] = Work.wait
_REDUCE_SCATTERS = [name for name in ("_reduce_scatter_base", "reduce_scatter_single") if hasattr(ProcessGroup, name)]
"""The methods of torch's versions that `dist.reduce_scatter_tensor` and its like call."""
_reduce_scatter_of_torch: Callable[..., Work] = getattr(ProcessGroup, _REDUCE_SCATTERS[0])


def _interrupted_wait(work: Work, *timeout: timedelta) -> bool:
    """As `Work.wait`."""
    global _has_left_waits
    if timeout or work._get_op_type() in _WAITS_BY_ITSELF:
        return _wait(work, *timeout)
    begun_at, broken_at = _num_breaks, None
    while True:
        try:
            return _wait(work, _BETWEEN_LOOKS)
        except RuntimeError:  # it takes longer, or has failed
            if work.is_completed():
                return _wait(work)  # raises the collective's own error
        if _num_breaks > begun_at:
            broken_at = broken_at or time.monotonic()
            if time.monotonic() > broken_at + _PATIENCE:
                _has_left_waits = True
                raise RuntimeError("connection reset, since a rank is lost, and gloo does not end the collective")


class _ReduceScatter:
    """gloo's reduce-scatter: an all-reduce, of which each rank takes its part.

    torch's own work waits for the all-reduce where nobody can interrupt it.
    """

    def __init__(self, group: ProcessGroup, output: Tensor, whole: Tensor, options: ReduceScatterOptions) -> None:
        self._output, self._whole = output, whole.clone()
        self._place = group.rank(), group.size()
        sums = AllreduceOptions()
        sums.reduceOp = options.reduceOp
        self._work = group.allreduce([self._whole], sums)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, *timeout: timedelta) -> bool:
        self._work.wait(*timeout)
        rank, size = self._place
        self._output.copy_(self._whole.chunk(size)[rank].view_as(self._output))
        return True


def _reduce_scatter(group: ProcessGroup, output: Tensor, whole: Tensor, *options: ReduceScatterOptions) -> Any:
    if output.device.type != "cpu":
        return _reduce_scatter_of_torch(group, output, whole, *options)
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
