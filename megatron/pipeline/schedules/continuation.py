"""How the rows of a program continue for any number of batches, and how a run of them stops.

**What repeats.** A file ends; a run lasts for any number of batches. Cut the rows before each batch, as far as all
ranks come without an instruction of that batch or of a later one:

    rank 0   F0 F1 B0 F2 B1 | F3 B2 F4 B3 F5 B4 | F6 B5 F7 B6 F8 B7 | B8 ...      2bw, batches of 3: the parts between
    rank 1   F0 B0 F1 B1 F2 B2 | F3 ...                                            cuts 1, 2 and 3 are alike

A *fill* of a batches and a *period* of k batches can be repeated for ever if the state at cut a + k is the state at cut
a, counted from k batches later (`check.periods`). Several pairs may meet this condition. `find_repetition` takes those
whose parts, from cut a on, are alike every k batches up to the last one; of these, the ones that lead to the order in
which the file ends; of these, the one with the fewest batches, then with the shorter fill. A file may state its own:
`# fill: 1`, `# period: 2`. Rows that repeat nowhere repeat as a whole: from a drained state to a drained state.

**What a run does.** Batches are counted from the last drained state. The *part* of a rank in a batch is its row between
two cuts. Where the run drains after a batch, the batch's part and everything behind it give way to an *end*:

- if the run stands where the program stands before its last batch, and drains after one more batch as the program does:
  the program's own end;
- otherwise what is left of the batches begun, in the order of the rows.

A run decides whether another batch follows as late as both continuations are the same, and no later than all ranks can
come by then. That many instructions of the part, its *head*, belong to the batch's segment; the rest belongs to the
next one.
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
"""For each cut, from before the first batch to behind the last: the number of instructions of each rank before it."""


@dataclass(frozen=True)
class Repetition:
    """Batches before the rows repeat themselves, and after how many they do."""

    num_fill: int
    num_period: int

    def place(self, index: int) -> int:
        """The batch of fill and first period in which a rank does what it does in batch `index`, counted from the last
        drained state.
        """
        past = index - self.num_fill
        return index if past < 0 else self.num_fill + past % self.num_period

    def is_of_whole(self, extent: Extent) -> bool:
        """Whether rows repeat as a whole only, so that the pipeline drains where its weights need not."""
        return not extent.weights.drains and self.num_fill + self.num_period == len(extent.batches)


def cuts_of(program: Program) -> Cuts:
    """How far each rank comes before each batch, if none begins it. The program is proved."""
    execution = RowExecution(program)
    served = [[program.batch_served(each) for each in row] for row in program.rows]
    found = [(0,) * program.num_ranks]
    for batch in range(program.first_batch + 1, program.first_batch + len(program.batches)):
        ends = [next((at for at, each in enumerate(row) if each >= batch), len(row)) for row in served]
        found.append(tuple(execution.reach(ends)))
    return (*found, tuple(map(len, program.rows)))


def find_repetition(program: Program, cuts: Cuts, *, fill: int | None = None, period: int | None = None) -> Repetition:
    """How a program goes on.

    Args:
        program: proved, of equal batches, and beginning where its policy has settled (as of batch 2 under 2bw).
        cuts: its own, as of `cuts_of`.
        fill, period: what is given; None: found.

    Raises:
        ProgramError: the rank, and the instruction behind the cut, at which it does not go on as it began.
        ValueError: a fill and a period that the program is too short for.
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
    """What each rank does between cuts, counted from the batch behind the first of them as if it were the program's
    first, without versions of computations.
    """
    rows, size = without_versions(program.rows), program.batches[0]
    parts = []
    for batch, (begins, ends) in enumerate(pairwise(cuts)):
        part = (row[begin:end] for row, begin, end in zip(rows, begins, ends, strict=True))
        parts.append(tuple(shifted_row(each, microbatches=-batch * size, versions=-batch) for each in part))
    return parts


def _candidates(parts: list[Rows], fill: int | None, period: int | None) -> Iterator[Repetition]:
    """Fills and periods such that all parts but the last, from the fill on, are alike a period later."""
    for length in range(1, len(parts) + 1) if period is None else (period,):
        for first in range(len(parts) - length + 1) if fill is None else (fill,):
            if first + length > len(parts):
                continue
            alike = (parts[at] == parts[at + length] for at in range(first, len(parts) - 1 - length))
            if (fill is not None and period is not None) or all(alike):
                yield Repetition(first, length)


def _rank(candidate: Repetition, program: Program, parts: list[Rows]) -> tuple[bool, bool, int, int]:
    """What comes first among candidates: that do not drain where weights need not, lead to the end of the rows, are
    short, have a short fill.
    """
    last = len(parts) - 1
    foretold = left_of(candidate, parts, last, extent=program)
    is_end = all(_computations(row) == _computations(own) for row, own in zip(foretold, parts[last], strict=True))
    return candidate.is_of_whole(program), not is_end, candidate.num_fill + candidate.num_period, candidate.num_fill


def _computations(row: Row) -> list[Instruction]:
    return [each for each in row if each.kind.is_computation]


def left_of(repetition: Repetition, parts: list[Rows], index: int, *, extent: Extent) -> Rows:
    """What is left of the batches up to `index` from its cut on, in the order of the rows, where none follows; counted
    from that batch, as its part is.

    Args:
        parts: as of `parts_of`, of the program with this extent.
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
    """The rows of a program of equal batches, continued by a repetition. To build from them, the program has to be
    complete and counted from batch and microbatch 0.
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
        reached = RowExecution(Program.of(extent, versioned)).reach(ends)
        heads = tuple(end - begin for begin, end in zip(begins, reached, strict=True))
        assert all(0 <= head <= len(part) for head, part in zip(heads, following[0], strict=True)), "cuts are as late"
        return heads
