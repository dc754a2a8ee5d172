"""A run of any number of equal batches, in the space of a few.

Once a pipeline that never drains has filled, it does the same for every batch, with later microbatches and versions.
So a long run is its fill, one period repeated, and its drain; what is proved of these three holds for every number of
batches.
"""

from dataclasses import dataclass, replace

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import Rows
from megatron.pipeline.program.program import Program, shifted_row


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
