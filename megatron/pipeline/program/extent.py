"""The extent of a pipeline program: its stages, batches and rules, which is everything but its rows.

Microbatches, batches and weight versions are numbered over the whole training run. So a program can begin anywhere in a
run, and it can span several batches without a drain between them. An order and the passes make a program in steps, and
need its extent before its rows are complete.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megatron.pipeline.program.copies import Copy, graph_of_copies, pair_stages_of, taken_of
from megatron.pipeline.program.edges import Edge, StageGraph, stages_of
from megatron.pipeline.program.instruction import BACKWARDS, RESIDENCY_WORDS, Instruction
from megatron.pipeline.program.lane_order import Pairs, Residency
from megatron.pipeline.program.weight_policies import WeightPolicy


class Stages:
    """The properties of a program or a timeline that follow from its `rank_of_stage`, `edges` and `copies`."""

    rank_of_stage: tuple[int, ...]
    edges: tuple[Edge, ...]
    copies: tuple[Copy, ...]

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that live on a rank, ascending."""
        return stages_of(self.rank_of_stage, rank)

    @cached_property
    def graph(self) -> StageGraph:
        """The stages with their edges. Raises ValueError if the edges make no pipeline."""
        if self.copies:
            return graph_of_copies(self.copies, self.num_stages, self.edges)
        return StageGraph.of(self.num_stages, self.edges)

    @cached_property
    def pairs(self) -> Pairs:
        """The pairs of stages that exchange saved activations. Raises ValueError as `graph` does."""
        return Pairs(tuple(self.rank_of_stage), self.graph.num_frozen, pair_stages_of(self.copies))


class Tied:
    """The properties of a program or a schedule that follow from its tied embeddings."""

    rank_of_stage: tuple[int, ...]
    tied_embeddings: bool
    tied_stage: int | None

    @property
    def tied_stages(self) -> tuple[int, ...]:
        """The stages that share an embedding if embeddings are tied: two, or all copies of two."""
        return 0, len(self.rank_of_stage) - 1 if self.tied_stage is None else self.tied_stage

    @property
    def tied_ranks(self) -> tuple[int, ...]:
        """The ranks of `tied_stages`."""
        return tuple(self.rank_of_stage[stage] for stage in self.tied_stages)

    @property
    def ties_are_apart(self) -> bool:
        """Whether `tied_stages` lie on two ranks."""
        return len({*self.tied_ranks}) > 1

    @property
    def ties_ranks(self) -> bool:
        """Whether two ranks share an embedding."""
        return self.tied_embeddings and self.ties_are_apart


class Predicting:
    """The properties of a program or a schedule that follow from its predicted weights."""

    weights: WeightPolicy
    provisional_microbatches: int | None
    reduce_partial: bool

    @property
    def predicts_apart(self) -> bool:
        """Whether each replica predicts from its own gradients alone, so that predicted weights differ by replica."""
        return self.weights.predicts and self.provisional_microbatches != 0 and not self.reduce_partial


class Kept(NamedTuple):
    """A position in each batch whose microbatch a stage does not recompute, although it recomputes others."""

    stage: int
    position: int

    @classmethod
    def parse(cls, text: str) -> Kept:
        """Read the text form, such as 0.3. Raises ValueError for another text."""
        stage, dot, position = text.partition(".")
        if not (dot and stage.isdecimal() and position.isdecimal()):
            raise ValueError(f"{text!r} is no stage and position in a batch, such as 0.3")
        return cls(int(stage), int(position))

    def __str__(self) -> str:
        return f"{self.stage}.{self.position}"


