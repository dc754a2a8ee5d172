"""The computation of a function on many items by this process and forked copies of it.

Problem: a search takes seconds on one processor. Its data (planners, tables that a user has registered) cannot be sent
to a new process, whose start would take as long as most searches. Solution: copies of this process, made by `fork`,
already have the data and send only results. Each process takes the next item when it has finished one, from a pipe that
holds the numbers of all items. So results do not depend on which process took which item, and the end of a copy is
noticed.
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
_MOST_ITEMS = 4096 // _NUMBER  # the number of items whose numbers fit into any pipe


class _InACopy(Exception):
    """The traceback of an error in a copy of the process, as text, since a pickled error loses its traceback."""


def num_processors() -> int:
    """The number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_fork() -> bool:
    """Whether forked copies of this process can work.

    They cannot on macOS, whose libraries may crash in a forked process, nor in a daemon process, which may have no
    children.
    """
    forks = sys.platform != "darwin" and "fork" in multiprocessing.get_all_start_methods()
    return forks and not multiprocessing.current_process().daemon


def map_forked(
    function: Callable[[_Item], _Result],
    items: Sequence[_Item],
    num_processes: int,
    *,
    taken: Callable[[int], None] = lambda _: None,
) -> list[_Result]:
    """Call a function on all items. Returns the results in the order of the items.

    The results do not depend on the number of processes. This process computes all items alone if it cannot fork
    (`can_fork`), if `num_processes` is 1, and for more than 1,024 items. If the system has no process or memory for
    another copy, fewer copies are used.

    Args:
        function: its results and errors must be picklable. Other effects stay in the process that calls it.
        items: the items, longest first, so that all processes end at about the same time.
        num_processes: number of processes, including this one.
        taken: called in this process before each item that it takes, with the item's index, which is the number of
            items taken before.

    Raises:
        ValueError: a copy ended before it had sent its results.
        Exception: any error that `function` raises.
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
    """Take items until none is left. Returns the results of this process by item."""
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
        signal.signal(number, signal.SIG_DFL)  # only the first process prints messages
    end_with_parent()
    receiver.close()  # so that sending fails when the first process has ended
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
