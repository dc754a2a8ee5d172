"""A command in a process group of its own that is ended as a whole, and with it nothing else.

Problem: a launcher starts ranks in sessions of their own, and ranks start processes that load data; one that hangs
answers no signal. Ending the launcher alone would leave them behind, and on a shared machine no other process may be
touched. Solution: the job carries a mark in its environment, which every process that descends from it inherits,
whoever its parent is by then; those and no others are ended.

A mark is the number of the process that starts the job and the folder that it works in. So the next one in that folder
finds what one that was killed has left; and that another is still at work there, for then it is the job's parent.
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
    """Runs in the new process: if the one that started it ends, it is asked to end. On Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


MARK = "PIPELINE_JOB"
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL = 0.05


class Job:
    """A command that runs. Use it as a context manager, which ends what is left of it, and where this process is killed
    the command is asked to end.

    Args:
        log: file for all that it prints.
        folder: where this process works, for the mark.
        directory: where it runs.
        environment: variables beside this process's, without those of a launcher.
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
                    preexec_fn=end_with_parent,  # the launcher then ends its ranks
                )  # fmt: skip
        except BaseException:
            end_marked(self.mark)  # a signal may have come when it had started
            raise

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception: object) -> None:
        end_marked(self.mark)
        self.process.wait()

    def wait(self, timeout: float) -> int | None:
        """The exit status, or None where it still runs after `timeout` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def processes(self) -> list[psutil.Process]:
        """The command's and all that descend from it."""
        return [process for process, _ in _marked(self.mark.__eq__)]


@dataclass(frozen=True)
class End:
    """How a job ended. `status`: None where it was ended because it took longer than it may."""

    status: int | None
    seconds: float


def run_job(command: Sequence[str], *, timeout: float, **options: object) -> End:
    """Run a command to its end, or for `timeout` seconds; no process of it is left when this returns.

    `options`: of `Job`.
    """
    started = time.monotonic()
    with Job(command, **options) as job:
        status = job.wait(timeout)
    return End(status, time.monotonic() - started)


def mark_of(folder: str | Path) -> str:
    """The value of the variable `MARK` in what this process starts in a folder."""
    return f"{os.getpid()}:{folder}"


def end_marked(mark: str) -> None:
    """End all that was started with a mark."""
    _end(mark.__eq__)


def end_left(folder: Path) -> None:
    """End what one that was killed has left in `folder`. Raises ValueError where one is at work there."""

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
    """Kill every process with such a mark, again until none is left: they may be starting others meanwhile."""
    deadline = time.monotonic() + patience
    while (found := _marked(is_wanted)) and time.monotonic() < deadline:
        for process, _ in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(_POLL)


def _marked(is_wanted: Callable[[str], bool]) -> list[tuple[psutil.Process, str]]:
    """Processes and their marks."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mark = process.environ().get(MARK)
            if mark is not None and is_wanted(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process, mark))
    return found
