"""Values that are read ahead on one thread, until they are asked for. LMDB's pages in memory are the larger window."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

_AT_ONCE = 8


class Window:
    """The thread starts with the first request.

    Args:
        read: the values that are there for these keys, each under its key or another one.
        most: values that are held or about to be. Behind that the oldest are given up: who asks for them reads them.
    """

    def __init__(self, read: Callable[[Sequence[bytes]], dict[bytes, Tensor]], most: int) -> None:
        self._read, self._most = read, most
        self._wanted: deque[bytes] = deque()
        self._reading: list[bytes] = []
        self._held: dict[bytes, Tensor] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def request(self, keys: Iterable[bytes]) -> None:
        """Have these read, as many of the first as there is room for at all."""
        with self._changed:
            assert not self._closed
            known = {*self._wanted, *self._reading, *self._held}
            new = [key for key in dict.fromkeys(keys) if key not in known][: self._most]
            if not new:
                return
            self._wanted.extend(new)
            while len(self._held) + len(self._reading) + len(self._wanted) > self._most:
                if self._held:
                    del self._held[next(iter(self._held))]
                elif len(self._wanted) > len(new):
                    self._wanted.popleft()
                else:
                    self._wanted.pop()
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="cache window", daemon=True)
                self._thread.start()

    def take(self, key: bytes) -> Tensor | None:
        """The value, if it was read ahead or is being read. Who has taken it has it alone."""
        with self._changed:
            self._raise_error()
            self._changed.wait_for(lambda: key not in self._reading)
            if key in self._wanted:
                self._wanted.remove(key)
            return self._held.pop(key, None)

    def clear(self) -> None:
        """Forget what is held and what is wanted."""
        with self._changed:
            self._wanted.clear()
            self._changed.wait_for(lambda: not self._reading)
            self._held.clear()

    def close(self, patience: float) -> None:
        """End the thread, which takes at most `patience` seconds."""
        with self._changed:
            self._closed = True
            self._wanted.clear()
            self._held.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(patience)

    @property
    def is_alive(self) -> bool:
        """Whether its thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                self._reading = [self._wanted.popleft() for _ in range(min(_AT_ONCE, len(self._wanted)))]
            found: dict[bytes, Tensor] = {}
            try:
                found = self._read(self._reading)
            except BaseException as error:
                with self._changed:
                    self._error = error
            with self._changed:
                self._held |= found
                self._reading = []
                self._changed.notify_all()
            del found

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
