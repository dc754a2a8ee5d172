"""A pipeline program: what every rank does, over one or more batches.

Rows hold one rank's instructions in order, without bubbles: time is the simulator's and the runtime's business. Microbatches, batches and weight
versions are numbered on over the whole training run, so a program can begin anywhere in a run and span batches without a drain between.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate

from megatron.pipeline.instruction import Instruction


class WeightPolicy(str, Enum):
    """Which weights a batch uses: `flush` one version; `2bw` two, delay 1; `stash` PipeDream's, one update per microbatch."""

    FLUSH = "flush"
    TWO_BW = "2bw"
    STASH = "stash"


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
    """

    rows: tuple[tuple[Instruction, ...], ...]
    rank_of_stage: tuple[int, ...]
    batches: tuple[int, ...]
    weights: WeightPolicy
    first_batch: int = 0
    first_microbatch: int = 0
    recompute: bool = False
    tied_embeddings: bool = False
    data_parallel: bool = False
    global_norm: bool = True

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
        """The microbatches of a batch of this program."""
        index = batch - self.first_batch
        if not 0 <= index < len(self.batches):
            raise ValueError(f"batch {batch} is not in this program, whose batches are {self.first_batch} to {self.first_batch + len(self.batches) - 1}")
        return range(self._batch_starts[index], self._batch_starts[index + 1])

    @property
    def entry_versions(self) -> tuple[int, ...]:
        """The weight versions alive at the start: 2bw enters with the newest and, if there is one, the version before it."""
        if self.weights is WeightPolicy.TWO_BW and self.first_batch > 0:
            return (self.first_batch - 1, self.first_batch)
        return (self.first_batch,)
