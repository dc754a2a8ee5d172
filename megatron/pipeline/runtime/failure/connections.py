"""Break what this process is connected by, so that nothing in it waits for another rank any more.

Problem: after a rank is lost, threads of the others wait in transfers and collectives of gloo: for the lost rank, which
may be stopped and so keep its connections, or for a rank that has left the batch. gloo gives up after the timeout of
the transfer alone, which is many minutes, and has no call that ends a wait.

Solution: shut down the sockets themselves. gloo's own thread finds each of them closed, and every wait ends with an
error, here and at the other end. Connections to the job's store stay: the ranks that are left agree over it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Container
from contextlib import suppress


def break_connections(*, ports_kept: Container[int]) -> int:
    """Shut down the TCP connections of this process, and return their number.

    Args:
        ports_kept: connections to or from these ports stay, such as those to the job's store.
    """
    num_broken = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            num_broken += _break(int(name), ports_kept)
    return num_broken


def _break(number: int, ports_kept: Container[int]) -> bool:
    own = socket.socket(fileno=os.dup(number))  # raises OSError for what is no socket
    with own:
        if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
            return False
        ports = own.getpeername()[1], own.getsockname()[1]  # raises OSError for one that listens
        if any(port in ports_kept for port in ports):
            return False
        own.shutdown(socket.SHUT_RDWR)
        return True
