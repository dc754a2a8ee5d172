"""The failure board: notices that the ranks of a job exchange through the store.

It holds the story of the first failure (the first writer wins), the current action and host of every rank, and how many
ranks have read the story or left. The board has its own connection to the store, so that it never waits behind another
user of the store. A store that fails once has lost its process and stays lost: the board never asks it again.

A store whose host is down or cut off from the network does not fail: its client waits forever for an answer. So a
separate thread asks the store, and a caller waits at most `ANSWER_PATIENCE` seconds for the answer. While the store is
silent, callers do not wait at all. If it answers again, they ask it as before.

When the process that hosts the store is gone, c10d prints 20 lines of C++ frames on each rank that asks it, and its
errors contain as many. These lines can come from any thread, so they may be the last lines on the screen. torch has one
threshold for such messages, which TORCH_CPP_LOG_LEVEL sets before torch is loaded. The board raises the threshold while
it asks, and permanently when a failure ends this process. If the user has set the variable, the threshold stays as it
is.
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
from torch.distributed import PrefixStore, Store

ANSWER_PATIENCE = 5.0
"""Seconds to wait for an answer of the store, which normally takes milliseconds."""


class FailureBoard:
    """Reads and writes the notices of one guarded block.

    Args:
        store: the job's store.
        scope: prefix of the block's keys.
        host: the name of this process's host.

    Attributes:
        is_lost: whether the store has failed.
    """

    def __init__(self, store: Store, *, scope: str, host: str) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._scope = scope
        self._host = host
        self._num_told = 0
        self.is_lost = False
        self._asked_at: float | None = None  # the time of the question that the store has not answered yet
        self._questions: SimpleQueue[tuple[Callable[[Store], Any], Future, float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="failure board", daemon=True)
        self._thread.start()

    @property
    def silent_seconds(self) -> float:
        """Seconds for which the store has not answered; 0 while they are below `ANSWER_PATIENCE`."""
        asked_at = self._asked_at
        waited = 0.0 if asked_at is None else time.monotonic() - asked_at
        return waited if waited >= ANSWER_PATIENCE else 0.0

    def close(self) -> None:
        """Stop the thread, unless it waits for a silent store."""
        self._questions.put(None)
        self._thread.join(ANSWER_PATIENCE)

    def _answer(self) -> None:
        while (item := self._questions.get()) is not None:
            question, answer, self._asked_at = item
            try:
                with silenced():
                    found = question(self._store)
                answer.set_result(found)
            except Exception:  # any error means that the store cannot be reached
                self.is_lost = True
                answer.set_result(None)
            self._asked_at = None

    def _ask(self, question: Callable[[Store], Any], default: Any) -> Any:
        if self.is_lost or self.silent_seconds:
            return default
        answer: Future = Future()
        self._questions.put((question, answer, time.monotonic()))
        try:
            found = answer.result(ANSWER_PATIENCE)
        except NoAnswer:
            return default
        return default if self.is_lost else found

    def _key(self, name: str) -> str:
        return f"{self._scope}/{name}"

    def read(self, name: str) -> str | None:
        """Return a notice; None if there is none, or if the store does not answer."""
        key = self._key(name)
        return self._ask(lambda store: store.get(key).decode() if store.check([key]) else None, None)

    def write(self, name: str, text: str) -> None:
        """Publish a notice. It replaces the notice of the same name."""
        self._ask(lambda store: store.set(self._key(name), text), None)

    def story(self) -> str | None:
        """Return the root cause, or None if no rank has reported one."""
        return self.read("story")

    def wait_for_story(self, patience: float) -> str | None:
        """Return the root cause, or None if no rank reports one within `patience` seconds."""
        deadline = time.monotonic() + patience
        while (story := self.story()) is None and time.monotonic() < deadline and not self.is_lost:
            time.sleep(0.05)
        return story

    def tell(self, story: str) -> str:
        """Make `story` the root cause unless the board has one already. Return the root cause."""
        return self._ask(lambda store: store.compare_set(self._key("story"), "", story).decode(), story)

    def set_doing(self, rank: int, name: str, doing: str, waits_for: int | None) -> None:
        """Publish a rank's name, its current action, and the rank that it waits for. Each call is a sign of life."""
        self._num_told += 1
        text = json.dumps([name, doing, waits_for, self._host, self._num_told])
        self.write(f"doing/{rank}", text)

    def doing(self, rank: int) -> tuple[str, str, int | None]:
        """Return the latest (name, action, rank it waits for) of a rank; (name, "", None) if it has published none."""
        text = self.read(f"doing/{rank}")
        return (f"rank {rank}", "", None) if text is None else tuple(json.loads(text)[:3])

    def unheard(self, ranks: Iterable[int], patience: float) -> dict[str, list[int]]:
        """Return the ranks that have published before, but publish nothing in the next `patience` seconds, by host.

        Blocks for that time. The result is host -> ranks, {} if the store is lost or silent.
        """
        before = {rank: self.read(f"doing/{rank}") for rank in ranks}
        time.sleep(patience)
        found: dict[str, list[int]] = {}
        for rank, text in before.items():
            if text is not None and text == self.read(f"doing/{rank}"):
                found.setdefault(json.loads(text)[3], []).append(rank)
        return found if not self.silent_seconds and not self.is_lost else {}

    def count(self, name: str, amount: int = 0) -> int:
        """Add `amount` to a counter that all ranks share, and return its value; 0 if the store does not answer."""
        return self._ask(lambda store: store.add(self._key(name), amount), 0)


