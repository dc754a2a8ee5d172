"""A command that is ended as a whole, with all processes that descend from it and no others.

Problem: a launcher starts ranks in sessions of their own, and ranks start processes that load data. A process that
hangs answers no signal. Ending the launcher alone would leave the other processes behind, and on a shared machine no
foreign process may be touched. Solution: the job has a mark in its environment, which every descendant inherits, even
if its parent has ended. Exactly the processes with the mark are ended.

A mark is the number of the process that starts the job, and the folder in which that process works. So a later process
in that folder finds the processes that a killed one has left behind. It also finds out whether another process is still
working there, which is then the parent of the job's process.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def end_with_parent() -> None:
    """Make the system send SIGTERM to this process when its parent ends. A no-op on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


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
        try:
            with open(log, "w", encoding="utf-8") as stream:
                self.process = subprocess.Popen(
                    list(command), cwd=directory, env={**variables, **(environment or {}), MARK: self.mark},
                    stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
                    preexec_fn=end_with_parent,  # a launcher that gets SIGTERM ends its ranks
                )  # fmt: skip
        except BaseException:
            end_marked(self.mark)  # the exception may be a signal that came after the command had started
            raise

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
