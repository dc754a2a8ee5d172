"""A cache's threads: one reads ahead, and one writes. Each starts with its first call."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from torch import Tensor

from megatron.elastic.cache.generation import Generation

_AT_ONCE = 8


class Window:
    """Values that are read ahead on one thread, until they are asked for. Used by one thread.

    Args:
        read: generation and value of each key that has one.
        most: values that are held or about to be. Beyond that the oldest are given up.
    """

    def __init__(self, read: Callable[[Sequence[bytes]], dict[bytes, tuple[Generation, Tensor]]], most: int) -> None:
        self._read, self._most = read, most
        self._thread = ThreadPoolExecutor(1, "cache window")
        self._readings: dict[bytes, Future] = {}  # by key, the oldest first

    def request(self, keys: Iterable[bytes]) -> None:
        """Have the values read, of the first `most` keys."""
        new = [key for key in dict.fromkeys(keys) if key not in self._readings][: self._most]
        for key in list(self._readings)[: max(0, len(self._readings) + len(new) - self._most)]:
            self._taken(key)
        for first in range(0, len(new), _AT_ONCE):
            reading = self._thread.submit(self._read, new[first : first + _AT_ONCE])
            self._readings |= dict.fromkeys(new[first : first + _AT_ONCE], reading)

    def take(self, generation: Generation, key: bytes) -> Tensor | None:
        """The value of this generation, if it was read ahead or is being read; it is no longer held then. What is not
        begun is given up, since reading it at once is quicker."""
        reading = self._readings.get(key)
        found = None if reading is None or reading.cancel() else reading.result().get(key)
        if found is not None and found[0] != generation:
            return None  # of the other depth
        self._taken(key)
        return None if found is None else found[1]

    def clear(self) -> None:
        """Forget all values. None is being read then."""
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
    """Calls that the training thread hands over, made in order on one thread. Used by one thread.

    Args:
        most_waiting: calls that wait while another is made.
    """

    def __init__(self, most_waiting: int) -> None:
        self._room = threading.BoundedSemaphore(most_waiting + 1)
        self._thread = ThreadPoolExecutor(1, "cache writer")
        self._calls: deque[Future] = deque()

    def submit(self, call: Callable[[], None], patience: float) -> bool:
        """Have it called. False, and it is not, where there has been no room for `patience` seconds. Raises what an
        earlier call raised."""
        while self._calls and self._calls[0].done():
            self._calls.popleft().result()
        if not self._room.acquire(timeout=patience):
            return False
        self._calls.append(self._thread.submit(call))
        self._calls[-1].add_done_callback(lambda _: self._room.release())
        return True

    def flush(self) -> None:
        """Wait for all calls. Raises what one raised."""
        while self._calls:
            self._calls.popleft().result()

    def close(self) -> None:
        """End the thread when all calls are made. Raises what one raised."""
        self._thread.shutdown()
        self.flush()
