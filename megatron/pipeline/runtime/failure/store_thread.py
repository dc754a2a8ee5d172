"""A thread that reads the job's store again and again over a connection of its own.

Problem: a connection to the store carries one question at a time, and a question may block its thread forever if the
host of the store is down. A process that has to give signs of life can afford neither.

Solution: only this thread uses the connection, and it asks only questions that the store answers at once. Other threads
pass their questions to this thread and wait for the answers with a time limit.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from megatron.pipeline.runtime.failure.errors import OnThisRank
from megatron.pipeline.runtime.failure.failure_board import (
    ANSWER_PATIENCE,
    root_of,
    silenced,
    story_of_lost_store,
    story_of_silent_store,
)


class StoreThread(abc.ABC):
    """Base of a thread that calls `_tick` again and again, from `_start` until `_stop`.

    Args:
        store: the job's store, or a part of it.
        prefix: the prefix of this object's keys.
        name: the name of this process in messages.
        store_host: the rank whose process hosts the store, if no launcher does.

    Raises ValueError if this version of torch cannot open a second connection to a store.
    """

    def __init__(self, store: Store, prefix: str, *, name: str, store_host: int) -> None:
        if not hasattr(store, "clone"):
            raise ValueError(
                f"torch {torch.__version__} opens no second connection to a store, which noticing lost ranks needs; "
                "install a newer torch"
            )
        self._store = PrefixStore(prefix, store.clone())
        self._root = root_of(self._store)
        self._name, self._store_host = name, store_host
        self._changed = threading.Condition()
        self._asks: list[tuple[Callable[[], Any], Future]] = []
        self._error: OnThisRank | None = None
        self._num_ticks = 0
        self._answered_at = time.monotonic()
        self._wakes = threading.Event()
        self._is_leaving = False
        self._thread = threading.Thread(target=self._live, name=prefix, daemon=True)

    # -- on the thread ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _tick(self) -> None:
        """Look at the store. May raise any error, which ends the thread and all waits, as OnThisRank."""

    @abc.abstractmethod
    def _pause(self) -> float:
        """Seconds until the next look."""

    @abc.abstractmethod
    def _say_goodbye(self) -> None:
        """Tell the other processes that this one leaves. Called last, unless the thread fails."""

    @abc.abstractmethod
    def _why_not(self) -> str:
        """Return the end of the error of a wait that has timed out: empty, or "; " and the reason."""

    def _answer(self) -> None:
        """Answer the other threads' questions."""
        with self._changed:
            asks, self._asks = self._asks, []
        for question, answer in asks:
            answer.set_result(question())

    def _live(self) -> None:
        try:
            while not self._is_leaving:
                with silenced():
                    self._tick()
                self._answered_at = time.monotonic()
                with self._changed:
                    self._num_ticks += 1
                    self._changed.notify_all()
                self._wakes.wait(self._pause())
                self._wakes.clear()
            with silenced():
                self._say_goodbye()
        except OnThisRank as error:
            self._fail(error)
        except RuntimeError:  # torch's, of whatever kind: the store cannot be reached
            if not self._is_leaving:
                self._fail(OnThisRank(story_of_lost_store(self._store_host)))
        except Exception as error:  # without this thread the others would take this process for lost
            reason = f"{type(error).__name__}: {error}"
            self._fail(OnThisRank(f"{self._name} cannot go on reading the job's store: {reason}"))
            raise  # for the traceback

    def _fail(self, error: OnThisRank) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    # -- on others ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread.start()

    def _stop(self) -> None:
        """End the thread, unless it waits for a silent store."""
        self._is_leaving = True
        self.wake()
        self._thread.join(ANSWER_PATIENCE)

    def wake(self) -> None:
        """Make the thread look at the store now."""
        self._wakes.set()

    def ask(self, question: Callable[[Store], Any]) -> Any:
        """Return the answer of this object's part of the store to a question, which the thread asks.

        The store must answer the question at once. Raises OnThisRank if the store is gone, or does not answer in time.
        """
        return self._ask(lambda: question(self._store))

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Call `question` on the thread and return its result.

        Raises OnThisRank if the store is gone, or does not answer in time.
        """
        answer: Future = Future()
        with self._changed:
            self._asks.append((question, answer))
        self.wake()
        self._wait(answer.done, ANSWER_PATIENCE, "reach the job's store")
        return answer.result()

    def _wait(self, is_done: Callable[[], bool], timeout: float, doing: str) -> None:
        """Wait until `is_done()`. Raises OnThisRank if the thread fails, or after `timeout` seconds.

        `doing`: the purpose of the wait, for the error.
        """
        with self._changed:
            self._changed.wait_for(lambda: is_done() or self._error is not None, timeout)
        if self._error is not None:
            raise self._error
        if not is_done():
            silent = time.monotonic() - self._answered_at
            is_silent = silent >= ANSWER_PATIENCE - self._pause()
            why = f"; {story_of_silent_store(self._store_host, silent)}" if is_silent else self._why_not()
            raise OnThisRank(f"{self._name} waited {timeout:g} s to {doing}{why}")
