"""Continue the rows of a program for any number of batches, and find how such a run stops.

**Repetition.** A file has a fixed number of batches, but a run may have any number. So the rows are cut before each
batch. A cut is as far as the ranks can execute their rows without an instruction of that batch or of a later batch:

    rank 0   F0 F1 B0 F2 B1 | F3 B2 F4 B3 F5 B4 | F6 B5 F7 B6 F8 B7 | B8 ...      2bw, batches of 3: the parts between
    rank 1   F0 B0 F1 B1 F2 B2 | F3 ...                                            cuts 1, 2 and 3 are alike

The *part* of a rank in a batch is its row between two cuts. A *fill* of a batches and a *period* of k batches can be
followed by any number of periods if the state at cut a + k is the state at cut a, with all numbers k batches later
(`check.periods`). Several pairs (a, k) may meet this condition. `find_repetition` only considers pairs for which each
part from cut a on equals the part k batches later; the last part of the rows is not compared. Of these pairs the best
one is chosen, by these criteria in this order: it needs no drain between periods, it leads to the order in which the
file ends, it has the fewest batches, it has the shorter fill. A file may state its own pair (`# fill: 1`,
`# period: 2`). Rows without any repetition repeat as a whole, from a drained state to a drained state.

**Draining.** Batches are counted from the last drained state. If the run drains after a batch, an *end* replaces the
part of that batch and all parts behind it:

- If the run is in the state of the program before its last batch, the end is the program's own end.
- Otherwise the end is the rest of the batches begun, in the order of the rows.

A run decides as late as possible whether another batch follows: after the instructions that the part and the end have
in common, as far as all ranks can execute them by then. These instructions are the *head* of the part. The head belongs
to the segment of the batch, and the rest of the part belongs to the next segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, takewhile

from megatron.pipeline.check import ProgramError
from megatron.pipeline.check.compact import compact, error_at
from megatron.pipeline.check.periods import PeriodOrigin, difference, states_at
from megatron.pipeline.graph.row_graph import RowExecution
from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import Instruction, Row, Rows
from megatron.pipeline.program.program import Program, shifted_row
from megatron.pipeline.schedules.passes import Segments
from megatron.pipeline.schedules.passes.updates import set_versions, without_versions
from megatron.pipeline.schedules.pipeline_schedule import ProgramInSegments

Cuts = tuple[tuple[int, ...], ...]
"""For each cut, from the start of the rows to their end: the number of instructions of each rank before the cut."""


@dataclass(frozen=True)
class Repetition:
    """How rows repeat: the number of batches before the repetition, and the number of batches in each period."""

    num_fill: int
    num_period: int

    def place(self, index: int) -> int:
        """Return the batch of the fill or the first period that batch `index` repeats.

        Args:
            index: a batch, counted from the last drained state.
        """
        past = index - self.num_fill
        return index if past < 0 else self.num_fill + past % self.num_period

    def is_of_whole(self, extent: Extent) -> bool:
        """Whether the rows repeat only as a whole, so that the pipeline drains although its weights need no drain."""
        return not extent.weights.drains and self.num_fill + self.num_period == len(extent.batches)


def cuts_of(program: Program) -> Cuts:
    """Return the cuts of a proved program: how far each rank comes before each batch if no rank begins the batch."""
    execution = RowExecution(program)
    served = [[program.batch_served(each) for each in row] for row in program.rows]
    found = [(0,) * program.num_ranks]
    for batch in range(program.first_batch + 1, program.first_batch + len(program.batches)):
        ends = [next((at for at, each in enumerate(row) if each >= batch), len(row)) for row in served]
        found.append(tuple(execution.reach(ends)))
    return (*found, tuple(map(len, program.rows)))


def find_repetition(program: Program, cuts: Cuts, *, fill: int | None = None, period: int | None = None) -> Repetition:
    """Find the fill and the period with which a program can be continued.

    Args:
        program: a proved program of equal batches that starts at `WeightPolicy.first_settled_batch` or later.
        cuts: its cuts (`cuts_of`).
        fill, period: the stated numbers of batches; None: to be found.

    Raises:
        ProgramError: the rows do not repeat; the error names the rank and the instruction behind the cut that differs.
        ValueError: the program is shorter than the stated fill and period.
    """
    num_batches = len(program.batches)
    if (fill or 0) + (period or 1) > num_batches:
        raise ValueError(
            f"a fill of {fill or 0} and a period of {period or 1} batches are more than the {num_batches} of the rows; "
            "write them for more batches"
        )
    parts = parts_of(program, cuts)
    size = program.batches[0]
    compacted = compact(program)
    refused: ProgramError | None = None
    for candidate in sorted(_candidates(parts, fill, period), key=lambda each: _rank(each, program, parts)):
        first, length = candidate.num_fill, candidate.num_period
        ends = [list(cuts[first]), list(cuts[first + length])]
        before, after = states_at(compacted, ends, [PeriodOrigin(0, 0), PeriodOrigin(length * size, length)])
        found = difference(before, after)
        if found is None:
            return candidate
        if refused is None:
            rank, reason = found
            refused = error_at(
                program, rank, cuts[first + length][rank],
                f"with a fill of {first} and a period of {length} of the {num_batches} batches {reason}; no other fill "
                "and period repeats either: write more batches, so that two that are alike follow one another"
                if fill is None or period is None
                else f"with a fill of {first} and a period of {length} batches, as given, {reason}",
            )  # fmt: skip
    assert refused is not None, "the whole program is a candidate"
    raise refused


def parts_of(program: Program, cuts: Cuts) -> list[Rows]:
    """Return the parts of all ranks for each batch, without the versions of computations.

    Each part is renumbered as if its batch were the first batch of the program, so equal parts compare equal.
    """
    rows, size = without_versions(program.rows), program.batches[0]
    parts = []
    for batch, (begins, ends) in enumerate(pairwise(cuts)):
        part = (row[begin:end] for row, begin, end in zip(rows, begins, ends, strict=True))
        parts.append(tuple(shifted_row(each, microbatches=-batch * size, versions=-batch) for each in part))
    return parts


def _candidates(parts: list[Rows], fill: int | None, period: int | None) -> Iterator[Repetition]:
    """Yield the fills and periods for which each part after the fill equals the part a period later.

    The last part of the rows is not compared. If fill and period are both stated, they are yielded without comparison.
    """
    for length in range(1, len(parts) + 1) if period is None else (period,):
        for first in range(len(parts) - length + 1) if fill is None else (fill,):
            if first + length > len(parts):
                continue
            alike = (parts[at] == parts[at + length] for at in range(first, len(parts) - 1 - length))
            if (fill is not None and period is not None) or all(alike):
                yield Repetition(first, length)


def _rank(candidate: Repetition, program: Program, parts: list[Rows]) -> tuple[bool, bool, int, int]:
    """Return the sort key of a candidate; the smallest key is best.

    The best candidate needs no drain between periods, leads to the end of the rows, is short, and has a short fill, in
    this order of importance.
    """
    last = len(parts) - 1
    foretold = left_of(candidate, parts, last, extent=program)
    is_end = all(_computations(row) == _computations(own) for row, own in zip(foretold, parts[last], strict=True))
    return candidate.is_of_whole(program), not is_end, candidate.num_fill + candidate.num_period, candidate.num_fill


def _computations(row: Row) -> list[Instruction]:
    return [each for each in row if each.kind.is_computation]


def left_of(repetition: Repetition, parts: list[Rows], index: int, *, extent: Extent) -> Rows:
    """Return the instructions behind the cut of batch `index` with which the pipeline drains if no batch follows.

    They are in the order of the rows, and numbered as if batch `index` were the first batch of the program.

    Args:
        repetition: how the rows are continued.
        parts: the parts of the program (`parts_of`).
        index: a batch, counted from the last drained state.
        extent: the extent of the program.
    """
    size, end = extent.batches[0], extent.first_microbatch + extent.batches[0]
    left: list[list[Instruction]] = [[] for _ in parts[0]]
    for ahead in range(len(extent.batches) + repetition.num_period + 1):
        last, last_version = end - ahead * size, extent.first_batch + 1 - ahead
        for rank, row in enumerate(parts[repetition.place(index + ahead)]):
            own = [
                each
                for each in row
                if (each.version <= last_version if each.microbatch is None else each.microbatch < last)
            ]
            left[rank] += shifted_row(own, microbatches=ahead * size, versions=ahead)
    return tuple(map(tuple, left))


class Continuation:
    """The rows of a program of equal batches, continued by a repetition.

    `build` needs a complete program that is numbered from batch 0 and microbatch 0.
    """

    def __init__(self, program: Program, repetition: Repetition) -> None:
        self.program, self.repetition = program, repetition
        self.num_microbatches = program.batches[0]
        self._parts = parts_of(program, cuts_of(program))
        self._end = lru_cache(maxsize=None)(self._find_end)
        self._heads = lru_cache(maxsize=None)(self._find_heads)

    def build(self, num_batches: int, *, first_batch: int = 0, first_microbatch: int = 0) -> ProgramInSegments:
        """Build the program of `num_batches` batches from a drained state before `first_batch`.

        A segment ends where a run decides whether another batch follows.
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
        """Return the length of each rank's head in a batch.

        A run executes the head, which starts at the cut of the batch, before it decides whether another batch follows.
        """
        return self._heads(self.repetition.place(index))

    def _later(self, row: Row, num_batches: int, first_batch: int = 0, first_microbatch: int = 0) -> Row:
        return shifted_row(
            row, microbatches=first_microbatch + num_batches * self.num_microbatches, versions=first_batch + num_batches
        )

    def _find_end(self, place: int) -> Rows:
        """Return the end that replaces the part of a batch, if no batch follows it.

        The end is numbered as if the batch were the first one. `place` is a batch of the fill or the first period.
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
        reached = RowExecution(Program.of(extent, versioned)).reach(ends)
        heads = tuple(end - begin for begin, end in zip(begins, reached, strict=True))
        assert all(0 <= head <= len(part) for head, part in zip(heads, following[0], strict=True)), "cuts are as late"
        return heads