# --- the store and its host -------------------------------------------------------------------------------------------


def root_of(store: Store) -> Store:
    """Return the store below all prefixes of `store`."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def launcher_hosts_store() -> bool:
    """Return whether a launcher, not a rank, hosts the job's store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store_owner(store_host: int) -> str:
    return "the launcher" if launcher_hosts_store() else f"rank {store_host}"


def story_of_lost_store(store_host: int) -> str:
    """The root cause if the store is gone. `store_host`: the rank whose process hosts it, if no launcher does."""
    owner = _store_owner(store_host)
    return f"{owner} ended without an error message (killed, or crashed): it hosts the job's store, which is gone"


def story_of_silent_store(store_host: int, seconds: float) -> str:
    """The root cause if the store has not answered for `seconds`."""
    where = os.environ.get("MASTER_ADDR", "its host")
    return (
        f"{_store_owner(store_host)} has not answered for {seconds:.0f} s: it hosts the job's store, "
        f"and {where} is down or cannot be reached"
    )


# --- messages of torch's C++ code about a broken connection -----------------------------------------------------------

_ERRORS_ALONE = 2  # levels: 0 information, 1 warnings, 2 errors, 3 fatal errors
_FRAMES = re.compile(r"\s*Exception raised from [^\n]*\(most recent call first\):(\n(frame #|<omitting )[^\n]*)*")
_for_good = False
_silencing = threading.Lock()
_num_silencing = 0
_before = 0


@cache
def _threshold() -> ctypes.c_int | None:
    """Return torch's log threshold, or None if this build of torch lacks the variable: its messages then stay."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


@contextmanager
def silenced() -> Iterator[None]:
    """Context without warnings of torch's C++ code on any thread. Several threads may be in it."""
    global _num_silencing, _before
    threshold = None if "TORCH_CPP_LOG_LEVEL" in os.environ else _threshold()
    if threshold is None:
        yield
        return
    with _silencing:
        if _num_silencing == 0:
            _before = threshold.value
            threshold.value = max(_before, _ERRORS_ALONE)
        _num_silencing += 1
    try:
        yield
    finally:
        with _silencing:
            _num_silencing -= 1
            if _num_silencing == 0 and not _for_good:
                threshold.value = _before


def silence() -> None:
    """Suppress warnings of torch's C++ code permanently, since this process ends."""
    global _for_good
    _for_good = True
    with silenced():
        pass


def without_frames(text: str) -> str:
    """Return the text of an error without the C++ frames that torch adds."""
    return _FRAMES.sub("", text)
