"""A pipeline program: what every rank does, over one or more batches.

Rows hold one rank's instructions in order, without bubbles: time is the simulator's and the runtime's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from megatron.pipeline.program import csv_text
from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import Instruction, Kind, Row, Rows

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
        return self._count(Kind.EVICT)

    @property
    def num_offloads(self) -> tuple[int, ...]:
        """For each stage, how many microbatches leave their input to the host."""
        return self._count(Kind.OFFLOAD)

    def _count(self, kind: Kind) -> tuple[int, ...]:
        counts = [0] * self.num_stages
        for row in self.rows:
            for instruction in row:
                if instruction.kind is kind:
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