@dataclass(frozen=True)
class Extent(Stages, Tied, Predicting):
    """Stages, batches and rules of a program, from a drained state to a drained state.

    Attributes:
        rank_of_stage: the rank of each stage.
        batches: the number of microbatches of each batch of the program.
        weights: the weight policy.
        first_batch, first_microbatch: the numbers, counted over the whole run, of the first batch and microbatch.
        edges: which stages hand tensors to which; empty: the stages (with copies, the model's stages) form a chain.
        recompute: whether a recompute precedes each backward.
        not_recomputed: the stages without recompute in a program that recomputes.
        kept: the microbatches without recompute at the other stages.
        tied_embeddings, data_parallel, global_norm: whether the update chain has to reduce over tied embeddings, over
            replicas, and for a global norm.
        tied_stage: the stage that shares the first one's embedding; None: the last.
        residency: how the program keeps its weights on the host; None: they live on the device.
        unread: if the weights predict, for each stage the number of backwards of a batch that stand after the
            prediction from that batch; empty if `provisional_microbatches` gives the number that each prediction reads.
            With copies, those of all copies of the stage.
        provisional_microbatches: the number of microbatches of a batch that the prediction of every stage reads; 0: a
            prediction takes the last update again; None: all but the `unread` ones. With copies, over all copies.
        reduce_partial: whether predictions read the sum of the gradients over the replicas.
        forward_only: the program evaluates: it has forwards at the newest entry version, no backwards and no updates.
        copies: of which stage of the model each stage is a copy, and which microbatches it takes; empty: each stage is
            a stage of the model, and takes all. With copies, `tied_stage` is a stage of the model.
        optimistic: each rank steps before the norm of all gradients is known, as if the norm clipped nothing, and
            VALIDATEs the step in the next batch.
    """

    rank_of_stage: tuple[int, ...]
    batches: tuple[int, ...]
    weights: WeightPolicy
    first_batch: int = 0
    first_microbatch: int = 0
    edges: tuple[Edge, ...] = ()
    recompute: bool = False
    not_recomputed: tuple[int, ...] = ()
    kept: tuple[Kept, ...] = ()
    tied_embeddings: bool = False
    tied_stage: int | None = None
    data_parallel: bool = False
    global_norm: bool = True
    residency: Residency | None = None
    unread: tuple[int, ...] = ()
    provisional_microbatches: int | None = None
    reduce_partial: bool = False
    forward_only: bool = False
    copies: tuple[Copy, ...] = ()
    optimistic: bool = False

    @property
    def num_microbatches(self) -> int:
        return sum(self.batches)

    # --- stages

    def crosses(self, stage: int, other: int) -> bool:
        """Whether both stages exist and live on different ranks."""
        last = self.num_stages - 1
        return 0 <= stage <= last and 0 <= other <= last and self.rank_of_stage[stage] != self.rank_of_stage[other]

    def recomputes(self, stage: int) -> bool:
        """Whether a recompute precedes each backward of the stage, except for the `kept` microbatches."""
        return self.recompute and stage not in self.not_recomputed

    def keeps(self, stage: int) -> frozenset[int]:
        """Return the positions in a batch of the microbatches that the stage keeps although it recomputes others."""
        return self._kept_positions.get(stage, frozenset())

    @cached_property
    def _kept_positions(self) -> dict[int, frozenset[int]]:
        stages = {each.stage for each in self.kept}
        return {stage: frozenset(at for each, at in self.kept if each == stage) for stage in stages}

    def is_recomputed(self, stage: int, microbatch: int) -> bool:
        """Whether a recompute precedes the backward of a microbatch at a stage. Raises ValueError as `batch_of`."""
        if not self.recomputes(stage):
            return False
        kept = self._kept_positions.get(stage)
        return kept is None or microbatch - self.microbatches_of(self.batch_of(microbatch)).start not in kept

    @property
    def tied_stages(self) -> tuple[int, ...]:
        if not self.copies:
            return super().tied_stages
        ends = {0, self._last_tied}
        return tuple(stage for stage, copy in enumerate(self.copies) if copy.stage in ends)

    @property
    def ties_are_apart(self) -> bool:
        if not self.copies:
            return super().ties_are_apart
        first, other = (
            {rank for rank, copy in zip(self.rank_of_stage, self.copies, strict=True) if copy.stage == end}
            for end in (0, self._last_tied)
        )
        return first != other

    @property
    def _last_tied(self) -> int:
        """The stage of the model that shares the embedding of stage 0, with copies."""
        return max(copy.stage for copy in self.copies) if self.tied_stage is None else self.tied_stage

    def takes(self, stage: int, microbatch: int) -> bool:
        """Whether a stage takes a microbatch of this program; if not, another copy of the stage takes it."""
        return not self.copies or microbatch - self.first_microbatch in self._taken[stage]

    def carries(self, stage: int, other: int, microbatch: int) -> bool:
        """Whether two stages with an edge between them exchange the tensors of a microbatch: both take it."""
        return self.takes(stage, microbatch) and self.takes(other, microbatch)

    def num_taken(self, stage: int, batch: int) -> int:
        """Return how many microbatches of a batch a stage takes. Raises ValueError as `microbatches_of`."""
        microbatches = self.microbatches_of(batch)
        if not self.copies:
            return len(microbatches)
        taken, first = self._indexes_taken[stage], microbatches.start - self.first_microbatch
        return bisect_left(taken, first + len(microbatches)) - bisect_left(taken, first)

    def indexes_taken(self, stage: int) -> Sequence[int]:
        """Return the microbatches that a stage takes, counted from the program's first one, ascending."""
        return self._indexes_taken[stage] if self.copies else range(self.num_microbatches)

    @cached_property
    def _indexes_taken(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(each)) for each in self._taken)

    @cached_property
    def _taken(self) -> tuple[frozenset[int], ...]:
        return taken_of(self.copies, self.batches)

    def trained_stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank that have backwards, ascending."""
        return tuple(stage for stage in self.stages_of(rank) if not self.graph.is_forward_only(stage))

    def is_frozen(self, rank: int) -> bool:
        """Whether the program trains and all stages of the rank are forward-only."""
        return not self.forward_only and all(map(self.graph.is_forward_only, self.stages_of(rank)))

    def owners(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the stages of a rank, grouped by common update: one group, or one group for each stage."""
        stages = self.stages_of(rank)
        return tuple((stage,) for stage in stages) if self.weights.updates_alone else (stages,)

    def version_of_forward(self, stage: int, microbatch: int) -> int:
        """Return the version that the policy gives to the forward of a microbatch at a stage.

        The microbatch may also be the first one after this program.
        """
        behind = max(self.first_microbatch, microbatch - self.graph.depth(stage))
        batch, newest = (self.first_batch + bisect_right(self._batch_starts, each) - 1 for each in (microbatch, behind))
        return self.weights.version_of(batch, newest=newest)

    def reduces_embeddings(self, rank: int) -> bool:
        """Whether a rank has a REDUCE_EMBED in each chain.

        The optimizer of a rank with both ends of tied embeddings adds up their gradients itself. With weights on the
        host it cannot: the gradient of one end has gone to the host long before the other gradient exists.
        """
        on_host = self.tied_embeddings and self.residency is not None and self.num_stages > 1
        return (self.ties_ranks or on_host) and rank in self.tied_ranks

    # --- batches

    @cached_property
    def _batch_starts(self) -> tuple[int, ...]:
        """The first microbatch of each batch, and the first one after this program."""
        return tuple(accumulate(self.batches, initial=self.first_microbatch))

    def batch_of(self, microbatch: int) -> int:
        """Return the batch, counted over the whole run, of a microbatch. Raises ValueError outside this program."""
        first, end = self._batch_starts[0], self._batch_starts[-1]
        if not first <= microbatch < end:
            raise ValueError(f"microbatch {microbatch} is not in this program, which has {first} to {end - 1}")
        return self.first_batch + bisect_right(self._batch_starts, microbatch) - 1

    def interleaves_batches_in(self, row: Iterable[Instruction]) -> bool:
        """Whether a row has a backward, or a half of a backward, after a backward of a later batch."""
        newest = self.first_batch
        for instruction in row:
            if instruction.kind in BACKWARDS:
                batch = self.batch_of(instruction.microbatch)
                if batch < newest:
                    return True
                newest = batch
        return False

    def batch_served(self, instruction: Instruction) -> int:
        """Return the batch that an instruction belongs to.

        With a microbatch, this is the batch of the microbatch. An update of version v belongs to batch v-1, whose
        gradients make the version. FETCH and FREE of version v belong to batch v, which uses the version.
        """
        if instruction.microbatch is not None:
            return self.batch_of(instruction.microbatch)
        return instruction.version - (instruction.kind not in RESIDENCY_WORDS)

    def microbatches_of(self, batch: int) -> range:
        """Return the microbatches of a batch. Raises ValueError for a batch outside this program."""
        first, end = self.first_batch, self.first_batch + len(self.batches)
        if not first <= batch < end:
            raise ValueError(f"batch {batch} is not in this program, which has {first} to {end - 1}")
        return range(self._batch_starts[batch - first], self._batch_starts[batch - first + 1])

    def num_read(self, stage: int, batch: int) -> int:
        """Return how many microbatches of a batch the prediction from that batch reads at a stage: the first ones.

        Where stages are copies, the copies of a stage share them out (`num_read_here`).
        """
        if self.provisional_microbatches is not None:
            return self.provisional_microbatches
        return self.batches[batch - self.first_batch] - self.unread[stage]

    def num_read_here(self, stage: int, batch: int, num_read: int | None = None) -> int:
        """Return how many of the first `num_read` microbatches of a batch a stage takes; None: of those of `num_read`.

        The backwards of these are the stage's first ones of the batch in the row.
        """
        num_read = self.num_read(stage, batch) if num_read is None else num_read
        if not self.copies:
            return num_read
        taken, first = self._indexes_taken[stage], self.microbatches_of(batch).start - self.first_microbatch
        return bisect_left(taken, first + num_read) - bisect_left(taken, first)

    def num_held(self, word: Instruction) -> int:
        """Return of how many microbatches, over all copies, a word keeps gradients (all, or those of embeddings)."""
        batch, keeps_all = word.version - 1, word.kind.row.keeps == "gradients"
        return self.num_read(word.stage, batch) if keeps_all else self.num_read_of_ties(batch)

    @property
    def says_what_predictions_read(self) -> bool:
        return self.provisional_microbatches is not None or bool(self.unread)

    def require_what_predictions_read(self) -> None:
        """Raise ValueError unless each rank has one stage whose predictions read a part of each batch, as said here."""
        num_stages = len(self.rank_of_stage)
        if len({*self.rank_of_stage}) < num_stages:
            raise ValueError(f"{self.weights.name} predicts for one stage on each rank: give each rank one stage")
        if self.provisional_microbatches is None and len(self.unread) != num_stages:
            raise ValueError(
                f"weights {self.weights.name}: say provisional_microbatches, or unread for each of {num_stages} stages"
            )
        for batch, size in enumerate(self.batches, self.first_batch):
            for stage in range(num_stages):
                num_read = self.num_read(stage, batch)
                if not 0 <= num_read <= size:
                    raise ValueError(
                        f"the prediction from batch {batch} reads {num_read} of {size} microbatches at stage {stage}; "
                        f"give 0 to {size}"
                    )
                if self.reduce_partial and num_read == 0:
                    raise ValueError(
                        f"the prediction from batch {batch} reads no microbatch at stage {stage}, so nothing is "
                        "reduced; leave out reduce_partial, or let it read 1 or more"
                    )

    def reads_ties(self, stage: int) -> bool:
        """Whether the predictions of a stage read a tied-embedding gradient to which another rank contributes."""
        return self.provisional_microbatches != 0 and self.ties_ranks and stage in self.tied_stages

    def num_read_of_ties(self, batch: int) -> int:
        """Return how many microbatches of a batch predictions of tied embeddings read: the smaller of both ends."""
        return min(self.num_read(stage, batch) for stage in self.tied_stages)

    @property
    def entry_versions(self) -> tuple[int, ...]:
        """The weight versions that are alive at the start, ascending.

        These are the newest version and, unless the run begins here, the `delay` versions before it: one under 2bw.
        """
        return self.weights.entry_versions(self.first_batch)
