"""tools/launch.py whose ranks are forked: `python forking_launcher.py`, with the same arguments.

Problem: a rank imports torch and megatron.core before it begins, which takes its processor five seconds, and a job of
six ranks half a minute. Solution: the launcher imports them once, and a rank is a copy of it that becomes the program,
in a session and an environment of its own, as if it had been started.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import tests.preloaded  # noqa: F401
from megatron.commands import launch


class Rank:
    """What the launcher needs of a `subprocess.Popen`."""

    def __init__(self, words: list[str], *, env: dict, start_new_session: bool, preexec_fn: Callable[[], None]) -> None:
        assert start_new_session
        self._words = words
        self._process = multiprocessing.get_context("fork").Process(target=_become, args=(words, env, preexec_fn))
        self._process.start()
        self.terminate, self.kill, self.pid = self._process.terminate, self._process.kill, self._process.pid

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


def _become(words: list[str], environment: dict, first: Callable[[], None]) -> None:
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


if __name__ == "__main__":
    launch.subprocess = SimpleNamespace(Popen=Rank, TimeoutExpired=subprocess.TimeoutExpired)
    sys.exit(launch.main())
