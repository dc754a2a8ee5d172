"""Work that the training thread hands over: a few calls at most wait, and are made in order on one thread.

Chores are what has time: a piece of one is done in turn with calls, so that what is deleted makes room for what these
write, and what is left at the end is left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

_Call = Callable[[], None]
_Chore = Callable[[], bool]


class Writer:
    """The thread starts with the first call.

    Args:
        most_waiting: calls that wait while another is made.
    """

    def __init__(self, most_waiting: int) -> None:
        assert most_waiting >= 1
        self._most_waiting = most_waiting
        self._calls: deque[_Call] = deque()
        self._chores: deque[_Chore] = deque()
        self._busy = self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, call: _Call, patience: float) -> bool:
        """Have it called. False where there has been no room for `patience` seconds: then it is not.

        Raises what an earlier call raised.
        """
        with self._changed:
            self._raise_error()
            assert not self._closed
            if not self._changed.wait_for(lambda: len(self._calls) < self._most_waiting, patience):
                return False
            self._calls.append(call)
            self._wake()
            return True

    def do_in_time(self, chore: _Chore) -> None:
        """Have it called, and again as long as it returns True."""
        with self._changed:
            assert not self._closed
            self._chores.append(chore)
            self._wake()

    def flush(self, patience: float | None = None) -> bool:
        """Wait for all calls and chores, at most `patience` seconds. Whether all are done. Raises what one raised."""
        with self._changed:
            done = self._changed.wait_for(lambda: not (self._calls or self._chores or self._busy), patience)
            self._raise_error()
            return done

    def close(self, patience: float) -> None:
        """End the thread when all calls are made, which takes at most `patience` seconds. Raises what one raised."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(patience)
        self._raise_error()

    @property
    def is_alive(self) -> bool:
        """Whether its thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="cache writer", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        is_chores_turn = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._chores or self._closed)
                if self._closed:
                    self._chores.clear()
                    if not self._calls:
                        return
                takes_call = bool(self._calls) and not (self._chores and is_chores_turn)
                work: _Call | _Chore = self._calls.popleft() if takes_call else self._chores[0]
                is_chores_turn = takes_call
                self._busy = True
                self._changed.notify_all()
            again = False
            try:
                again = work() is True
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
            with self._changed:
                if not again and self._chores and self._chores[0] is work:
                    self._chores.popleft()
                self._busy = False
                self._changed.notify_all()
            del work  # and the memory that it holds

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
