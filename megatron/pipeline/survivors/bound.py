"""Lower bounds on the time of a batch on the ranks that are left, for any order of their computations.

A rank has all its computations to do. Before them it waits until the first microbatch has come through the stages
before it, and behind its last backward the gradient still has its way to the first stage. A rank that may hold few
microbatches waits longer:

- Before its first backward it begins at most as many forwards as it may hold microbatches, and this backward waits
  until its microbatch has been to the end of the pipeline and back.
- Behind its last forward it can only work on the other microbatches that it holds, until the gradient of that forward
  arrives.
- Each microbatch is held at least for its way to the end and back, and only a limited number is held at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.survivors.sharing import Sharing


def drained_bound(sharing: Sharing, costs: Costs, most_held: Sequence[int]) -> float:
    """Return a lower bound on the time of a drained batch, without its update, in seconds.

    Args:
        sharing: the ranks that are left.
        costs: the costs of the model's stages and edges.
        most_held: for each rank, the number of microbatches that it may hold, over its stages, or have moved away.
    """
    ways = _Ways(sharing, costs)
    return max(ways.alone, *(each.drained(ways, most) for each, most in zip(ways.loads, most_held, strict=True)))


def steady_bound(sharing: Sharing, costs: Costs, most_held: Sequence[int]) -> float:
    """Return a lower bound on the time of a batch in the steady state, in seconds. Arguments as for `drained_bound`."""
    loads = zip(_Ways(sharing, costs).loads, most_held, strict=True)
    return max(max(each.busy, each.held / most) for each, most in loads)


@dataclass(frozen=True)
class _Load:
    """The work of a rank in a batch; all times are in seconds.

    Attributes:
        counts: stage of the model -> number of microbatches.
        busy: the time of all computations.
        before_weights: the time of all computations but the halves W.
        held: the time for which a microbatch is held, summed over the microbatches.
        forward, recompute: the time of the longest forward, and of the longest recompute.
        between: the longest work on one microbatch behind its forward.
        between_before_weights: the same without its half W.
    """

    counts: Counter[int]
    busy: float
    before_weights: float
    held: float
    forward: float
    recompute: float
    between: float
    between_before_weights: float

    @classmethod
    def of(cls, ways: _Ways, taken: Iterable[_Taken]) -> _Load:
        """Return the work of a rank that takes these microbatches."""
        taken = list(taken)
        forwards = [ways.forward[each.stage] for each in taken]
        behind = [ways.recompute[each.stage] + each.backward for each in taken]
        weights = [each.weight for each in taken]
        return cls(
            counts=Counter(each.stage for each in taken),
            busy=sum(forwards) + sum(behind) + sum(weights),
            before_weights=sum(forwards) + sum(behind),
            held=sum(ways.back[each.stage] + each.backward + each.weight for each in taken),
            forward=max(forwards),
            recompute=max(ways.recompute[each.stage] for each in taken),
            between=max(map(sum, zip(behind, weights, strict=True))),
            between_before_weights=max(behind),
        )

    def drained(self, ways: _Ways, most_held: int) -> float:
        """Return the least time of a drained batch that this rank's work allows, in seconds."""
        stages, most_begun = self.counts, min(most_held, self.counts.total())
        begins = min(ways.head[stage] for stage in stages)
        first_gradient = min(ways.head[stage] + ways.back[stage] for stage in stages)
        idle = max(begins, first_gradient - most_begun * self.forward - self.recompute)
        later = later_before_weights = 0.0
        if self.counts.total() > most_held:  # so a backward stands before the last forward
            way = min(ways.back[stage] - ways.forward[stage] - ways.recompute[stage] for stage in stages)
            later = max(0.0, way - (most_held - 1) * self.between)
            later_before_weights = max(0.0, way - (most_held - 1) * self.between_before_weights)
        ends = min(ways.tail[stage] for stage in stages)
        return max(
            idle + self.busy + later,
            idle + self.before_weights + later_before_weights + ends,
            begins + self.held / most_held,
        )


class _Taken(NamedTuple):
    """A microbatch at a stage of the model, with the seconds of its backward, or of the halves I and W."""

    stage: int
    backward: float
    weight: float


class _Ways:
    """The least seconds of a microbatch on its way, for each stage of the model.

    Attributes:
        loads: the work of each rank that is left.
        forward, recompute: the time of a forward and of a recompute at the stage.
        head: the time before its forward at the stage.
        back: the time from the start of its forward to the start of its backward, or half I.
        tail: the time behind its backward, or half I.
        alone: the time of a whole batch of one microbatch.
    """

    def __init__(self, sharing: Sharing, costs: Costs) -> None:
        schedule = sharing.schedule
        num_stages, ranks, graph = schedule.num_stages, schedule.rank_of_stage, schedule.graph
        seconds, (to, fro, latency) = costs.seconds(num_stages), costs.edges(len(graph.edges))
        self.forward = seconds[Kind.FORWARD]
        self.recompute = [
            each * (schedule.recompute and schedule.recomputes(stage))
            for stage, each in enumerate(seconds[Kind.RECOMPUTE])
        ]
        self.head, self.back, self.tail = [0.0] * num_stages, [0.0] * num_stages, [0.0] * num_stages
        taken = _backwards(sharing, seconds)
        backward = [min(each.backward for each in of_stage) for of_stage in taken]
        numbered = list(enumerate(graph.edges))
        for at, edge in numbered:  # in the order of their sources
            crosses = ranks[edge.source] != ranks[edge.target]
            arrives = self.head[edge.source] + self.forward[edge.source] + crosses * (to[at] + latency[at])
            self.head[edge.target] = max(self.head[edge.target], arrives)
            if edge.gradient:
                ends = self.tail[edge.source] + backward[edge.source] + crosses * (fro[at] + latency[at])
                self.tail[edge.target] = max(self.tail[edge.target], ends)
        for stage in reversed(range(num_stages)):
            ways = [self.recompute[stage]]
            for at, edge in numbered:
                if edge.source == stage and edge.gradient:
                    there_and_back = (to[at] + fro[at] + 2 * latency[at]) * (ranks[stage] != ranks[edge.target])
                    ways.append(there_and_back + self.back[edge.target] + backward[edge.target])
            self.back[stage] = self.forward[stage] + max(ways)
        self.alone = max(
            self.head[stage] + self.back[stage] + backward[stage] + self.tail[stage] for stage in range(num_stages)
        )
        own, extent = sharing.stages, sharing.extent
        self.loads = [
            _Load.of(
                self,
                (
                    taken[own[stage][0]][position // sharing.num_replicas]
                    for stage in extent.stages_of(rank)
                    for position in extent.copies[stage].positions
                ),
            )
            for rank in range(len(sharing.ranks))
        ]


def _backwards(sharing: Sharing, seconds: Mapping[Kind, Sequence[float]]) -> list[list[_Taken]]:
    """Return for each stage of the model the backwards of a replica's microbatches, whole or in halves."""
    program = sharing.schedule.build((sharing.num_microbatches,))
    halved = {(each.stage, each.microbatch) for row in program.rows for each in row if each.kind is Kind.BACKWARD_INPUT}
    whole, first = seconds[Kind.BACKWARD], seconds[Kind.BACKWARD_INPUT]
    second = seconds[Kind.BACKWARD_WEIGHT]
    return [
        [
            _Taken(stage, first[stage], second[stage])
            if (stage, microbatch) in halved
            else _Taken(stage, whole[stage], 0.0)
            for microbatch in range(sharing.num_microbatches)
        ]
        for stage in range(program.num_stages)
    ]
