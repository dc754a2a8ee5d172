"""Counts and times of a cache, and the decision whether reading is faster than computing."""

from __future__ import annotations

import threading
from collections import Counter, deque
from statistics import median

_MOST_TIMES = 256


class Measured:
    """The counts of a cache, and its seconds per sample as medians over the last calls.

    `counts` has, since this process has opened the cache:

        hits, misses: number of samples found and not found, in the current generation.
        older_hits: number of samples found in the generation before.
        prefetched: number of hits of both kinds that were read ahead.
        written: number of samples that were put and are stored.
        not_written: number of samples that were put and not stored: because of the limit, the disk, or a writer that
            fell behind.
        damaged: number of stored values that could not be used.
        bytes_read, bytes_written: bytes of tensors read and written.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reads: deque[float] = deque(maxlen=_MOST_TIMES)
        self._writes: deque[float] = deque(maxlen=_MOST_TIMES)

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def add_read(self, seconds: float, num_samples: int, num_bytes: int) -> None:
        """Add the time of one call that read `num_samples` samples."""
        if num_samples:
            self.add(bytes_read=num_bytes)
            with self._lock:
                self._reads.append(seconds / num_samples)

    def add_write(self, seconds: float, num_samples: int, num_bytes: int) -> None:
        """Add the time of one call that wrote `num_samples` samples, and count them."""
        if num_samples:
            self.add(written=num_samples, bytes_written=num_bytes)
            with self._lock:
                self._writes.append(seconds / num_samples)

    @property
    def counts(self) -> Counter[str]:
        with self._lock:
            return self._counts.copy()

    @property
    def read_seconds(self) -> float | None:
        """The median seconds to read a sample, prefetched or not; None if no sample was read."""
        with self._lock:
            return median(self._reads) if self._reads else None

    @property
    def write_seconds(self) -> float | None:
        """The median seconds to write a sample, on the thread that writes; None if no sample was written."""
        with self._lock:
            return median(self._writes) if self._writes else None


def reading_pays(
    read_seconds: float, compute_seconds: float, *, write_seconds: float = 0.0, num_readings: float = float("inf")
) -> bool:
    """Whether reading a sample's output from the cache takes less time than computing it by the frozen layers.

    Args:
        read_seconds: seconds to read one sample.
        compute_seconds: seconds to compute one sample through all frozen layers.
        write_seconds: seconds to write one sample once, if the training waits for the write.
        num_readings: number of epochs that will read the samples that one epoch writes.

    Raises:
        ValueError: seconds are negative or not a number.
    """
    for name, seconds in (("reading", read_seconds), ("computing", compute_seconds), ("writing", write_seconds)):
        if not seconds >= 0.0:
            raise ValueError(f"{name} a sample cannot take {seconds:g} seconds; measure it")
    if num_readings <= 0:
        return False
    return read_seconds + write_seconds / num_readings < compute_seconds
