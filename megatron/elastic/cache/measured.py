"""Counts and times of a cache, and whether reading beats computing."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from statistics import median

_MOST_TIMES = 256


@dataclass(frozen=True)
class CacheCounts:
    """What has happened since the cache was opened in this process.

    Attributes:
        hits, misses: samples asked for, at the depth that is current.
        older_hits: samples found at the depth before.
        prefetched: of both kinds of hits, those that were read ahead.
        written: samples that were put and are there.
        not_written: samples, because of the limit, the disk, or a writer that fell behind.
        damaged: values found that could not be used.
        bytes_read, bytes_written: of tensors.
    """

    hits: int = 0
    misses: int = 0
    older_hits: int = 0
    prefetched: int = 0
    written: int = 0
    not_written: int = 0
    damaged: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class Measured:
    """Counts, and seconds per sample, as medians over the last calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = CacheCounts()
        self._reads: deque[float] = deque(maxlen=_MOST_TIMES)
        self._writes: deque[float] = deque(maxlen=_MOST_TIMES)

    def add(self, **counts: int) -> None:
        with self._lock:
            now = {name: getattr(self._counts, name) + count for name, count in counts.items()}
            self._counts = replace(self._counts, **now)

    def add_read(self, seconds: float, num_samples: int, num_bytes: int) -> None:
        """Count one call that found so many samples."""
        if num_samples:
            self.add(bytes_read=num_bytes)
            with self._lock:
                self._reads.append(seconds / num_samples)

    def add_write(self, seconds: float, num_samples: int, num_bytes: int) -> None:
        """Count one transaction."""
        if num_samples:
            self.add(written=num_samples, bytes_written=num_bytes)
            with self._lock:
                self._writes.append(seconds / num_samples)

    @property
    def counts(self) -> CacheCounts:
        return self._counts

    @property
    def read_seconds(self) -> float | None:
        """The time to read a sample that is found, prefetched or not; None where none was."""
        with self._lock:
            return median(self._reads) if self._reads else None

    @property
    def write_seconds(self) -> float | None:
        """The time to write a sample, on the thread that writes; None where none was."""
        with self._lock:
            return median(self._writes) if self._writes else None


def reading_pays(
    read_seconds: float, compute_seconds: float, *, write_seconds: float = 0.0, num_readings: float = float("inf")
) -> bool:
    """Whether a sample's output is had sooner from the cache than from the frozen layers.

    Args:
        read_seconds: of one sample.
        compute_seconds: of one sample, through all frozen layers.
        write_seconds: of one sample, once, where the training waits for it.
        num_readings: epochs that will read what one epoch writes.

    Raises:
        ValueError: seconds that are negative or no numbers.
    """
    for name, seconds in (("reading", read_seconds), ("computing", compute_seconds), ("writing", write_seconds)):
        if not seconds >= 0.0:
            raise ValueError(f"{name} a sample cannot take {seconds:g} seconds; measure it")
    if num_readings <= 0:
        return False
    return read_seconds + write_seconds / num_readings < compute_seconds
