"""The notice board of a job's failure: what the ranks of a job tell each other through the store.

It holds the story of the first failure (the first writer wins), what every rank does now and where, and who has read
and left. The board has a connection of its own, so that looking at it never waits behind another user of the store. A
store that fails once has lost its host and stays lost: nothing is asked of it again.

A store whose host is down, or cut off from the network, does not fail: an answer never comes, and the store's client
waits for it for ever. So a thread asks, and whoever wants an answer waits for it at most `PATIENCE` seconds. While the
store is silent nobody waits at all; should it answer again, all goes on.

Where the host of the store is gone, c10d prints 20 lines of C++ frames on each rank that asks it, on any thread and so
perhaps as the last lines of all, and its errors carry as many. torch has one threshold for such messages, which
TORCH_CPP_LOG_LEVEL sets before it is loaded. It is raised while the board asks, and for good where a failure ends this
process. Who sets the variable has it as it is.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed import Store

PATIENCE = 5.0
"""Seconds that an answer of the store may take; it takes milliseconds."""


class FailureBoard:
    """Reads and writes the notices of one guarded block, under `scope`; `host` is what this process's is called."""

    def __init__(self, store: Store, *, scope: str, host: str) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._scope = scope
        self._host = host
        self._num_told = 0
        self.is_lost = False
        self._asked_at: float | None = None  # when the question was asked that the store is answering
        self._questions: SimpleQueue[tuple[Callable[[Store], Any], Future, float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="failure board", daemon=True)
        self._thread.start()

    @property
    def silent_seconds(self) -> float:
        """How long the store has owed an answer; 0 unless that is longer than it may take."""
        asked_at = self._asked_at
        waited = 0.0 if asked_at is None else time.monotonic() - asked_at
        return waited if waited >= PATIENCE else 0.0

    def close(self) -> None:
        """Stop the thread, unless the store keeps it."""
        self._questions.put(None)
        self._thread.join(PATIENCE)

    def _answer(self) -> None:
        while (item := self._questions.get()) is not None:
            question, answer, self._asked_at = item
            try:
                with silenced():
                    found = question(self._store)
                answer.set_result(found)
            except Exception:  # whatever the store raises, its host cannot be reached
                self.is_lost = True
                answer.set_result(None)
            self._asked_at = None

    def _ask(self, question: Callable[[Store], Any], default: Any) -> Any:
        if self.is_lost or self.silent_seconds:
            return default
        answer: Future = Future()
        self._questions.put((question, answer, time.monotonic()))
        try:
            found = answer.result(PATIENCE)
        except NoAnswer:
            return default
        return default if self.is_lost else found

    def _key(self, name: str) -> str:
        return f"{self._scope}/{name}"

    def _read(self, name: str) -> str | None:
        key = self._key(name)
        return self._ask(lambda store: store.get(key).decode() if store.check([key]) else None, None)

    def story(self) -> str | None:
        """The root cause, if a rank has told one."""
        return self._read("story")

    def wait_for_story(self, patience: float) -> str | None:
        """The root cause, if one is told within `patience` seconds."""
        deadline = time.monotonic() + patience
        while (story := self.story()) is None and time.monotonic() < deadline and not self.is_lost:
            time.sleep(0.05)
        return story

    def tell(self, story: str) -> str:
        """Make `story` the root cause unless another is there; return the one that counts."""
        return self._ask(lambda store: store.compare_set(self._key("story"), "", story).decode(), story)

    def set_doing(self, rank: int, name: str, doing: str, waits_for: int | None) -> None:
        """Tell what a rank is called, what it does, and which rank it waits for; and that it is there."""
        self._num_told += 1
        text = json.dumps([name, doing, waits_for, self._host, self._num_told])
        self._ask(lambda store: store.set(self._key(f"doing/{rank}"), text), None)

    def doing(self, rank: int) -> tuple[str, str, int | None]:
        """(name, doing, rank it waits for) as a rank told last."""
        text = self._read(f"doing/{rank}")
        return (f"rank {rank}", "", None) if text is None else tuple(json.loads(text)[:3])

    def unheard(self, ranks: Iterable[int], patience: float) -> dict[str, list[int]]:
        """Host -> those of `ranks` on it that told something once, and nothing within `patience` seconds."""
        before = {rank: self._read(f"doing/{rank}") for rank in ranks}
        time.sleep(patience)
        found: dict[str, list[int]] = {}
        for rank, text in before.items():
            if text is not None and text == self._read(f"doing/{rank}"):
                found.setdefault(json.loads(text)[3], []).append(rank)
        return found if not self.silent_seconds and not self.is_lost else {}

    def count(self, name: str, amount: int = 0) -> int:
        """Add to a counter that all ranks share; 0 when the store is lost."""
        return self._ask(lambda store: store.add(self._key(name), amount), 0)


# --- what torch's C++ code says of a broken connection ----------------------------------------------------------------

_ERRORS_ALONE = 2  # of 0 information, 1 warnings, 2 errors, 3 fatal ones
_FRAMES = re.compile(r"\s*Exception raised from [^\n]*\(most recent call first\):(\n(frame #|<omitting )[^\n]*)*")
_for_good = False


@cache
def _threshold() -> ctypes.c_int | None:
    """torch's own; None where this build keeps it elsewhere, so that its messages are what they are."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


@contextmanager
def silenced() -> Iterator[None]:
    """A block without warnings of C++ code, on any thread; one thread at a time has such a block."""
    threshold = None if "TORCH_CPP_LOG_LEVEL" in os.environ else _threshold()
    if threshold is None:
        yield
        return
    before = threshold.value
    threshold.value = max(before, _ERRORS_ALONE)
    try:
        yield
    finally:
        if not _for_good:
            threshold.value = before


def silence() -> None:
    """No such warnings any more, since this process ends."""
    global _for_good
    _for_good = True
    with silenced():
        pass


def without_frames(text: str) -> str:
    """The text of an error without the C++ frames that torch adds."""
    return _FRAMES.sub("", text)
