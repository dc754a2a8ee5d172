"""The sign of life of a job in its mark on a `--save` directory, given by a process of its own.

Problem: a thread of the job cannot give it. megatron.core's C++ holds Python's lock while it builds the index of the
samples, for most of a minute with a large data set, and for that time every other thread of the process is silent.

Solution: a small process beside the job counts in the mark. It ends when the job does, however that ends: its input
closes then, and it has another parent. It writes only into a mark that begins as it should, and never makes one.
"""

import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

DIGITS = 12
"""Width of the count, which is overwritten in its place: a reader finds a whole mark at any moment."""
_CODE = """
import os, select, sys
path, begins, digits, period, parent = sys.argv[1:]
begins, count, failed = os.fsencode(begins), 0, False
while not select.select([0], [], [], float(period))[0] and os.getppid() == int(parent):
    count += 1
    try:
        mark = os.open(path, os.O_RDWR)
        try:
            if os.pread(mark, len(begins), 0) == begins:
                os.pwrite(mark, str(count).zfill(int(digits)).encode(), len(begins))
        finally:
            os.close(mark)
    except FileNotFoundError:
        pass
    except OSError as error:
        if not failed:
            print(error.strerror, flush=True)
            failed = True
"""
logger = logging.getLogger(__name__)


class Heartbeat:
    """Counts in the file `path`, which starts with `begins`, every `period` seconds; from `start` to `stop`."""

    def __init__(self, path: Path, begins: str, period: float) -> None:
        self._path, self._begins, self._period = path, begins, period
        self._child: subprocess.Popen | None = None
        self._leaving = threading.Event()

    def start(self) -> None:
        """Start the process, and a thread that hears what it says and replaces it where somebody ends it."""
        self._begin()
        threading.Thread(target=self._attend, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Does not wait for the process to end; the thread takes leave of it."""
        self._leaving.set()
        self._close()

    def _begin(self) -> None:
        argv = [str(self._path.absolute()), self._begins, str(DIGITS), str(self._period), str(os.getpid())]
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, *argv], start_new_session=True, cwd="/",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            self._child = None
            logger.warning("no process can give the sign of life in %s: %s; another host may take this job for dead",
                           self._path, error.strerror)  # fmt: skip
        if self._leaving.is_set():
            self._close()

    def _close(self) -> None:
        if self._child is not None:
            with suppress(OSError):
                self._child.stdin.close()
                self._child.terminate()  # a process that the job has forked may have its input open, too

    def _attend(self) -> None:
        while self._child is not None:
            with self._child.stdout as said:
                for line in said:
                    logger.warning("the sign of life cannot be written into %s: %s; another host may take this job for "
                                   "dead", self._path, line.decode().strip())  # fmt: skip
            status = self._child.wait()
            self._close()
            if self._leaving.wait(min(self._period, 1.0)):
                return
            logger.warning("the process that gives the sign of life in %s has ended (status %d); another takes "
                           "its place", self._path, status)  # fmt: skip
            self._begin()
