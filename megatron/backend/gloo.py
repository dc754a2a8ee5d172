"""One network device for all gloo groups of a process.

Problem: torch gives each gloo group a device of its own, whose thread wakes a hundred times a second, and ends at such
a moment. megatron.core makes dozens of groups on each rank, most of them of that rank alone: while nothing is sent
their threads take processor time, and destroying the groups waits for one after the other.

Solution: groups that are made with a timeout, as torch.distributed makes them, share a device (`share_device`). So do
the links between stages (`transport/links.py`), which have another one: a reduction does not hold up what goes to the
next stage.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store

_make_group = ProcessGroupGloo.__init__
_connecting: timedelta | None = None


def share_device() -> None:
    """Let the gloo groups that this process makes from now on share a device, but for those made with options.

    Later calls are no-ops.
    """
    ProcessGroupGloo.__init__ = _on_shared_device


@contextmanager
def connecting_within(timeout: timedelta) -> Iterator[None]:
    """Context in which making a group fails unless its ranks are connected within `timeout`.

    Otherwise a group waits for its ranks to connect for as long as its operations may take. The device is shared.
    """
    global _connecting
    before, _connecting = _connecting, timeout
    try:
        yield
    finally:
        _connecting = before


def options_on_shared_device(purpose: str, timeout: timedelta, num_threads: int | None = None) -> Any:
    """Return options for a gloo group on the device that groups of one purpose share.

    Args:
        purpose: any name; each has its device.
        timeout: of the group's operations.
        num_threads: threads of the group that start its operations; None: two for each device, as torch has them.
    """
    options = ProcessGroupGloo._Options()
    options._devices = _devices(purpose, os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid())
    options._timeout = timeout
    options._threads = num_threads or 2 * len(options._devices)
    return options


@functools.cache
def _devices(purpose: str, interfaces: str, process: int) -> list[Any]:
    """Make a device on each interface of GLOO_SOCKET_IFNAME, or the one that gloo chooses.

    `process`: the process's number, since a device's thread is not in a process that is forked.
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

    Beside a timeout, torch 2.14 gives further options as keywords.
    """
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
    whole, options._timeout = options._timeout, min(options._timeout, _connecting)
    _make_group(self, store, rank, size, options, **kwargs)
    self._set_default_timeout(whole)
