"""A pipeline program: the instructions of every rank, for one or more batches.

A row holds the instructions of one rank in order, without bubbles. Only the simulator and the runtime deal with time.

A `PeriodicProgram` describes a run of any number of equal batches by the rows of a few batches. Once a pipeline that
never drains has filled, it repeats the same instructions for every batch, with later microbatches and versions. So a
long run consists of its fill, of one period that repeats, and of its drain. A proof about these three parts holds for
every number of batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from megatron.pipeline.program import csv_text
from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import EVICTIONS, OFFLOADS, Instruction, Kind, Row, Rows

__all__ = ["Program", "Row", "Rows", "shifted_row"]


@dataclass(frozen=True)
class Program(Extent):
    """An extent, with the instructions of each pipeline rank in `rows`."""

    rows: Rows = field(kw_only=True)

    @classmethod
    def of(cls, extent: Extent, rows: Rows) -> Program:
        """Make the program of an extent and rows."""
        return cls(rows=rows, **{each.name: getattr(extent, each.name) for each in fields(Extent)})

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def num_instructions(self) -> int:
        return sum(map(len, self.rows))

    @property
    def num_evictions(self) -> tuple[int, ...]:
        """For each stage, the number of microbatches that move to the pair stage and back."""
        return self._count(EVICTIONS)

    @property
    def num_offloads(self) -> tuple[int, ...]:
        """For each stage, the number of microbatches whose input or saved activations wait on the host."""
        return self._count(OFFLOADS)

    def _count(self, kinds: frozenset[Kind]) -> tuple[int, ...]:
        counts = [0] * self.num_stages
        for row in self.rows:
            for instruction in row:
                if instruction.kind in kinds:
                    counts[instruction.stage] += 1
        return tuple(counts)

    @property
    def interleaves_batches(self) -> bool:
        """Whether some row has a backward, or a half of a backward, after a backward of a later batch."""
        return any(map(self.interleaves_batches_in, self.rows))

    def with_rows(self, rows: Rows) -> Program:
        """Return the same program with other rows."""
        return replace(self, rows=rows)

    # --- text

    def to_csv(self) -> str:
        """Write the text form: `# key: value` lines, then a line of comma-separated instructions for each rank."""
        return csv_text.to_csv(self, self.rows)

    def to_torch_csv(self, *, communication: bool = False) -> str:
        """Write the text form of torch.distributed.pipelining (see `csv_text.to_torch_csv`)."""
        return csv_text.to_torch_csv(self, self.rows, communication=communication)

    @classmethod
    def from_csv(cls, csv: str, **given: object) -> Program:
        """Read the text form, or a compute-only CSV file of torch (see `csv_text.read_csv`)."""
        return cls(**csv_text.read_csv(csv, **given))


def shifted_row(row: Iterable[Instruction], *, microbatches: int, versions: int) -> Row:
    """Return the row with `microbatches` added to its microbatch numbers and `versions` to its weight versions."""
    if not (microbatches or versions):
        return tuple(row)
    return tuple(instruction.shifted(microbatches=microbatches, versions=versions) for instruction in row)


@dataclass(frozen=True)
class PeriodicProgram:
    """The rows of a fill, of one period and of a drain.

    Attributes:
        extent: the extent of a program of the fill and the drain alone.
        fill: the rows from the drained start on.
        period: the rows of the next `num_batches` batches.
        drain: the rows that end a run directly after the fill.
        num_microbatches: the number of microbatches of each batch.
        num_batches: the number of batches in a period.
    """

    extent: Extent
    fill: Rows
    period: Rows
    drain: Rows
    num_microbatches: int
    num_batches: int = 1

    def unroll(self, num_periods: int) -> Program:
        """Return the program of the fill, `num_periods` periods and the drain.

        Raises:
            ValueError: `num_periods` is negative.
        """
        if num_periods < 0:
            raise ValueError(f"a program cannot have {num_periods} periods; give 0 and more")
        rows, num_batches = [], num_periods * self.num_batches
        for fill, period, drain in zip(self.fill, self.period, self.drain, strict=True):
            row = list(fill)
            for index in range(num_periods):
                batches = index * self.num_batches
                row += shifted_row(period, microbatches=batches * self.num_microbatches, versions=batches)
            row += shifted_row(drain, microbatches=num_batches * self.num_microbatches, versions=num_batches)
            rows.append(tuple(row))
        batches = self.extent.batches + (self.num_microbatches,) * num_batches
        return Program.of(replace(self.extent, batches=batches), tuple(rows))
