"""The threads of a cache: one reads ahead, and one writes. Each thread starts with the first call for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from torch import Tensor

from megatron.elastic.cache.generation import Generation

_AT_ONCE = 8


class Window:
    """Values that a thread reads ahead, held until they are taken. Only one other thread may use it.

    Args:
        read: keys -> generation and value of each key that has a value.
        most: number of values that are held or being read. Beyond this number the oldest are dropped.
    """

    def __init__(self, read: Callable[[Sequence[bytes]], dict[bytes, tuple[Generation, Tensor]]], most: int) -> None:
        self._read, self._most = read, most
        self._thread = ThreadPoolExecutor(1, "cache window")
        self._readings: dict[bytes, Future] = {}  # by key, the oldest first

    def request(self, keys: Iterable[bytes]) -> None:
        """Begin to read the values of `keys`; of the new keys, only the first `most`."""
        new = [key for key in dict.fromkeys(keys) if key not in self._readings][: self._most]
        for key in list(self._readings)[: max(0, len(self._readings) + len(new) - self._most)]:
            self._taken(key)
        for first in range(0, len(new), _AT_ONCE):
            reading = self._thread.submit(self._read, new[first : first + _AT_ONCE])
            self._readings |= dict.fromkeys(new[first : first + _AT_ONCE], reading)

    def take(self, generation: Generation, key: bytes) -> Tensor | None:
        """Take the value of `key` out of the window, if it was read ahead or is being read in this generation.

        Returns None otherwise. A reading that has not begun is cancelled, since the caller reads faster itself.
        """
        reading = self._readings.get(key)
        found = None if reading is None or reading.cancel() else reading.result().get(key)
        if found is not None and found[0] != generation:
            return None  # a value of the other generation stays
        self._taken(key)
        return None if found is None else found[1]

    def clear(self) -> None:
        """Forget all values, after the readings in progress have ended."""
        wait([reading for reading in self._readings.values() if not reading.cancel()])
        self._readings.clear()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _taken(self, key: bytes) -> None:
        reading = self._readings.pop(key, None)
        if reading is not None and not reading.cancel() and reading.done() and not reading.exception():
            reading.result().pop(key, None)


class Writer:
    """Runs calls of the training thread in order on another thread. Only the training thread may use it.

    Args:
        most_waiting: number of calls that may wait while another call runs.
    """

    def __init__(self, most_waiting: int) -> None:
        self._room = threading.BoundedSemaphore(most_waiting + 1)
        self._thread = ThreadPoolExecutor(1, "cache writer")
        self._calls: deque[Future] = deque()

    def submit(self, call: Callable[[], None], patience: float) -> bool:
        """Submit a call. Returns False, without submitting it, if there is no room for `patience` seconds.

        Raises the error of an earlier call, if one has failed.
        """
        while self._calls and self._calls[0].done():
            self._calls.popleft().result()
        if not self._room.acquire(timeout=patience):
            return False
        self._calls.append(self._thread.submit(call))
        self._calls[-1].add_done_callback(lambda _: self._room.release())
        return True

    def flush(self) -> None:
        """Wait for all calls. Raises the error of a call that has failed."""
        while self._calls:
            self._calls.popleft().result()

    def close(self) -> None:
        """Wait for all calls, and end the thread. Raises the error of a call that has failed."""
        self._thread.shutdown()
        self.flush()
