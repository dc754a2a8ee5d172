"""One LMDB environment for each folder and process, and what a fork must not find in the middle.

Problem: LMDB allows a file to be open once in a process, and nothing that is open to be used behind a fork. The
binding refuses a second opening in the child, too, until the child has closed what it inherited, and that waits for
ever where a thread of the parent was at work when it was forked.

Solution: whoever needs a folder shares its environment, which counts them. All work passes a gate; a fork closes the
gate, waits until nobody is inside, and the child closes what it inherited and opens anew when it needs it.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

FORK_PATIENCE = 5.0
"""Seconds that a fork waits for the work of other threads."""
MOST_READERS = 1024
"""Transactions that read at once, of all processes."""


def require_lmdb() -> None:
    """Raises ValueError where it is not installed."""
    if importlib.util.find_spec("lmdb") is None:
        raise ValueError(
            "the activation cache needs the package lmdb, which is not installed; pip install .[lmdb], or leave the "
            "cache off"
        )


class _Gate:
    """Work passes while it is open; who closes it learns whether all have left."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = self._closed = 0

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self, patience: float) -> bool:
        with self._changed:
            self._closed += 1
            return self._changed.wait_for(lambda: not self._inside, patience)

    def open(self) -> None:
        with self._changed:
            self._closed -= 1
            self._changed.notify_all()


class HeldOpen(Protocol):
    """What is open together with an environment, such as a lock."""

    def abandon(self) -> None: ...


class Environment:
    """LMDB at `path`, of at most `most_bytes`; `held` is abandoned with it in a forked process.

    Flags: a commit does not wait for the disk (`sync`, `metasync`), since a killed process loses nothing that it has
    written to a file, and a machine that loses power loses the cache (`folder`). Pages are written and not mapped for
    writing (`writemap`): a full disk is then an error, where a mapping would end the process with a signal. What is
    written is not zeroed before (`meminit`), for nobody else reads it.
    """

    def __init__(self, path: Path, most_bytes: int, held: HeldOpen) -> None:
        import lmdb

        self.path, self.held = path, held
        self.num_users = 1
        self._gate = _gate
        with self._gate:
            self._database = lmdb.open(
                str(path),
                map_size=most_bytes,
                sync=False,
                metasync=False,
                writemap=False,
                meminit=False,
                max_readers=MOST_READERS,
                lib_version=0,
            )
            self._database.reader_check()  # of those that were killed, which would keep old pages from use
            self.most_bytes: int = self._database.info()["map_size"]
            self.page_bytes: int = self._database.stat()["psize"]

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """A transaction whose values are views that end with it."""
        with self._gate, self._database.begin(buffers=True) as transaction:
            yield transaction

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """A transaction that is committed at the end, and not where that raises. Other writers wait."""
        with self._gate, self._database.begin(write=True, buffers=True) as transaction:
            yield transaction

    def forget_the_dead(self) -> None:
        with self._gate:
            self._database.reader_check()

    def close(self) -> None:
        with self._gate:
            self._database.close()

    def leave_to_parent(self, quiet: bool) -> None:
        """Leave what is open to the parent of this forked process. `quiet`: none of its threads was at work."""
        if quiet:
            self._database.close()
            self.held.abandon()
        else:
            _lost.append(self)  # never closed, and so never waited for


_gate = _Gate()
_open: dict[str, Environment] = {}
_opening = threading.Lock()
_lost: list[Environment] = []
_fork = threading.local()  # has_opening, quiet: what the thread that forks has found


def share(path: Path, make: Callable[[], Environment]) -> Environment:
    """The environment of this process at `path`; `make` opens it where nobody has it. To be given back."""
    name = os.path.realpath(path)
    with _opening:
        if name in _open:
            _open[name].num_users += 1
        else:
            _open[name] = make()
        return _open[name]


def give_back(environment: Environment, close: Callable[[Environment], None]) -> None:
    """`close` closes it where nobody else has it."""
    with _opening:
        environment.num_users -= 1
        if not environment.num_users:
            for name in [name for name, each in _open.items() if each is environment]:
                del _open[name]
            close(environment)


def _before_fork() -> None:
    _fork.has_opening = _opening.acquire(timeout=FORK_PATIENCE)
    _fork.quiet = _gate.close(FORK_PATIENCE) and _fork.has_opening


def _in_parent() -> None:
    _gate.open()
    if _fork.has_opening:
        _opening.release()


def _in_child() -> None:
    global _gate, _opening
    _gate, _opening = _Gate(), threading.Lock()
    for environment in _open.values():
        environment.leave_to_parent(_fork.quiet)
    _open.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
