"""How long rows take, without lowering them to a program: the longest path through their events.

Each computation, move, reduction and update is an event. It ends its own time after the latest of the events that it
waits for: the one before it on its rank, what brings its input or gradient, the moves that make room for it, the
reductions of its version. Who waits for whom depends on no time, so the graph of a schedule is found once, in an order
in which all that an event waits for stands before it; on any costs its ends then are one loop. This is the folded form
of `megatron.pipeline.graph`, and a test holds both against each other to the last digit. What a search saves is the
program: versions and transfers.

A transfer is no event of its own. It starts when its tensor is made, its receive is posted (before the computation that
precedes the one that needs it, see `passes.communication`) and its channel is free, and belongs to the computation that
waits for it.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

from megatron.pipeline.graph.execution import START, Execution, Take
from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.program.instruction import (
    BEGINS_BACKWARD,
    COMPUTATIONS,
    EVICTIONS,
    MOVES,
    REDUCTIONS,
    SHARED_REDUCTIONS,
    Instruction,
    Kind,
    Tensor,
)
from megatron.pipeline.program.move_order import awaited_moves
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.passes import Segment, Segments
from megatron.pipeline.simulate.costs import Costs

_NONE = -1  # no channel, no tensor
_TENSORS = tuple(Tensor)


@dataclass(frozen=True)
class EventGraph:
    """The events of the rows of a schedule.

    Attributes:
        num_stages: of the schedule.
        crossing: whether an edge between two stages lies between two ranks.
        events: columns of the event before each on its rank, what it takes (an index of `takes`), the event that makes
            its tensor, that behind which the receive of this stands, the channel, and what else it waits for. An event
            stands behind all that it waits for; the first is number 1.
        takes: what events take.
        last: of each rank, its last computation or update.
        shared: (kind, version) of each reduction that several ranks share -> its event.
        own: (kind, rank, version) of each update and each reduction that predictions wait for -> its event.
        done: by microbatch, the event of the first stage's backward.
        counts: of each rank, how often it has each computation of a stage.
    """

    num_stages: int
    crossing: tuple[bool, ...]
    events: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[tuple[int, ...]]]
    takes: tuple[Take, ...]
    last: tuple[int, ...]
    shared: Mapping[tuple[Kind, int], int]
    own: Mapping[tuple[Kind, int, int], int]
    done: tuple[int, ...]
    counts: tuple[Counter[tuple[Kind, int]], ...]

    @staticmethod
    def of(schedule: Schedule, batches: Sequence[int]) -> EventGraph:
        """The graph of some batches, from a drained state to a drained state. The schedule `has_event_graph`."""
        return _FoldedExecution(schedule, schedule.segments_without_transfers(batches), sum(batches)).graph()

    def seconds(self, costs: Costs) -> float:
        """The end of the last computation or update. Transfers run beside computations."""
        ends = self.ends(costs)
        return max(ends[each] for each in self.last)

    def ends(self, costs: Costs) -> Sequence[float]:
        """When each event ends; the first one is that before all others, at 0."""
        clock = _Clock(self, costs, START)
        clock.run(len(self.events[0]))
        return clock.ends

    def returns(self, costs: Costs, since: int, until: Sequence[int]) -> list[float]:
        """How long after the event `since` each of these ends, for nothing but that one: minus infinity if it does not
        wait for it, or only by way of those before it in `until`, which ascends."""
        clock, found = _Clock(self, costs, since), []
        for event in until:
            clock.run(event)
            found.append(clock.ends[event])
            clock.ends[event] = -math.inf
        return found

    def channels(self, costs: Costs) -> tuple[list[float], list[float]]:
        """Occupation and latency of each channel: two for each edge, forward and backward."""
        occupations, latencies = [], []
        for forward, backward, latency, crosses in zip(*costs.edges(self.num_stages - 1), self.crossing, strict=True):
            occupations += [forward * crosses, backward * crosses]
            latencies += [latency * crosses] * 2
        return occupations, latencies


class _Clock:
    """Events that end, one after another.

    Attributes:
        ends: of the events so far. That of `since` ends at 0, and what is before it never.
    """

    def __init__(self, graph: EventGraph, costs: Costs, since: int) -> None:
        of_kind = costs.seconds(graph.num_stages)
        self._events = graph.events
        self._takes = [
            (max if kind in SHARED_REDUCTIONS else math.fsum)([of_kind[kind][each] for each in stages])
            for kind, stages in graph.takes
        ]
        self._occupation, self._latency = graph.channels(costs)
        self._free_at = [-math.inf if since else 0.0] * len(self._occupation)
        self.ends = [-math.inf] * since + [0.0]

    def run(self, until: int) -> None:
        """All up to this event, which is included."""
        takes, occupation, latency, free_at = self._takes, self._occupation, self._latency, self._free_at
        ends, add = self.ends, self.ends.append
        columns = [each[len(ends) - 1 : until] for each in self._events]
        for before, duration, source, posted, channel, others in zip(*columns, strict=True):
            time = ends[before]
            made = ends[source]
            if channel >= 0:
                if ends[posted] > made:
                    made = ends[posted]
                if free_at[channel] > made:
                    made = free_at[channel]
                free_at[channel] = made = made + occupation[channel]
                made += latency[channel]
            if made > time:
                time = made
            for other in others:
                if ends[other] > time:
                    time = ends[other]
            add(time + takes[duration])


def has_event_graph(schedule: Schedule) -> bool:
    """Whether its rows can be timed without lowering: a chain of trained stages that step together, with nothing on the
    host and no recomputations of its own.
    """
    host = schedule.residency is not None or schedule.recompute
    return not (host or schedule.edges or schedule.num_frozen or schedule.weights.updates_alone)


_Meaning = tuple[int, int, int, int]
"""Of the computations of a kind at a stage: what they take; where among all tensors the one is that microbatch 0 needs,
and the one that it makes; the channel of the former. -1: there is none."""


class _FoldedExecution(Execution):
    """The execution of rows that are not lowered: the transfer of a tensor belongs to the computation that needs it."""

    def __init__(self, schedule: Schedule, segments_of_rank: Sequence[Segments], num_microbatches: int) -> None:
        self._schedule, self._segments, self._num_microbatches = schedule, segments_of_rank, num_microbatches
        self._stages = stages_by_rank(schedule.rank_of_stage)
        self._events = (*(array("l") for _ in range(5)), [])
        self._made = [START] * (len(_TENSORS) * schedule.num_stages * num_microbatches)  # events; START: none yet
        self._waiting: dict[int, int] = {}  # what is to be made -> the rank that waits for it
        self._shared: dict[tuple[Kind, int], int] = {}
        self._own: dict[tuple[Kind, int, int], int] = {}
        self._done: dict[int, int] = {}  # microbatch -> event
        self._last = [START] * schedule.num_ranks
        super().__init__(schedule.num_ranks, schedule.pairs, chain.from_iterable(map(_row, segments_of_rank)))

    def graph(self) -> EventGraph:
        self.reach([0] * self._schedule.num_ranks)
        unfinished = [rank for rank, (_, wait) in enumerate(self.waits) if wait is not None]
        assert not unfinished, f"ranks {unfinished} wait for what never comes"
        self.close()
        ranks = self._schedule.rank_of_stage
        return EventGraph(
            self._schedule.num_stages,
            tuple(one != other for one, other in pairwise(ranks)),
            self._events,
            tuple(self.takes),
            tuple(self._last),
            self._shared,
            self._own,
            tuple(event for _, event in sorted(self._done.items())),
            self._counts(),
        )

    def _counts(self) -> tuple[Counter[tuple[Kind, int]], ...]:
        found: list[Counter[tuple[Kind, int]]] = [Counter() for _ in self._stages]
        times = Counter(self._events[1])
        for (kind, stages), index in self.takes.items():
            if kind in COMPUTATIONS:
                found[self._schedule.rank_of_stage[stages[0]]][kind, stages[0]] = times[index]
        return tuple(found)

    def _run(self, rank: int) -> Iterator[tuple[int, object]]:
        """Add the events of a rank."""
        made, waiting, meanings, queue = self._made, self._waiting, {}, self.moves[rank]
        awaited = awaited_moves(_row(self._segments[rank])) if any(map(_evicts, self._segments[rank])) else {}
        now, position = START, -1
        for segment in self._segments[rank]:
            begins = before = None  # behind which event receives stand: of this computation and of the one before
            for instruction in segment:
                position += 1
                kind, stage = instruction.kind, instruction.stage
                if kind not in COMPUTATIONS:
                    if kind in MOVES:
                        self._request(rank, position, instruction, now)
                    elif kind in REDUCTIONS:
                        self._post(rank, position, instruction, now)
                    else:
                        version = instruction.version
                        while self.pending[rank][version]:
                            self.awaits_reductions[rank] = True
                            yield position, version
                        reduced = self.reduced[rank].get(version, [START])[-1:]
                        now = self._add(now, self._take(kind, self._stages[rank]), tuple(reduced))
                        self._own[kind, rank, version] = now
                    continue
                meaning = meanings.get((kind, stage))
                if meaning is None:
                    meaning = meanings[kind, stage] = self._meaning(kind, stage)
                takes, needs, makes, channel = meaning
                begins = now if begins is None else begins
                source, posted, others = START, START, ()
                if kind.row.needs is not None:
                    if needs != _NONE:
                        needs += instruction.microbatch
                        while made[needs] == START:
                            waiting[needs] = rank
                            yield position, needs
                        source = made[needs]
                    if channel != _NONE:
                        posted = begins if before is None else before
                    before, begins = begins, None
                if position in awaited:
                    needed = awaited[position]
                    while len(queue.nodes) < needed:
                        queue.num_awaited = needed
                        yield position, queue
                    others = (queue.nodes[needed - 1],)
                now = self._add(now, takes, others, source, posted, channel)
                if stage == 0 and kind in BEGINS_BACKWARD:
                    self._done[instruction.microbatch] = now
                if makes != _NONE:
                    makes += instruction.microbatch
                    made[makes] = now
                    if makes in waiting:
                        self.runnable.append(waiting.pop(makes))
        self._last[rank] = now
        yield position + 1, None

    def _meaning(self, kind: Kind, stage: int) -> _Meaning:
        word, places, channel = kind.row, [], _NONE
        maker = stage + (1 if kind in BEGINS_BACKWARD else -1)
        for tensor, of_stage in ((word.needs, maker), (word.makes, stage)):
            known = tensor is not None and 0 <= of_stage < self._schedule.num_stages
            place = _TENSORS.index(tensor) * self._schedule.num_stages + of_stage if known else _NONE
            places.append(place * self._num_microbatches if known else _NONE)
        ranks = self._schedule.rank_of_stage
        if places[0] != _NONE and ranks[maker] != ranks[stage]:
            channel = 2 * min(maker, stage) + (kind in BEGINS_BACKWARD)
        return self._take(kind, (stage,)), *places, channel

    def _add(
        self,
        before: int,
        take: int,
        others: tuple[int, ...] = (),
        source: int = START,
        posted: int = START,
        channel: int = _NONE,
    ) -> int:
        befores, durations, sources, receives, channels, awaited = self._events
        befores.append(before)
        durations.append(take)
        sources.append(source)
        receives.append(posted)
        channels.append(channel)
        awaited.append(others)
        return len(befores)

    def _place(self, rank: int, position: int, instruction: Instruction, node: int) -> None:
        if instruction.kind in SHARED_REDUCTIONS:
            self._shared[instruction.kind, instruction.version] = node
        elif instruction.kind is Kind.REDUCE_PARTIAL:
            self._own[instruction.kind, rank, instruction.version] = node

    def _stages_of(self, reduction: Instruction) -> tuple[int, ...]:
        return self._stages[self._schedule.rank_of_stage[reduction.stage]]


def _evicts(segment: Segment) -> bool:
    return any(each.kind in EVICTIONS for each in segment)


def _row(segments: Segments) -> Iterator[Instruction]:
    """All that a rank does."""
    return (each for segment in segments for each in segment)


@lru_cache(maxsize=256)
def event_graph(schedule: Schedule, batches: tuple[int, ...]) -> EventGraph:
    """The same graph for whoever asks again."""
    return EventGraph.of(schedule, batches)
