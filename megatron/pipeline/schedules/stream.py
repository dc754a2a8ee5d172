"""A program without a known end: the batches of a run as they come.

Whether a run stops, saves or evaluates is decided while it runs, and a ramp-up changes the size of batches, so the runtime asks for one batch's
instructions at a time. They are not made one by one: each leg is cut from a program that the checker has proved, which holds the batches that can
still matter to it (those in flight, and this one) and the drain that may come next. Such a program depends on the sizes of its batches and on nothing
else, so it is built and proved once, and shifted to its place in the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from megatron.pipeline.check import check
from megatron.pipeline.program import Row
from megatron.pipeline.schedules.legs import ProgramInLegs, ShiftedRows

if TYPE_CHECKING:
    from megatron.pipeline.schedules.schedule import Schedule


class ProgramStream:
    """The rows of a run, batch by batch. It begins drained, and may be drained between any two batches.

    Attributes:
        next_batch, next_microbatch: indices, over the whole run, of the batch to be started next and of its first microbatch.
    """

    def __init__(self, schedule: Schedule, *, first_batch: int = 0, first_microbatch: int = 0) -> None:
        self.next_batch = first_batch
        self.next_microbatch = first_microbatch
        self._schedule = schedule
        self._sizes: tuple[int, ...] = ()  # of the batches since the last drain, as far back as they matter to the next leg
        self._drained_at = first_batch

    @property
    def entry_versions(self) -> tuple[int, ...]:
        """The weight versions alive at the last drained state."""
        return self._schedule.weights.rule.entry_versions(self._drained_at)

    def start_batch(self, num_microbatches: int) -> Sequence[Row]:
        """The leg of the next batch, one row for each rank: from the rank's first instruction of the batch up to where the batch after it begins.

        That includes the STEP that stands before the next batch's first forward.

        Raises:
            ValueError: the schedule cannot run a batch of this size.
        """
        self._schedule.validate(num_microbatches)
        self._sizes = (*self._sizes, num_microbatches)[-self._schedule.settling_batches - 1 :]
        self.next_batch += 1
        self.next_microbatch += num_microbatches
        window = self._window()
        return self._placed(window, window.legs(len(self._sizes) - 1, len(self._sizes)))

    def drain(self) -> Sequence[Row]:
        """What is left of the batches that were started. Then the stream is drained; it may go on with another batch."""
        window = self._window() if self._sizes else None
        self._sizes = ()
        self._drained_at = self.next_batch
        return self._placed(window, window.drain) if window else ((),) * self._schedule.num_stages

    def _window(self) -> ProgramInLegs:
        first_batch = self.next_batch - len(self._sizes)
        return _proved(self._schedule, self._sizes, min(first_batch, 1))

    def _placed(self, window: ProgramInLegs, rows: Sequence[Row]) -> Sequence[Row]:
        program = window.program
        return ShiftedRows(
            rows,
            microbatches=self.next_microbatch - program.num_microbatches,
            versions=self.next_batch - len(program.batches) - program.first_batch,
        )


@lru_cache(maxsize=4)
def _proved(schedule: Schedule, batches: tuple[int, ...], first_batch: int) -> ProgramInLegs:
    """The program of `batches`; `first_batch` is 0 or 1, for batch 0 alone has no version before its own."""
    built = schedule.build_in_legs(batches, first_batch=first_batch)
    check(built.program, max_saved=schedule.max_saved_microbatches(batches))
    return built
