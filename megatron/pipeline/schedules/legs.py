"""A program with the places at which a run may stop.

The leg of a batch is what a rank does from its first forward of that batch up to where the first forward of the next
batch stands. After it the run may go on with another batch, whose size nobody had to know before, or drain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron.pipeline.program.instruction import Row, Rows
from megatron.pipeline.program.program import Program, shifted_row
from megatron.pipeline.schedules.passes import Legs


@dataclass(frozen=True)
class ProgramInLegs:
    """A program, cut into legs.

    `borders[rank][i]` is the position in the rank's row at which leg i begins; the drain is the last leg, and the
    length of the row the last border.
    """

    program: Program
    borders: tuple[tuple[int, ...], ...]

    @staticmethod
    def join(outline: Program, legs_of_rank: Sequence[Legs]) -> "ProgramInLegs":
        """`outline` with the rows that the ranks' legs make up."""
        rows = tuple(tuple(instruction for leg in legs for instruction in leg) for legs in legs_of_rank)
        borders = tuple(tuple(accumulate(map(len, legs), initial=0)) for legs in legs_of_rank)
        return ProgramInLegs(outline.with_rows(rows), borders)

    def legs(self, first: int, end: int) -> Rows:
        """What each rank does in the legs from `first` up to, and without, `end`."""
        rows = zip(self.program.rows, self.borders, strict=True)
        return tuple(row[borders[first] : borders[end]] for row, borders in rows)

    @property
    def drain(self) -> Rows:
        """What each rank does after the last batch's leg."""
        num_batches = len(self.program.batches)
        return self.legs(num_batches, num_batches + 1)


class ShiftedRows(Sequence[Row]):
    """Rows later in the run, each made when it is asked for: a rank asks for its own alone."""

    def __init__(self, rows: Rows, *, microbatches: int, versions: int) -> None:
        self._rows = rows
        self._microbatches = microbatches
        self._versions = versions

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rank: int) -> Row:
        return shifted_row(self._rows[rank], microbatches=self._microbatches, versions=self._versions)
