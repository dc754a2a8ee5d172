"""Turns between processes that share the tests: one marked `alone` runs while the other processes run none.

Problem: a test that judges how long something takes would judge the other processes' tests as well. Solution: every
test is in the room while it runs, set-up and all: one that is marked has it to itself, others share it. Who wants to
enter waits at the door, one at a time; else those who share could keep one that waits for an empty room waiting for
ever. Marked tests in a row keep the room, since cores are idle while others leave it.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """The locks in `folder`, which all processes know. They end with the process that holds them."""

    def __init__(self, folder: Path) -> None:
        self._door = open(folder / "door", "w")  # noqa: SIM115 - its lock is taken again and again
        self._room = open(folder / "room", "w")  # noqa: SIM115
        self._is_kept = False

    @contextlib.contextmanager
    def taken(self, *, alone: bool, keep: bool = False) -> Iterator[None]:
        """For the block: nobody else is in it, or nobody who wants to be alone. `keep`: nobody until the next block
        either."""
        if not self._is_kept:
            fcntl.flock(self._door, fcntl.LOCK_EX)
            try:
                fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            finally:
                fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            self._is_kept = keep
            if not keep:
                fcntl.flock(self._room, fcntl.LOCK_UN)
