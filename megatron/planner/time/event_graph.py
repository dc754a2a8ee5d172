"""The time of a schedule's rows without lowering them to a program: the longest path through their events.

Each computation, move, reduction and update is an event. An event waits for the event before it on its rank, the event
that makes its input or gradient, the moves that make room for it, and the reductions of its version. It starts when the
latest of these ends. The dependencies do not depend on costs, so the graph of a schedule is built once. Every event
stands behind all events for which it waits, so the ends of all events under any costs follow in one loop. This is the
folded form of `megatron.pipeline.graph`, and a test requires both to agree to the last digit. A search saves the time
to build the program with its versions and transfers.

A transfer is no separate event. It belongs to the computation that waits for it. The transfer starts when its tensor is
made, its receive is posted and its channel is free. The receive is posted before the computation that precedes the
waiting one (see `passes.communication`).
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
    AWAITS_REDUCTIONS,
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
from megatron.pipeline.program.lane_order import awaited_moves
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.passes import Segment, Segments
from megatron.pipeline.simulate.costs import Costs

_NONE = -1  # no channel, no tensor
_TENSORS = tuple(Tensor)


@dataclass(frozen=True)
class EventGraph:
    """The events of the rows of a schedule.

    Attributes:
        num_stages: number of stages of the schedule.
        crossing: by edge between two stages, whether these are on different ranks.
        events: columns with one entry for each event: the event before it on its rank, its duration (an index into
            `takes`), the event that makes its tensor, the event behind which the receive of the tensor is posted, the
            channel, and further events for which it waits. An event stands behind all events for which it waits. The
            first event has number 1.
        takes: the durations of events, as sums or maxima of costs of stages.
        last: by rank, the event of its last computation or update.
        shared: (kind, version) of each reduction that several ranks share -> its event.
        own: (kind, rank, version) of each update, and of each reduction that predictions wait for -> its event.
        done: by microbatch, the event of the first stage's backward.
        counts: by rank, (kind, stage) -> the number of these computations.
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
        """Build the graph of batches from a drained state to a drained state. Requires `has_event_graph`.

        `batches`: the number of microbatches of each batch.
        """
        return _FoldedExecution(schedule, schedule.segments_without_transfers(batches), sum(batches)).graph()

    def seconds(self, costs: Costs) -> float:
        """Return the end of the last computation or update, in seconds."""
        ends = self.ends(costs)
        return max(ends[each] for each in self.last)

    def ends(self, costs: Costs) -> Sequence[float]:
        """Return the end of each event by its number. Entry 0 is the start of all rows, at 0."""
        clock = _Clock(self, costs, START)
        clock.run(len(self.events[0]))
        return clock.ends

    def returns(self, costs: Costs, since: int, until: Sequence[int]) -> list[float]:
        """Return for each event of `until` (ascending) the longest path from the event `since` to its end, in seconds.

        Paths through earlier events of `until` do not count. The result is minus infinity if there is no path.
        """
        clock, found = _Clock(self, costs, since), []
        for event in until:
            clock.run(event)
            found.append(clock.ends[event])
            clock.ends[event] = -math.inf
        return found

    def channels(self, costs: Costs) -> tuple[list[float], list[float]]:
        """Return the occupation and the latency of each channel. An edge has two channels, forward and backward."""
        occupations, latencies = [], []
        for forward, backward, latency, crosses in zip(*costs.edges(self.num_stages - 1), self.crossing, strict=True):
            occupations += [forward * crosses, backward * crosses]
            latencies += [latency * crosses] * 2
        return occupations, latencies


class _Clock:
    """Computes the ends of events, one after another.

    Attributes:
        ends: the ends of the events so far. The event `since` ends at 0, and the events before it at minus infinity.
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
        """Compute the ends of all events up to and including `until`."""
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
    """Return whether the schedule's rows can be timed without lowering.

    They can if its stages form a chain, are all trained and step together, no weights are on the host, and the program
    has no recomputes.
    """
    host = schedule.residency is not None or schedule.recompute
    return not (host or schedule.edges or schedule.num_frozen or schedule.weights.updates_alone)


_Meaning = tuple[int, int, int, int]
"""For computations of one kind at one stage: the index of their duration in `takes`, the index of the tensor that
microbatch 0 needs, the index of the tensor that it makes, and the channel of the needed tensor. -1: there is none."""


class _FoldedExecution(Execution):
    """The execution of rows that are not lowered. A tensor's transfer belongs to the computation that needs it."""

    def __init__(self, schedule: Schedule, segments_of_rank: Sequence[Segments], num_microbatches: int) -> None:
        self._schedule, self._segments, self._num_microbatches = schedule, segments_of_rank, num_microbatches
        self._stages = stages_by_rank(schedule.rank_of_stage)
        self._events = (*(array("l") for _ in range(5)), [])
        self._made = [START] * (len(_TENSORS) * schedule.num_stages * num_microbatches)  # START: not made yet
        self._waiting: dict[int, int] = {}  # index of a tensor not made yet -> the rank that waits for it
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
        """Add the events of a rank. Yield (position, awaited) where the rank has to wait."""
        made, waiting, meanings, queue = self._made, self._waiting, {}, self.moves[rank]
        awaited = awaited_moves(_row(self._segments[rank])) if any(map(_evicts, self._segments[rank])) else {}
        now, position = START, -1
        for segment in self._segments[rank]:
            begins = before = None  # events behind which receives of this and of the previous computation are posted
            for instruction in segment:
                position += 1
                kind, stage = instruction.kind, instruction.stage
                if kind not in COMPUTATIONS:
                    if kind in MOVES:
                        self._request(rank, position, instruction, now)
                    elif kind in REDUCTIONS:
                        self._post(rank, position, instruction, now)
                    else:
                        version, reduced = instruction.version, ()
                        while kind in AWAITS_REDUCTIONS and self.pending[rank][version]:
                            self.awaits_reductions[rank] = True
                            yield position, version
                        if kind in AWAITS_REDUCTIONS:
                            reduced = tuple(self.reduced[rank].get(version, [START])[-1:])
                        now = self._add(now, self._take(kind, self._stages[rank]), reduced)
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
    """Yield all instructions of a rank."""
    return (each for segment in segments for each in segment)


@lru_cache(maxsize=256)
def event_graph(schedule: Schedule, batches: tuple[int, ...]) -> EventGraph:
    """Return `EventGraph.of`, cached."""
    return EventGraph.of(schedule, batches)
