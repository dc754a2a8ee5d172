"""A program with the places at which a run may stop.

The segment of a batch is what a rank does from its first forward of that batch up to where the first forward of the
next batch stands. After it the run may go on with another batch, whose size nobody had to know before, or drain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import Row, Rows
from megatron.pipeline.program.program import Program, shifted_row
from megatron.pipeline.schedules.passes import Segments


@dataclass(frozen=True)
class ProgramInSegments:
    """A program, cut into segments.

    `borders[rank][i]` is the position in the rank's row at which segment i begins; the drain is the last segment, and
    the length of the row the last border.
    """

    program: Program
    borders: tuple[tuple[int, ...], ...]

    @staticmethod
    def join(extent: Extent, segments_of_rank: Sequence[Segments]) -> "ProgramInSegments":
        """The program of the rows that the ranks' segments make up."""
        rows = tuple(
            tuple(instruction for segment in segments for instruction in segment) for segments in segments_of_rank
        )
        borders = tuple(tuple(accumulate(map(len, segments), initial=0)) for segments in segments_of_rank)
        return ProgramInSegments(Program.of(extent, rows), borders)

    def segments(self, first: int, end: int) -> Rows:
        """What each rank does in the segments from `first` up to, and without, `end`."""
        rows = zip(self.program.rows, self.borders, strict=True)
        return tuple(row[borders[first] : borders[end]] for row, borders in rows)

    @property
    def drain(self) -> Rows:
        """What each rank does after the last batch's segment."""
        num_batches = len(self.program.batches)
        return self.segments(num_batches, num_batches + 1)


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
