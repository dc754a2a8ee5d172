"""What a pipeline program spans and by which rules: everything about it but its rows.

Microbatches, batches and weight versions are numbered on over the whole training run, so a program can begin anywhere
in a run, and it can span batches without a drain between. An order and the passes know the extent of the program that
they are making before there is one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from megatron.pipeline.program.edges import Edge, StageGraph, stages_of
from megatron.pipeline.program.instruction import BACKWARDS, RESIDENCY_WORDS, Instruction
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.move_order import Pairs
from megatron.pipeline.program.weight_policies import WeightPolicy


@dataclass(frozen=True)
class Extent:
    """Stages, batches and rules of a program, from a drained state to a drained state.

    Attributes:
        rank_of_stage: the rank of each stage.
        edges: which stages hand tensors to which; none: a chain.
        batches: number of microbatches of each batch that the program spans.
        weights: the weight policy.
        first_batch, first_microbatch: index, over the whole run, of its first batch and first microbatch.
        recompute: whether backwards are preceded by a recompute.
        not_recomputed: the stages at which they are not, though the program recomputes.
        tied_embeddings, data_parallel, global_norm: which links the update chain has.
        residency: weights live on the host, and how; None: on the device.
        unread: where the weights predict, for each stage how many backwards of a batch stand behind the prediction from
            it; empty where `provisional_microbatches` says how many each prediction reads.
        provisional_microbatches: of a batch, that each stage's prediction reads; None: all but the `unread` ones.
        reduce_partial: whether predictions read the sum over the replicas.
        forward_only: the program evaluates: forwards with the newest entry version, no backwards, no updates.
    """

    rank_of_stage: tuple[int, ...]
    batches: tuple[int, ...]
    weights: WeightPolicy
    first_batch: int = 0
    first_microbatch: int = 0
    edges: tuple[Edge, ...] = ()
    recompute: bool = False
    not_recomputed: tuple[int, ...] = ()
    tied_embeddings: bool = False
    data_parallel: bool = False
    global_norm: bool = True
    residency: Residency | None = None
    unread: tuple[int, ...] = ()
    provisional_microbatches: int | None = None
    reduce_partial: bool = False
    forward_only: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def num_microbatches(self) -> int:
        return sum(self.batches)

    # --- stages

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on a rank, ascending."""
        return stages_of(self.rank_of_stage, rank)

    @cached_property
    def graph(self) -> StageGraph:
        """The stages with their edges. Raises ValueError where these make no pipeline."""
        return StageGraph.of(self.num_stages, self.edges)

    @cached_property
    def pairs(self) -> Pairs:
        """Which stages exchange saved activations. Raises ValueError as `graph`."""
        return Pairs(tuple(self.rank_of_stage), self.graph.num_frozen)

    def crosses(self, stage: int, other: int) -> bool:
        """Whether both stages exist and live on different ranks, so that tensors between them are sent."""
        last = self.num_stages - 1
        return 0 <= stage <= last and 0 <= other <= last and self.rank_of_stage[stage] != self.rank_of_stage[other]

    def recomputes(self, stage: int) -> bool:
        """Whether backwards at the stage are preceded by a recompute."""
        return self.recompute and stage not in self.not_recomputed

    def is_frozen(self, rank: int) -> bool:
        """Whether no stage of a rank has backwards, in a program that trains."""
        return not self.forward_only and all(map(self.graph.is_forward_only, self.stages_of(rank)))

    def owners(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The stages of a rank, by what is updated at once: all of them, or each by itself."""
        stages = self.stages_of(rank)
        return tuple((stage,) for stage in stages) if self.weights.updates_alone else (stages,)

    def version_of_forward(self, stage: int, microbatch: int) -> int:
        """The version that the policy gives to a stage's forward of a microbatch, or of the one behind the last."""
        behind = max(self.first_microbatch, microbatch - self.graph.depth(stage))
        batch, newest = (self.first_batch + bisect_right(self._batch_starts, each) - 1 for each in (microbatch, behind))
        return self.weights.version_of(batch, newest=newest)

    def reduces_embeddings(self, rank: int) -> bool:
        """Whether a rank has a REDUCE_EMBED in each chain.

        The optimizer of a rank with both ends of tied embeddings adds up their gradients itself, unless one of them has
        left for the host long before it has the other.
        """
        ends = {self.rank_of_stage[0], self.rank_of_stage[-1]}
        apart = len(ends) > 1 or (self.residency is not None and self.num_stages > 1)
        return self.tied_embeddings and apart and rank in ends

    # --- batches

    @cached_property
    def _batch_starts(self) -> tuple[int, ...]:
        """First microbatch of each batch, and one past the last."""
        return tuple(accumulate(self.batches, initial=self.first_microbatch))

    def batch_of(self, microbatch: int) -> int:
        """The batch, over the whole run, of a microbatch of this program. Raises ValueError for any other."""
        first, end = self._batch_starts[0], self._batch_starts[-1]
        if not first <= microbatch < end:
            raise ValueError(f"microbatch {microbatch} is not in this program, which has {first} to {end - 1}")
        return self.first_batch + bisect_right(self._batch_starts, microbatch) - 1

    def interleaves_batches_in(self, row: Iterable[Instruction]) -> bool:
        """Whether a row has a backward of a batch, or a half of one, after one of a later batch."""
        newest = self.first_batch
        for instruction in row:
            if instruction.kind in BACKWARDS:
                batch = self.batch_of(instruction.microbatch)
                if batch < newest:
                    return True
                newest = batch
        return False

    def batch_served(self, instruction: Instruction) -> int:
        """The batch that an instruction belongs to: of its microbatch; else the one whose gradients make its version,
        but where weights live on the host, the one for which these come to the device.
        """
        if instruction.microbatch is not None:
            return self.batch_of(instruction.microbatch)
        return instruction.version - (instruction.kind not in RESIDENCY_WORDS)

    def microbatches_of(self, batch: int) -> range:
        """The microbatches of a batch of this program. Raises ValueError for any other batch."""
        first, end = self.first_batch, self.first_batch + len(self.batches)
        if not first <= batch < end:
            raise ValueError(f"batch {batch} is not in this program, which has {first} to {end - 1}")
        return range(self._batch_starts[batch - first], self._batch_starts[batch - first + 1])

    def num_read(self, stage: int, batch: int) -> int:
        """How many backwards of a batch the prediction from it reads at a stage: the first ones in its row."""
        if self.provisional_microbatches is not None:
            return self.provisional_microbatches
        return self.batches[batch - self.first_batch] - self.unread[stage]

    def reads_ties(self, stage: int) -> bool:
        """Whether a stage's predictions read a gradient of tied embeddings that another rank has a part of."""
        last = self.num_stages - 1
        return self.tied_embeddings and self.crosses(0, last) and stage in (0, last)

    def num_read_of_ties(self, batch: int) -> int:
        """The same for embeddings that the first and the last stage share: as many as both have."""
        return min(self.num_read(0, batch), self.num_read(self.num_stages - 1, batch))

    @property
    def entry_versions(self) -> tuple[int, ...]:
        """The weight versions alive at the start, ascending.

        The newest and, unless the run begins here, as many before it as the policy's delay: under 2bw one.
        """
        return self.weights.entry_versions(self.first_batch)
