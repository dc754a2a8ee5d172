"""Break the connections of this process, so that none of its threads waits for another rank any longer.

Problem: after a rank is lost, threads of the other ranks still wait in gloo's transfers and collectives. They wait for
the lost rank, which may only be stopped and so keep its connections, or for a rank that has left the batch. Or they
wait for a key that the lost rank was to write to the job's store. Such a wait ends only at its timeout of many minutes,
and no call can end it earlier.

Solution: shut down the sockets themselves. gloo's own thread finds each socket closed, and every wait ends with an
error, on both ranks. The connections over which the surviving ranks agree stay open. They are identified by the inode
numbers of their sockets, because the next connection may reuse the descriptor number of a closed one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress


def open_connections() -> frozenset[int]:
    """Return the inode numbers of this process's TCP connections. No later connection has one of them."""
    return frozenset(inode for number, inode in _descriptors() if _is_connected(number))


def break_connections(*, kept: Collection[int]) -> int:
    """Shut down the TCP connections of this process, and return their number.

    Args:
        kept: the inode numbers of connections that stay, as `open_connections` returns them.
    """
    broken = 0
    for number, inode in _descriptors():
        if inode not in kept and _is_connected(number):
            with suppress(OSError), _socket(number) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken


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
