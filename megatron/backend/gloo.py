"""One network device for all gloo groups of a process.

Problem: torch gives each gloo group a device of its own. The device's thread wakes a hundred times a second, and can
only end when it wakes. megatron.core makes dozens of groups on each rank, most of them with this rank as the only
member. The threads take processor time even while nothing is sent, and destroying the groups waits for one thread after
the other.

Solution: groups that are made with a timeout, as torch.distributed makes them, share a device (`share_device`). The
links between stages (`transport/links.py`) share another device, so that a reduction does not delay transfers to the
next stage.

Problem: if a group is given up before a peer has connected, gloo frees the connection, but leaves it in the device's
list of awaited connections. A peer that connects late then ends this process, or takes the place of a connection of
another group, whose operations wait forever. Also, gloo waits for a connection five times as long as the timeout that
it is given, and there is no socket yet that could be broken.

Solution: where groups may be given up (`connecting_within`), all ranks of a group meet in the store before they
connect. So a rank waits in gloo for a lost rank only if that rank was lost between meeting and connecting. After groups
were given up, `forget_devices` gives later groups new devices.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store

_CONNECTING_TAKES = 5
"""gloo waits for the connection of a peer this many times the group's timeout."""
_LEAST = timedelta(seconds=5)
"""The least timeout with which ranks connect after they have met: they read each other's addresses from the store."""

_make_group = ProcessGroupGloo.__init__
_connecting: tuple[timedelta, timedelta] | None = None  # to meet, and to connect
_groups: list[ProcessGroupGloo] | None = None  # a weak reference would end with torch's Python object of a group


def share_device() -> None:
    """Let the gloo groups that this process makes from now on share a device, except groups made with options.

    Later calls are no-ops.
    """
    ProcessGroupGloo.__init__ = _on_shared_device


@contextmanager
def connecting_within(timeout: timedelta, *, meeting: timedelta | None = None) -> Iterator[None]:
    """Context in which making a group fails unless its ranks are connected within `timeout`.

    Otherwise a group waits for its ranks to connect for as long as its operations may take. The device is shared.

    `meeting`: how long the ranks of a group wait for each other before they connect; None: `timeout`.
    """
    global _connecting
    before, _connecting = _connecting, (meeting or timeout, timeout)
    try:
        yield
    finally:
        _connecting = before


def options_on_shared_device(purpose: str, timeout: timedelta, num_threads: int | None = None) -> Any:
    """Return options for a gloo group on the device that groups of one purpose share.

    Args:
        purpose: any name; each name has its own device.
        timeout: the timeout of the group's operations.
        num_threads: threads of the group that start its operations; None: two for each device, as torch has them.
    """
    options = ProcessGroupGloo._Options()
    options._devices = _devices(purpose, os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid())
    options._timeout = timeout
    options._threads = num_threads or 2 * len(options._devices)
    return options


def remember_groups() -> None:
    """Keep the groups that this process makes from now on until `take_groups`. Later calls are no-ops."""
    global _groups
    _groups = _groups or []


def take_groups() -> list[ProcessGroupGloo]:
    """Return the remembered groups, which are then no longer kept."""
    global _groups
    taken, _groups = _groups or [], None if _groups is None else []
    return taken


def forget_devices() -> None:
    """Give new devices to the groups that are made from now on. An old device ends with its last group."""
    _devices.cache_clear()


@functools.cache
def _devices(purpose: str, interfaces: str, process: int) -> list[Any]:
    """Make a device on each interface of GLOO_SOCKET_IFNAME, or the one that gloo chooses.

    `process`: the process id, since a forked process does not have the threads of its parent's devices.
    """
    names = [name for name in interfaces.split(",") if name]
    if not names:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in names]


def _on_shared_device(
    self: ProcessGroupGloo,
    store: Store,
    rank: int,
    size: int,
    *args: Any,
    timeout: timedelta | None = None,
    **kwargs: Any,
) -> None:
    """As `ProcessGroupGloo.__init__`, whose last argument is the options or the timeout.

    In addition to a timeout, torch 2.14 gives further options as keywords.
    """
    _make_on_shared_device(self, store, rank, size, *args, timeout=timeout, **kwargs)
    if _groups is not None:
        _groups.append(self)


def _make_on_shared_device(
    self: ProcessGroupGloo, store: Store, rank: int, size: int, *args: Any, timeout: timedelta | None, **kwargs: Any
) -> None:
    if args and isinstance(args[0], timedelta):
        timeout, *args = args
    if timeout is not None:
        options = options_on_shared_device("groups", timeout)
        for name, value in kwargs.items():
            setattr(options, name, value)
        args, kwargs = (options,), {}
    if _connecting is None or not args:
        _make_group(self, store, rank, size, *args, **kwargs)
        return
    options = args[0]
    whole, (meeting, connecting) = options._timeout, _connecting
    _meet(store, rank, size, min(whole, meeting))
    options._timeout = min(whole, max(connecting / _CONNECTING_TAKES, _LEAST))
    _make_group(self, store, rank, size, options, **kwargs)
    self._set_default_timeout(whole)


def _meet(store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Wait until all ranks of a group are about to connect. Raises RuntimeError if one is not within the timeout."""
    if size > 1:
        store.set(f"meets/{rank}", "")
        store.wait([f"meets/{other}" for other in range(size) if other != rank], timeout)
