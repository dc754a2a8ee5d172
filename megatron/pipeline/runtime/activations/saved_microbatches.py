"""How many microbatches a rank saves at once, counted where it happens.

The compute thread counts forwards and backwards, the thread of the moves what is posted and complete, as
`program.move_order` says. The checker proves the most that this can ever reach. A microbatch whose backward is split is
saved until the end of its W. From the end of its I on, when the stage keeps only what its weight gradients need, it is
deferred, which is counted beside that, with the bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable


class DeferredBytes:
    """Bytes that the stages of a rank keep together between I and W.

    Attributes:
        now, peak: at present, and the most so far.
    """

    def __init__(self) -> None:
        self.now = self.peak = self._recent_peak = 0

    def add(self, num_bytes: int) -> None:
        """So many more, or fewer, are kept from now on."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        self._recent_peak = max(self._recent_peak, self.now)

    def take_recent_peak(self) -> int:
        """The most since the last call, or since the start."""
        peak, self._recent_peak = self._recent_peak, self.now
        return peak


class SavedMicrobatches:
    """Per stage, and over all stages of the rank.

    Attributes:
        peaks: stage -> the most that were saved at once; `peak_on_rank`: the most together.
        deferred_peaks: stage -> the most of them that were between I and W at once.
        deferred_bytes: what they keep for it.
    """

    def __init__(self, stages: Iterable[int], deferred_bytes: DeferredBytes | None = None) -> None:
        self.peaks = dict.fromkeys(stages, 0)
        self.peak_on_rank = 0
        self.deferred_peaks = dict.fromkeys(self.peaks, 0)
        self.deferred_bytes = deferred_bytes or DeferredBytes()
        self._counts = dict.fromkeys(self.peaks, 0)
        self._deferred: dict[tuple[int, int], int] = {}  # (stage, microbatch) -> bytes
        self._lock = threading.Lock()

    def add(self, stage: int) -> None:
        """A forward starts, or a LOAD or ACCEPT is posted."""
        with self._lock:
            self._counts[stage] += 1
            self.peaks[stage] = max(self.peaks[stage], self._counts[stage])
            self.peak_on_rank = max(self.peak_on_rank, sum(self._counts.values()))

    def remove(self, stage: int) -> None:
        """A backward has ended (of a split one, W), or an EVICT or RETURN is complete."""
        with self._lock:
            self._counts[stage] -= 1
            assert self._counts[stage] >= 0

    def defer(self, stage: int, microbatch: int, num_bytes: int) -> None:
        """An I has ended, and so many bytes are kept for the W."""
        with self._lock:
            self._deferred[stage, microbatch] = num_bytes
            self.deferred_bytes.add(num_bytes)
            count = sum(each == stage for each, _ in self._deferred)
            self.deferred_peaks[stage] = max(self.deferred_peaks[stage], count)

    def end_deferred(self, stage: int, microbatch: int) -> None:
        """Its W has ended, and keeps nothing."""
        with self._lock:
            self.deferred_bytes.add(-self._deferred.pop((stage, microbatch)))

    def deferred_of(self, stage: int) -> list[int]:
        """The microbatches that are between I and W at a stage, ascending."""
        return sorted(microbatch for at, microbatch in self._deferred if at == stage)
