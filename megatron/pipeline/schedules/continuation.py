"""A program's rows without an end: what each rank does in each batch of a run, and how it stops.

Batches are counted from the last drained state. What a rank does in a batch is a *part* of its row, between two of the
cuts of `repetition`. Where the run drains after a batch, the batch's part and all behind it give way to an *end*:

- where the run stands as the program does before its last batch, and drains after one batch more, as the program does:
  the program's own end;
- elsewhere, what is left of the batches begun, in the order of the rows.

Whether another batch follows is asked as late as both ways are the same, and no later than all ranks come by then: so
many instructions of the part, its *head*, belong to the batch's segment, and the rest to the next one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import takewhile

from megatron.pipeline.check.compact import compact
from megatron.pipeline.check.progress import Execution
from megatron.pipeline.program.instruction import Row, Rows
from megatron.pipeline.program.program import Program, shifted_row
from megatron.pipeline.schedules.passes import Segments
from megatron.pipeline.schedules.passes.versions import set_versions
from megatron.pipeline.schedules.repetition import Repetition, cuts_of, left_of, parts_of
from megatron.pipeline.schedules.segments import ProgramInSegments


class Continuation:
    """The rows of a program of equal batches that goes on so. To build from it, it has to be complete and counted from
    batch and microbatch 0.
    """

    def __init__(self, program: Program, repetition: Repetition) -> None:
        self.program, self.repetition = program, repetition
        self.num_microbatches = program.batches[0]
        self._parts = parts_of(program, cuts_of(program))
        self._end = lru_cache(maxsize=None)(self._find_end)
        self._heads = lru_cache(maxsize=None)(self._find_heads)

    def build(self, num_batches: int, *, first_batch: int = 0, first_microbatch: int = 0) -> ProgramInSegments:
        """The program of so many batches from a drained state before `first_batch` on, with the places at which a run
        asks whether another batch follows.
        """
        extent = replace(
            self.program, rows=(), batches=(self.num_microbatches,) * num_batches, first_batch=first_batch,
            first_microbatch=first_microbatch,
        )  # fmt: skip
        places = [self.repetition.place(index) for index in range(num_batches)]
        segments_of_rank = []
        for rank in range(self.program.num_ranks):
            left: Row = ()
            segments: Segments = []
            for index, place in enumerate(places):
                head = self._heads(place)[rank]
                part = self._later(self._parts[place][rank], index, first_batch, first_microbatch)
                segments.append([*left, *part[:head]])
                left = part[head:]
            rest = self._end(places[-1])[rank][self._heads(places[-1])[rank] :]
            segments.append(list(self._later(rest, num_batches - 1, first_batch, first_microbatch)))
            segments_of_rank.append(set_versions(segments, extent))
        return ProgramInSegments.join(extent, segments_of_rank)

    def heads(self, index: int) -> tuple[int, ...]:
        """How many instructions of each rank, behind the cut of that batch, a run executes before it decides whether
        another one follows.
        """
        return self._heads(self.repetition.place(index))

    def _later(self, row: Row, num_batches: int, first_batch: int = 0, first_microbatch: int = 0) -> Row:
        return shifted_row(
            row, microbatches=first_microbatch + num_batches * self.num_microbatches, versions=first_batch + num_batches
        )

    def _find_end(self, place: int) -> Rows:
        """What the ranks do from the cut before this batch of fill or first period on if none follows it; counted from
        that batch.
        """
        repetition, last = self.repetition, len(self._parts) - 1
        if repetition.place(last) == place and last >= repetition.num_fill <= place:
            return self._parts[last]
        return left_of(repetition, self._parts, place, extent=self.program)

    def _find_heads(self, place: int) -> tuple[int, ...]:
        end, begins, ends, rows = self._end(place), [], [], []
        following = [self._parts[self.repetition.place(place + ahead)] for ahead in range(2)]
        for rank, own in enumerate(end):
            before = [each for index in range(place) for each in self._later(self._parts[index][rank], index)]
            goes_on = [*following[0][rank], *self._later(following[1][rank], 1)]
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, goes_on, strict=False)))
            begins.append(len(before))
            ends.append(len(before) + common)
            rows.append((*before, *self._later(own, place)))
        extent = replace(self.program, rows=(), batches=(self.num_microbatches,) * (place + 1))
        versioned = tuple(tuple(set_versions([list(row)], extent)[0]) for row in rows)
        reached = Execution(compact(Program.of(extent, versioned))).reach(ends)
        heads = tuple(end - begin for begin, end in zip(begins, reached, strict=True))
        assert all(0 <= head <= len(part) for head, part in zip(heads, following[0], strict=True)), "cuts are as late"
        return heads
