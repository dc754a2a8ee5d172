"""A function on many items, by this process and copies of it that begin at once with all that it knows.

Problem: a search takes seconds on one processor, and what it goes by (planners, tables that a user has entered) cannot
be sent to a new process, whose start would take as long as most searches. Solution: copies of this process, made by
`fork`, which need nothing sent but results. Each takes the next item when it is through with one, from a pipe that
holds all their numbers. So results do not depend on who took what, and a copy that dies is noticed.
"""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from megatron.processes.job import end_with_parent

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_NUMBER = 4  # bytes of an item's number in the pipe
_MOST_ITEMS = 4096 // _NUMBER  # that fit into any pipe at once


class _InACopy(Exception):
    """The traceback of an error, which is lost on the way from a copy of the process."""


def num_processors() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_fork() -> bool:
    """Whether copies of this process can work: not on macOS, whose libraries may crash in them, and not where this one
    is of a pool, which may have none."""
    forks = sys.platform != "darwin" and "fork" in multiprocessing.get_all_start_methods()
    return forks and not multiprocessing.current_process().daemon


def map_forked(
    function: Callable[[_Item], _Result],
    items: Sequence[_Item],
    num_processes: int,
    *,
    taken: Callable[[int], None] = lambda _: None,
) -> list[_Result]:
    """The results in the order of the items, which do not depend on the number of processes.

    This process computes all where another cannot begin (`can_fork`), for one process, and for very many items; those
    that the system has no process or memory for are done without.

    Args:
        function: its results and errors can be pickled. What else it changes is seen in the process that ran it alone.
        items: those that take longest first, so that none is left over at the end.
        num_processes: this one included.
        taken: is told in this process, before each item that it takes, how many are.

    Raises:
        ValueError: a copy ended before it was through. Else what `function` raises.
    """
    num_processes = min(num_processes, len(items))
    if num_processes < 2 or len(items) > _MOST_ITEMS or not can_fork():
        found = []
        for index, item in enumerate(items):
            taken(index)
            found.append(function(item))
        return found
    numbers, filled = os.pipe()
    os.write(filled, b"".join(index.to_bytes(_NUMBER, "big") for index in range(len(items))))
    os.close(filled)
    context, copies = multiprocessing.get_context("fork"), []
    try:
        for _ in range(num_processes - 1):
            receiver, sender = context.Pipe(duplex=False)
            copy = context.Process(target=_copy, args=(function, items, numbers, receiver, sender), daemon=True)
            try:
                copy.start()
            except OSError:  # no process, or no memory for one
                receiver.close()
                break
            finally:
                sender.close()
            copies.append((copy, receiver))
        found = _take(function, items, numbers, taken)
        for copy, receiver in copies:
            found |= _results(copy, receiver)
    finally:
        os.close(numbers)
        for copy, receiver in copies:
            copy.kill()
            copy.join()
            receiver.close()
    return [found[index] for index in range(len(items))]


def _take(
    function: Callable[[Any], Any], items: Sequence[Any], numbers: int, taken: Callable[[int], None]
) -> dict[int, Any]:
    """What this process has computed, by item, when none is left."""
    found = {}
    while number := os.read(numbers, _NUMBER):
        index = int.from_bytes(number, "big")
        taken(index)
        found[index] = function(items[index])
    return found


def _copy(
    function: Callable[[Any], Any], items: Sequence[Any], numbers: int, receiver: Connection, sender: Connection
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # the first process says all that there is to say
    end_with_parent()
    receiver.close()  # so that nothing is sent when the first process is gone
    try:
        said = _take(function, items, numbers, lambda _: None), None, ""
    except Exception as error:
        said = {}, error, traceback.format_exc()
    with suppress(BrokenPipeError):
        sender.send(said)


def _results(copy: multiprocessing.Process, receiver: Connection) -> dict[int, Any]:
    try:
        found, error, where = receiver.recv()
    except EOFError:
        copy.join()
        raise ValueError(
            f"a process that helped ended with status {copy.exitcode}, maybe for want of main memory; free some, or "
            "run on a single processor (taskset -c 0)"
        ) from None
    if error is not None:
        raise error from _InACopy(where)
    return found
