"""The surviving job as a program with copies of stages, which share the microbatches of lost ranks.

A job has d replicas of a pipeline. Each stage of the model lies on d ranks, and replica j takes the microbatches j,
j + d, j + 2d, ... of each batch. If rank r of replica k is lost, the ranks r of the other replicas, its *peers*, hold
the same weights. They take the microbatches of replica k at the stages of rank r, in turn, while the other ranks of
replica k go on (ReCycle, SOSP 2024, section 4):

    d = 3, p = 4, rank 2 of replica 1 is lost

    replica 0   0,0   0,1   0,2   0,3        microbatches 0 3 6 9
                           /   \\             microbatch 1
    replica 1   1,0   1,1         1,3        microbatches 1 4 7 10
                           \\   /             microbatch 4
    replica 2   2,0   2,1   2,2   2,3        microbatches 2 5 8 11
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megatron.documents import counted
from megatron.pipeline.program.copies import Copy, edges_of_copies
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import ENDS_BACKWARD, Kind
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule
from megatron.pipeline.simulate.costs import Costs


class ReplicaRank(NamedTuple):
    """A rank of a replica: the text form of rank 2 of replica 1 is 1.2."""

    replica: int
    rank: int

    @classmethod
    def parse(cls, text: str) -> ReplicaRank:
        """Read the text form. Raises ValueError for another text."""
        replica, dot, rank = text.partition(".")
        if not (dot and replica.isdecimal() and rank.isdecimal()):
            raise ValueError(f"{text!r} is no replica and pipeline rank, such as 1.2")
        return cls(int(replica), int(rank))

    def __str__(self) -> str:
        return f"{self.replica}.{self.rank}"


def in_order(lost: Iterable[ReplicaRank], num_replicas: int) -> tuple[int, ...]:
    """Return the order in which replicas begin a computation that all could begin: those with lost ranks come last.

    The search depends on this order and not on the names of replicas. Of the replicas with lost ranks, the one that has
    lost the earliest pipeline rank comes last: its peers have much to do before other ranks wait for them.
    """
    ranks_of: dict[int, list[int]] = {}
    for each in sorted(lost):
        ranks_of.setdefault(each.replica, []).append(each.rank)
    struck = sorted(ranks_of, key=lambda replica: (ranks_of[replica], replica))
    first = struck[0] if struck else 0
    whole = (each % num_replicas for each in range(first + 1, first + num_replicas + 1))
    return (*(each for each in whole if each not in ranks_of), *reversed(struck)) if struck else tuple(whole)


@dataclass(frozen=True)
class Sharing:
    """The ranks of a job that are left, and the microbatches that each of their stages takes.

    Attributes:
        schedule: the schedule of each replica while no rank is lost.
        num_microbatches: the number of microbatches of a replica in each batch.
        num_replicas: the data parallel degree.
        lost: the lost ranks.

    Raises:
        ValueError: a lost rank does not exist, or no replica is left that has its stages; or the schedule keeps
            weights on the host, predicts weights from the gradients of each replica alone, updates after each
            microbatch, has steps that do not wait for their norm, or has copies already.
    """

    schedule: PipelineSchedule
    num_microbatches: int
    num_replicas: int
    lost: frozenset[ReplicaRank]

    def __post_init__(self) -> None:
        schedule, weights = self.schedule, self.schedule.weights
        schedule.validate(self.num_microbatches)
        for each in sorted(self.lost):
            if not (0 <= each.replica < self.num_replicas and 0 <= each.rank < schedule.num_ranks):
                raise ValueError(
                    f"there is no rank {each}: the job has {counted(self.num_replicas, 'replica')} of "
                    f"{counted(schedule.num_ranks, 'rank')}, 0.0 to {self.num_replicas - 1}.{schedule.num_ranks - 1}"
                )
            if not self._alive(each.rank):
                stages = ", ".join(map(str, schedule.stages_of(each.rank)))
                raise ValueError(
                    f"every replica has lost rank {each.rank}, so nobody holds the weights of stage {stages}; restart "
                    "from the last checkpoint"
                )
        for refused, word, remedy in (
            (schedule.residency is not None, "keeps weights on the host", "keep them on the device"),
            (
                schedule.predicts_apart,
                f"predicts weights from the gradients of each replica alone ({weights.name})",
                "let predictions read the mean over the replicas, or take plain 2bw",
            ),
            (weights.batch_size is not None, f"updates after each microbatch ({weights.name})", "take 2bw or flush"),
            (weights.updates_alone, f"steps each stage by itself ({weights.name})", "take flush"),
            (schedule.optimistic, "has steps that do not wait for their norm", "drop --optimistic-steps"),
            (bool(schedule.num_frozen), "has frozen stages", "train all stages"),
            (bool(schedule.copies), "has copies of stages already", "begin with the schedule of one replica"),
        ):
            if refused:
                raise ValueError(f"a run cannot go on without a rank where its schedule {word}; {remedy}")

    def _alive(self, rank: int) -> list[int]:
        """Return the replicas whose rank is left."""
        return [each for each in range(self.num_replicas) if ReplicaRank(each, rank) not in self.lost]

    @cached_property
    def held_undisturbed(self) -> tuple[int, ...]:
        """The most microbatches that each rank of a replica holds, over its stages, while no rank is lost."""
        return self.schedule.max_saved_on_rank(self._settling_batches)

    @cached_property
    def begun_undisturbed(self) -> tuple[int, ...]:
        """The most microbatches that each rank of a replica has begun, held or moved away, while no rank is lost."""
        if not self.schedule.moves_activations:
            return self.held_undisturbed
        rows = self.schedule.build(self._settling_batches).rows
        changes = ([(each.kind is Kind.FORWARD) - (each.kind in ENDS_BACKWARD) for each in row] for row in rows)
        return tuple(max(accumulate(each)) for each in changes)

    @property
    def _settling_batches(self) -> tuple[int, ...]:
        return (self.num_microbatches,) * (1 + self.schedule.settling_batches)

    @cached_property
    def ranks(self) -> tuple[ReplicaRank, ...]:
        """The ranks that are left, in the order of the program's ranks: by pipeline rank, then by replica."""
        every = (ReplicaRank(replica, rank) for rank in range(self.schedule.num_ranks) for replica in self._alive(rank))
        return tuple(every)

    @property
    def batch_size(self) -> int:
        """The number of microbatches of a batch over all replicas."""
        return self.num_microbatches * self.num_replicas

    @cached_property
    def places(self) -> tuple[int, ...]:
        """For each replica, its place in the order in which replicas begin (see `in_order`)."""
        order = in_order(self.lost, self.num_replicas)
        return tuple(map(order.index, range(self.num_replicas)))

    def place(self, microbatch: int) -> int:
        """Return a microbatch's place in the order of the search, which is the same whichever replicas lost ranks."""
        index, replica = divmod(microbatch, self.num_replicas)
        return index * self.num_replicas + self.places[replica]

    @cached_property
    def takers(self) -> tuple[tuple[int, ...], ...]:
        """For each pipeline rank and each position in a batch, the replica that takes the microbatch there."""
        found, places = [], self.places
        for rank in range(self.schedule.num_ranks):
            alive, load = self._alive(rank), Counter[int]()
            takers = [0] * self.batch_size
            for position in sorted(range(self.batch_size), key=self.place):
                replica = position % self.num_replicas
                if replica not in alive:  # the peer that takes over the fewest; in turn if several do
                    own = places[replica]
                    replica = min(alive, key=lambda each: (load[each], (places[each] - own) % self.num_replicas))
                    load[replica] += 1
                takers[position] = replica
            found.append(tuple(takers))
        return tuple(found)

    @cached_property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """For each stage of the program, the stage of the model and the replica."""
        placed = enumerate(self.schedule.rank_of_stage)
        return tuple((stage, replica) for stage, rank in placed for replica in self._alive(rank))

    @cached_property
    def number_of(self) -> dict[tuple[int, int], int]:
        """Stage of the model and replica -> stage of the program."""
        return {stage: number for number, stage in enumerate(self.stages)}

    @cached_property
    def model_edges(self) -> tuple[Edge, ...]:
        return self.schedule.graph.edges

    @cached_property
    def extent(self) -> Extent:
        """The extent of one batch of the surviving job's program."""
        schedule = self.schedule
        rank_of_stage, number_of_rank = schedule.rank_of_stage, {each: at for at, each in enumerate(self.ranks)}
        copies = tuple(
            Copy(stage, tuple(at for at, taker in enumerate(self.takers[rank_of_stage[stage]]) if taker == replica))
            for stage, replica in self.stages
        )
        recomputed = [schedule.recompute and schedule.recomputes(stage) for stage, _ in self.stages]
        return Extent(
            rank_of_stage=tuple(
                number_of_rank[ReplicaRank(replica, rank_of_stage[stage])] for stage, replica in self.stages
            ),
            batches=(self.batch_size,),
            weights=schedule.weights,
            edges=edges_of_copies(copies, self.model_edges),
            recompute=schedule.recompute,
            not_recomputed=tuple(at for at, each in enumerate(recomputed) if schedule.recompute and not each),
            tied_embeddings=schedule.tied_embeddings,
            tied_stage=schedule.tied_stage,
            data_parallel=schedule.data_parallel or self.num_replicas > 1,
            copies=copies,
            **self._predictions,
        )

    @property
    def _predictions(self) -> dict[str, object]:
        """What predictions read: the same microbatches of the batch as the predictions of all replicas together."""
        schedule, num_replicas = self.schedule, self.num_replicas
        if not schedule.weights.predicts:
            return {}
        if schedule.provisional_microbatches is not None:
            read = {"provisional_microbatches": schedule.provisional_microbatches * num_replicas}
        else:
            unread = schedule.remaining_backwards(self.num_microbatches)
            read = {"unread": tuple(unread[stage] * num_replicas for stage, _ in self.stages)}
        return {**read, "reduce_partial": schedule.reduce_partial}

    def extent_of(self, num_batches: int) -> Extent:
        """Return the extent of several batches."""
        return replace(self.extent, batches=(self.batch_size,) * num_batches)

    def costs(self, costs: Costs) -> Costs:
        """Return the costs of the surviving job's stages and edges, from those of the model's stages and edges.

        Raises ValueError for costs of another number of stages or edges.
        """
        costs.seconds(self.schedule.num_stages)
        costs.edges(len(self.model_edges))
        extent, number = self.extent, {(each.source, each.target): at for at, each in enumerate(self.model_edges)}
        stage_of = [stage for stage, _ in self.stages]
        edges = [number[stage_of[each.source], stage_of[each.target]] for each in extent.graph.edges]
        of_edges = ("latency", "bandwidth", "forward_bytes", "backward_bytes")

        def spread(name: str, value: object) -> object:
            places = edges if name in of_edges else stage_of
            return tuple(value[at] for at in places) if isinstance(value, Sequence) else value

        spread_out = {name: spread(name, value) for name, value in vars(costs).items()}
        others = {name: spread(name, value) for name, value in costs.others.items()}
        return replace(costs, **{**spread_out, "others": others})
