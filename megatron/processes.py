"""Processes that the project starts and ends as a whole, without leaving any process behind (no torch).

A job is a command that is ended with all processes that descend from it, and with no others. Problem: a launcher starts
ranks in sessions of their own, and ranks start processes that load data. A process that hangs answers no signal. Ending
the launcher alone would leave the other processes behind, and on a shared machine no foreign process may be touched.
Solution: the job has a mark in its environment, which every descendant inherits, even if its parent has ended. Exactly
the processes with the mark are ended. A mark is the number of the process that starts the job, and the folder in which
that process works. So a later process in that folder finds the processes that a killed one has left behind. It also
finds out whether another process is still working there, which is then the parent of the job's process.

Copies of this process compute a function on many items. Problem: a search takes seconds on one processor. Its data
(planners, tables that a user has registered) cannot be sent to a new process, whose start would take as long as most
searches. Solution: copies of this process, made by `fork`, already have the data and send only results. Each process
takes the next item when it has finished one, from a pipe that holds the numbers of all items. So results do not depend
on which process took which item, and the end of a copy is noticed.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import psutil

# --- a command that is ended as a whole -------------------------------------------------------------------------------


_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def end_with_parent(by: int = signal.SIGTERM) -> None:
    """Make Linux send the signal `by` to this process when its parent ends; a no-op on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)


def end_worker_with_parent() -> None:
    """End this worker of `multiprocessing` when its parent ends: a killed parent cannot end its workers."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


MARK = "PIPELINE_JOB"
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL = 0.05


class Job:
    """A running command, for use as a context manager, which ends all its processes.

    If this process is killed, the command gets SIGTERM.

    Args:
        command: the command's words.
        log: the file for all output of the command.
        directory: the command's working directory.
        folder: the folder in which this process works, for the mark.
        environment: variables in addition to this process's, of which a launcher's are removed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        directory: Path,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.mark = mark_of(folder)
        variables = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
        variables |= {**(environment or {}), MARK: self.mark}
        try:
            self.process = self._start(command, variables, log, directory)
        except BaseException:
            end_marked(self.mark)  # the exception may be a signal that came after the command had started
            raise

    def _start(
        self, command: Sequence[str], environment: dict[str, str], log: Path, directory: Path
    ) -> subprocess.Popen:
        with open(log, "w", encoding="utf-8") as stream:
            return subprocess.Popen(
                list(command), cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=end_with_parent,  # a launcher that gets SIGTERM ends its ranks
            )  # fmt: skip

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception: object) -> None:
        end_marked(self.mark)
        self.process.wait()

    def wait(self, timeout: float) -> int | None:
        """Wait for the command. Returns its exit status, or None if it still runs after `timeout` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def processes(self) -> list[psutil.Process]:
        """The command's process and all its descendants."""
        return [process for process, _ in _marked(self.mark.__eq__)]


@dataclass(frozen=True)
class End:
    """The end of a job. `status`: the exit status; None if the job was ended at its time limit."""

    status: int | None
    seconds: float


def run_job(command: Sequence[str], *, timeout: float, **options: object) -> End:
    """Run a command to its end, or for at most `timeout` seconds, and end all its processes.

    `options`: further arguments of `Job`.
    """
    started = time.monotonic()
    with Job(command, **options) as job:
        status = job.wait(timeout)
    return End(status, time.monotonic() - started)


def mark_of(folder: str | Path) -> str:
    """The mark of a job that this process starts for `folder`: the value of the variable `MARK`."""
    return f"{os.getpid()}:{folder}"


def end_marked(mark: str) -> None:
    """End all processes that have the mark `mark`."""
    _end(mark.__eq__)


def end_left(folder: Path) -> None:
    """End the processes that a killed process has left behind in `folder`.

    Raises ValueError if another process is working there.
    """

    def is_of_folder(mark: str) -> bool:
        return mark.partition(":")[2] == str(folder)

    for process, mark in _marked(is_of_folder):
        with contextlib.suppress(psutil.Error):
            if str(process.ppid()) == mark.partition(":")[0]:
                raise ValueError(
                    f"process {process.ppid()} measures in {folder} right now; wait for its end, or give another "
                    "--output"
                )
    _end(is_of_folder)


def _end(is_wanted: Callable[[str], bool], patience: float = 10.0) -> None:
    """Kill every process whose mark is wanted, for at most `patience` seconds, until none is left.

    A process may start others before it is killed, so the search is repeated.
    """
    deadline = time.monotonic() + patience
    while (found := _marked(is_wanted)) and time.monotonic() < deadline:
        for process, _ in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(_POLL)


def _marked(is_wanted: Callable[[str], bool]) -> list[tuple[psutil.Process, str]]:
    """The running processes whose mark is wanted, with their marks."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mark = process.environ().get(MARK)
            if mark is not None and is_wanted(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process, mark))
    return found


# --- copies of this process -------------------------------------------------------------------------------------------


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
