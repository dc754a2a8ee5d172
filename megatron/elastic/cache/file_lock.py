"""A lock on a file that the kernel gives up when its process ends, however it ends, in any namespace of processes."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_BETWEEN_TRIES = 0.02


class FileLock:
    """The file is made if it is missing. Raises OSError where that cannot be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def try_alone(self) -> bool:
        """Hold it as the only one, if nobody has it."""
        return self._try(fcntl.LOCK_EX)

    def alone(self, patience: float) -> None:
        """Wait for that, at most `patience` seconds.

        Raises:
            TimeoutError: others have had it all that time.
        """
        self._wait(fcntl.LOCK_EX, patience)

    def share(self, patience: float) -> None:
        """Hold it with others who share it; who had it alone has it shared then. Raises as `alone`."""
        self._wait(fcntl.LOCK_SH, patience)

    def remove(self) -> None:
        """Remove the file, which only its sole holder may do: the next one makes another file."""
        self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Nobody may be forgotten here: a process that was forked has the same lock, so it is given up by name."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)

    def abandon(self) -> None:
        """Leave the lock to the process that has it; called in its fork."""
        os.close(self._file)

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _wait(self, kind: int, patience: float) -> None:
        end = time.monotonic() + patience
        while not self._try(kind):
            if time.monotonic() > end:
                raise TimeoutError(f"other processes have held a lock for {patience:g} s")
            time.sleep(_BETWEEN_TRIES)
