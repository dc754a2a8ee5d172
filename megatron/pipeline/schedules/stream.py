"""A program without a known end: the batches of a run as they come.

Whether a run stops, saves or evaluates is decided while it runs, and a ramp-up changes the size of its batches. So the
runtime asks for one batch's instructions at a time. They are not made one by one: each segment is cut from a whole
program that the checker has proved. That program holds the batches that can still matter to the segment, and the drain
that may come next. It depends on the sizes of its batches and on nothing else, so it is built and proved once for all
places of the run, and shifted to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import Row, Rows
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.segments import ProgramInSegments, ShiftedRows

if TYPE_CHECKING:
    from megatron.pipeline.schedules.any_schedule import AnySchedule


class ProgramStream:
    """The rows of a run, batch by batch. It begins drained, and may be drained between any two batches.

    Attributes:
        next_batch: index, over the whole run, of the batch to be started next.
        next_microbatch: index, over the whole run, of that batch's first microbatch.
    """

    def __init__(self, schedule: AnySchedule, *, first_batch: int = 0, first_microbatch: int = 0) -> None:
        self.next_batch = first_batch
        self.next_microbatch = first_microbatch
        self._schedule = schedule
        self._sizes: tuple[int, ...] = ()  # of the batches since the last drain, as far back as they matter
        self._drained_at = first_batch

    @property
    def entry_versions(self) -> tuple[int, ...]:
        """The weight versions alive at the last drained state."""
        return self._schedule.weights.entry_versions(self._drained_at)

    def start_batch(self, num_microbatches: int) -> Sequence[Row]:
        """The segment of the next batch, as one row for each rank.

        It reaches from the rank's first instruction of the batch to just before its first of the batch after it, and
        so includes the STEP that stands there.

        Raises:
            ValueError: the schedule cannot run a batch of this size.
        """
        self._schedule.validate(num_microbatches)
        self._sizes = self._schedule.window((*self._sizes, num_microbatches))
        self.next_batch += 1
        self.next_microbatch += num_microbatches
        window = self._window()
        return self._placed(window, window.segments(len(self._sizes) - 1, len(self._sizes)))

    def drain(self) -> Sequence[Row]:
        """What is left of the batches that were started, as one row for each rank. The stream may then go on."""
        if not self._sizes:
            return ((),) * self._schedule.num_ranks
        window = self._window()
        self._sizes = ()
        self._drained_at = self.next_batch
        return self._placed(window, window.drain)

    def evaluation(self, num_microbatches: int) -> Sequence[Row]:
        """Forwards of that many microbatches, counted from 0, with the newest version; for a drained stream."""
        assert not self._sizes, "evaluation needs a drained stream"
        program = _proved_evaluation(self._schedule, num_microbatches)
        return ShiftedRows(program.rows, microbatches=0, versions=self.next_batch)

    def _window(self) -> ProgramInSegments:
        first_batch = self.next_batch - len(self._sizes)
        return _proved(self._schedule, self._sizes, min(first_batch, self._schedule.first_settled_batch))

    def _placed(self, window: ProgramInSegments, rows: Rows) -> Sequence[Row]:
        program = window.program
        return ShiftedRows(
            rows,
            microbatches=self.next_microbatch - program.num_microbatches,
            versions=self.next_batch - len(program.batches) - program.first_batch,
        )


@lru_cache(maxsize=64)  # a file's period may be as many batches long
def _proved(schedule: AnySchedule, batches: tuple[int, ...], first_batch: int) -> ProgramInSegments:
    """The program of `batches`. `first_batch` matters for the first few batches alone (`first_settled_batch`)."""
    built = schedule.build_in_segments(batches, first_batch=first_batch)
    check(
        built.program,
        max_saved=schedule.max_saved_microbatches(batches),
        max_saved_on_rank=schedule.max_saved_on_rank(batches),
    )
    return built


@lru_cache(maxsize=16)
def _proved_evaluation(schedule: AnySchedule, num_microbatches: int) -> Program:
    program = schedule.build_evaluation(num_microbatches, version=0)
    check(program)
    return program
