"""A pipeline program: what every rank does, over one or more batches.

Rows hold one rank's instructions in order, without bubbles: time is the simulator's and the runtime's business.

A `PeriodicProgram` is a run of any number of equal batches in the space of a few. Once a pipeline that never drains has
filled, it does the same for every batch, with later microbatches and versions. So a long run is its fill, one period
repeated, and its drain; what is proved of these three holds for every number of batches.
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
    """An extent with the instructions of each pipeline rank in `rows`."""

    rows: Rows = field(kw_only=True)

    @classmethod
    def of(cls, extent: Extent, rows: Rows) -> Program:
        """The program that has these rows."""
        return cls(rows=rows, **{each.name: getattr(extent, each.name) for each in fields(Extent)})

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def num_instructions(self) -> int:
        return sum(map(len, self.rows))

    @property
    def num_evictions(self) -> tuple[int, ...]:
        """For each stage, how many microbatches move to the pair stage and back. All 0: nothing to balance."""
        return self._count(EVICTIONS)

    @property
    def num_offloads(self) -> tuple[int, ...]:
        """For each stage, how many microbatches leave their input to the host."""
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
        """Whether some rank has a backward of a batch, or a half of one, after one of a later batch."""
        return any(map(self.interleaves_batches_in, self.rows))

    def with_rows(self, rows: Rows) -> Program:
        """The same program with other rows."""
        return replace(self, rows=rows)

    # --- text

    def to_csv(self) -> str:
        """The text form: `# key: value` lines, then a line of comma-separated instructions for each rank."""
        return csv_text.to_csv(self, self.rows)

    def to_torch_csv(self, *, communication: bool = False) -> str:
        """The text that torch.distributed.pipelining reads (see `megatron.pipeline.program.csv_text`)."""
        return csv_text.to_torch_csv(self, self.rows, communication=communication)

    @classmethod
    def from_csv(cls, csv: str, **given: object) -> Program:
        """Read the text form, or a compute-only CSV file of torch's (see `csv_text.read_csv`)."""
        return cls(**csv_text.read_csv(csv, **given))


def shifted_row(row: Iterable[Instruction], *, microbatches: int, versions: int) -> Row:
    """The same row, later in the run."""
    if not (microbatches or versions):
        return tuple(row)
    return tuple(instruction.shifted(microbatches=microbatches, versions=versions) for instruction in row)


@dataclass(frozen=True)
class PeriodicProgram:
    """Rows of a fill, of one period and of a drain.

    Attributes:
        extent: what the fill and the drain span together.
        fill: from the drained start on.
        period: the batch after the fill, or a few.
        drain: what comes after the fill where no period does.
        num_microbatches: of each batch.
        num_batches: of a period.
    """

    extent: Extent
    fill: Rows
    period: Rows
    drain: Rows
    num_microbatches: int
    num_batches: int = 1

    def unroll(self, num_periods: int) -> Program:
        """The program of the fill, `num_periods` periods and the drain.

        Raises:
            ValueError: a negative number.
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
