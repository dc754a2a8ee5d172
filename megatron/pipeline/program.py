"""A pipeline program: what every rank does, over one or more batches.

Rows hold one rank's instructions in order, without bubbles: time is the simulator's and the runtime's business. Microbatches, batches and weight
versions are numbered on over the whole training run, so a program can begin anywhere in a run and span batches without a drain between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from megatron.pipeline.instruction import Instruction
from megatron.pipeline.weights import WeightPolicy

__all__ = ["Program", "Row", "Rows", "WeightPolicy"]

Row = tuple[Instruction, ...]
Rows = tuple[Row, ...]  # one for each pipeline rank


@dataclass(frozen=True)
class Program:
    """Instructions per rank, from a drained state to a drained state.

    Attributes:
        rows: the instructions of each pipeline rank.
        rank_of_stage: the rank of each stage.
        batches: number of microbatches of each batch that the program spans.
        weights: the weight policy.
        first_batch, first_microbatch: index, over the whole run, of its first batch and first microbatch.
        recompute: whether backwards are preceded by a recompute.
        tied_embeddings, data_parallel, global_norm: which links the update chain has.
        forward_only: the program evaluates: it has forwards, with the newest entry version, and neither backwards nor updates.
    """

    rows: Rows
    rank_of_stage: tuple[int, ...]
    batches: tuple[int, ...]
    weights: WeightPolicy
    first_batch: int = 0
    first_microbatch: int = 0
    recompute: bool = False
    tied_embeddings: bool = False
    data_parallel: bool = False
    global_norm: bool = True
    forward_only: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def num_microbatches(self) -> int:
        return sum(self.batches)

    @property
    def num_instructions(self) -> int:
        return sum(map(len, self.rows))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on a rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def crosses(self, stage: int, other: int) -> bool:
        """Whether both stages exist and live on different ranks, so that tensors between them are sent."""
        last = self.num_stages - 1
        return 0 <= stage <= last and 0 <= other <= last and self.rank_of_stage[stage] != self.rank_of_stage[other]

    @cached_property
    def _batch_starts(self) -> tuple[int, ...]:
        """First microbatch of each batch, and one past the last."""
        return tuple(accumulate(self.batches, initial=self.first_microbatch))

    def batch_of(self, microbatch: int) -> int:
        """The batch, over the whole run, of a microbatch of this program. Raises ValueError for any other microbatch."""
        if not self.first_microbatch <= microbatch < self._batch_starts[-1]:
            raise ValueError(
                f"microbatch {microbatch} is not in this program, whose microbatches are {self.first_microbatch} to {self._batch_starts[-1] - 1}"
            )
        return self.first_batch + bisect_right(self._batch_starts, microbatch) - 1

    def microbatches_of(self, batch: int) -> range:
        """The microbatches of a batch of this program. Raises ValueError for any other batch."""
        index = batch - self.first_batch
        if not 0 <= index < len(self.batches):
            raise ValueError(f"batch {batch} is not in this program, whose batches are {self.first_batch} to {self.first_batch + len(self.batches) - 1}")
        return range(self._batch_starts[index], self._batch_starts[index + 1])

    @property
    def entry_versions(self) -> tuple[int, ...]:
        """The weight versions alive at the start, ascending: 2bw enters with the newest and, if there is one, the version before it."""
        return self.weights.rule.entry_versions(self.first_batch)

    def with_rows(self, rows: Rows) -> Program:
        """The same program with other rows."""
        return replace(self, rows=rows)

    def to_csv(self) -> str:
        """The text form: what the program is, in leading `# key: value` lines, then one line of comma-separated instructions for each rank."""
        from megatron.pipeline.text import to_csv

        return to_csv(self)

    def to_torch_csv(self, *, communication: bool = False) -> str:
        """The text that torch.distributed.pipelining reads (see `megatron.pipeline.text`)."""
        from megatron.pipeline.text import to_torch_csv

        return to_torch_csv(self, communication=communication)

    @classmethod
    def from_csv(cls, text: str, **facts: object) -> Program:
        """Read the text form, or one of torch's compute-only CSV files (see `megatron.pipeline.text.from_csv`)."""
        from megatron.pipeline.text import from_csv

        return from_csv(text, **facts)


def shifted_row(row: Iterable[Instruction], *, microbatches: int, versions: int) -> Row:
    """The row with later microbatches and weight versions."""
    return tuple(
        Instruction(
            each.kind,
            each.stage,
            None if each.microbatch is None else each.microbatch + microbatches,
            None if each.version is None else each.version + versions,
            each.peer,
        )
        for each in row
    )
