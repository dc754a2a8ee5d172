"""How many microbatches a rank saves at once, counted where it happens.

The compute thread counts forwards and backwards, the thread of the moves what is posted and complete, as
`program.move_order` says. The checker proves the most that this can ever reach.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable


class SavedMicrobatches:
    """Per stage, and over all stages of the rank. `peaks`: stage -> most at once; `peak_on_rank`: most together."""

    def __init__(self, stages: Iterable[int]) -> None:
        self.peaks = dict.fromkeys(stages, 0)
        self.peak_on_rank = 0
        self._counts = dict.fromkeys(self.peaks, 0)
        self._lock = threading.Lock()

    def add(self, stage: int) -> None:
        """A forward starts, or a LOAD or ACCEPT is posted."""
        with self._lock:
            self._counts[stage] += 1
            self.peaks[stage] = max(self.peaks[stage], self._counts[stage])
            self.peak_on_rank = max(self.peak_on_rank, sum(self._counts.values()))

    def remove(self, stage: int) -> None:
        """A backward has ended, or an EVICT or RETURN is complete."""
        with self._lock:
            self._counts[stage] -= 1
            assert self._counts[stage] >= 0
