"""tools/launch.py whose ranks are forked: `python forking_launcher.py`, with the same arguments.

Problem: a rank imports torch and megatron.core before it begins, which takes its processor five seconds, and a job of
six ranks half a minute. Solution: the launcher imports them once, and a rank is a copy of it that becomes the program,
in a session and an environment of its own, as if it had been started. The launcher itself is a copy, too, where a test
starts it as a job of its own (`begin`): of the server from which the workers of tests are forked.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megatron.commands import launch
from megatron.processes import MARK
from tests import workers


class Forked:
    """What a launcher or a job needs of a `subprocess.Popen`, of a process of multiprocessing that has started."""

    def __init__(self, words: list[str], process: BaseProcess) -> None:
        self._words, self._process = words, process
        self.terminate, self.kill, self.pid = process.terminate, process.kill, process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._words, timeout)
        return self.returncode


class _Rank(Forked):
    """A rank that a launcher starts. It goes on when all of the first ranks are there, which is when the launcher first
    asks for the end of one: a fork while the launcher's store names who has connected would leave the lock of the
    system's resolver taken for ever in the copy."""

    _begins, _opens = os.pipe()

    def __init__(
        self, words: list[str], *, env: dict[str, str], start_new_session: bool, preexec_fn: Callable[[], None]
    ) -> None:
        assert start_new_session
        process = multiprocessing.get_context("fork").Process(target=self._go_on, args=(words, env, preexec_fn))
        process.start()
        super().__init__(words, process)

    def poll(self) -> int | None:
        if _Rank._opens is not None:
            os.close(_Rank._opens)
            _Rank._opens = None
        return super().poll()

    @staticmethod
    def _go_on(*job: object) -> None:
        if _Rank._opens is not None:
            os.close(_Rank._opens)
        os.read(_Rank._begins, 1)
        _become(*job)


def _become(words: list[str], environment: dict[str, str], first: Callable[[], None]) -> None:
    """Of `python -u SCRIPT ...`: its session, its environment, its signals, its output and its main module."""
    os.setsid()
    first()
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    _, _, script, *arguments = words
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def begin(
    arguments: list[str], environment: dict[str, str], log: Path, directory: Path, first: Callable[[], None]
) -> None:
    """In a copy of the workers' server: become the launcher with these arguments, as `megatron.processes.Job` starts a
    command."""
    os.chdir(directory)
    for stream, kind in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        file = os.open(log if stream else os.devnull, kind | os.O_APPEND * (stream > 0))
        os.dup2(file, stream)
        os.close(file)
    _show_mark(environment[MARK])
    sys.path.insert(0, "")  # a program's folder takes the first place
    _become(["", "", __file__, *arguments], environment, first)


def _show_mark(mark: str) -> None:
    """Put the job's mark where the system shows a process's environment, which is that of the server's start: it, and
    the ranks, which are copies again, are found by it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begins, ends = map(int, fields[47:49])  # proc(5): env_start, env_end
    at = ctypes.string_at(begins, ends - begins).index(f"{workers.PLACE_OF_MARK}=".encode())
    entry = f"{MARK}={mark}\0{workers.PLACE_OF_MARK}=".encode()
    assert len(entry) < workers.MOST_OF_MARK, mark
    ctypes.memmove(begins + at, entry, len(entry))


if __name__ == "__main__":
    import tests.preloaded  # noqa: F401

    launch.subprocess = SimpleNamespace(Popen=_Rank, TimeoutExpired=subprocess.TimeoutExpired)
    sys.exit(launch.main())
