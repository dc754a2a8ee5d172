"""How long rows take, without lowering them to a program: the longest path through their events.

Each computation, move, reduction and update is an event. It ends its own time after the latest of the events that it
waits for: the one before it on its rank, what brings its input or gradient, the moves that make room for it, the
reductions of its version. Who waits for whom depends on no time, so the graph of a schedule is found once, in an order
in which all that an event waits for stands before it; on any costs its ends then are one loop. The meaning of each
instruction is that of `megatron.pipeline.simulate`, and a test holds both against each other to the last digit. What a
search saves is the program: versions, transfers, and a simulation that has to find out who can go on.

A transfer is no event of its own. It starts when its tensor is made, its receive is posted (before the computation that
precedes the one that needs it, see `passes.communication`) and its channel is free, and belongs to the computation that
waits for it.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from megatron.pipeline.program.instruction import (
    BEGINS_BACKWARD,
    COMPUTATIONS,
    MOVES,
    OWN_MOVES,
    REDUCTIONS,
    SHARED_REDUCTIONS,
    Instruction,
    Kind,
    Tensor,
)
from megatron.pipeline.program.move_order import awaited_moves
from megatron.pipeline.program.stages import stages_by_rank
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.passes import Segments
from megatron.pipeline.simulate.costs import Costs

_START = 0  # the event before all others, at time 0
_NONE = -1  # no channel

_Takes = tuple[Kind, tuple[int, ...]]  # the kind, and the stages: times are added up, or the longest counts


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
    takes: tuple[_Takes, ...]
    last: tuple[int, ...]
    shared: Mapping[tuple[Kind, int], int]
    own: Mapping[tuple[Kind, int, int], int]
    done: tuple[int, ...]
    counts: tuple[Counter[tuple[Kind, int]], ...]

    @staticmethod
    def of(schedule: Schedule, batches: Sequence[int]) -> EventGraph:
        """The graph of some batches, from a drained state to a drained state. The schedule `has_event_graph`."""
        return _Builder(schedule, schedule.segments_without_transfers(batches)).graph()

    def seconds(self, costs: Costs) -> float:
        """The end of the last computation or update. Transfers run beside computations."""
        ends = self.ends(costs)
        return max(ends[each] for each in self.last)

    def ends(self, costs: Costs) -> Sequence[float]:
        """When each event ends; the first one is that before all others, at 0."""
        clock = _Clock(self, costs, _START)
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


def receives(segment: Sequence[Instruction]) -> Iterator[tuple[int, int]]:
    """The position of each computation that may need a tensor, and that before which its receive stands."""
    begins = before = None
    for position, each in enumerate(segment):
        if begins is None and each.kind in COMPUTATIONS:
            begins = position
        if each.kind.row.needs is not None:
            yield position, begins if before is None else before
            before, begins = begins, None


class _ReductionQueue:
    """Reductions that a rank runs one after another."""

    __slots__ = ("free_at", "posted", "rank", "reached")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.posted: deque[tuple[int, Instruction]] = deque()  # behind which event
        self.reached = False  # whether the first of them has joined the others
        self.free_at = _START


class _Builder:
    """Goes through the rows of all ranks, each until it waits for an event that is not known yet."""

    def __init__(self, schedule: Schedule, segments_of_rank: Sequence[Segments]) -> None:
        self._schedule = schedule
        self._rows = [[each for segment in segments for each in segment] for segments in segments_of_rank]
        self._receives = [_receives_of_row(segments) for segments in segments_of_rank]
        self._stages = stages_by_rank(schedule.rank_of_stage)
        self._events = (*(array("l") for _ in range(5)), [])
        self._num_events = 0
        self._takes: dict[_Takes, int] = {}
        self._made: dict[tuple[Tensor, int, int], int] = {}  # (tensor, stage, microbatch) -> event
        self._waiting: dict[object, list[int]] = {}  # what is to come -> ranks
        self._shared: dict[tuple[Kind, int], int] = {}
        self._own: dict[tuple[Kind, int, int], int] = {}
        self._done: dict[int, int] = {}  # microbatch -> event
        self._runnable = list(range(schedule.num_ranks))[::-1]
        self._position, self._now = [0] * schedule.num_ranks, [_START] * schedule.num_ranks
        self._behind = [[_START] * len(row) for row in self._rows]  # by position: the event before it
        self._set_up_moves()
        self._queues = [_ReductionQueue(rank) for rank in range(schedule.num_ranks)]
        self._pending: list[Counter[int]] = [Counter() for _ in self._rows]  # version -> reductions to come
        self._reduced: list[dict[int, int]] = [{} for _ in self._rows]  # version -> the last of its reductions
        self._running: dict[tuple[Kind, int], list[tuple[_ReductionQueue, int, Instruction]]] = {}
        shared = (each for row in self._rows for each in row if each.kind in SHARED_REDUCTIONS)
        self._num_members = Counter((each.kind, each.version) for each in shared)

    def graph(self) -> EventGraph:
        while self._runnable:
            self._run(self._runnable.pop())
        unfinished = [rank for rank, row in enumerate(self._rows) if self._position[rank] < len(row)]
        assert not unfinished, f"ranks {unfinished} wait for what never comes"
        ranks = self._schedule.rank_of_stage
        return EventGraph(
            self._schedule.num_stages,
            tuple(one != other for one, other in pairwise(ranks)),
            self._events,
            tuple(self._takes),
            tuple(self._now),
            self._shared,
            self._own,
            tuple(event for _, event in sorted(self._done.items())),
            tuple(Counter((each.kind, each.stage) for each in row if each.kind in COMPUTATIONS) for row in self._rows),
        )

    # --- rows

    def _run(self, rank: int) -> None:
        row, behind = self._rows[rank], self._behind[rank]
        for position in range(self._position[rank], len(row)):
            instruction, kind = row[position], row[position].kind
            behind[position] = now = self._now[rank]
            if kind in COMPUTATIONS:
                event = self._compute(rank, position, instruction)
                if event is None:
                    self._position[rank] = position
                    return
                self._now[rank] = event
            elif kind in MOVES:
                self._request(rank, instruction)
            elif kind in REDUCTIONS:
                self._post(rank, instruction)
            else:
                version = instruction.version
                if self._pending[rank][version]:
                    self._wait(rank, (rank, version))
                    self._position[rank] = position
                    return
                reduced = self._reduced[rank].get(version, _START)
                self._now[rank] = self._add(now, kind, self._stages[rank], (reduced,))
                self._own[kind, rank, version] = self._now[rank]
        self._position[rank] = len(row)

    def _compute(self, rank: int, position: int, instruction: Instruction) -> int | None:
        """The event of a computation; None: it waits."""
        kind, stage, microbatch = instruction.kind, instruction.stage, instruction.microbatch
        source, channel, others = _START, _NONE, ()
        maker, edge = stage - 1, stage - 1
        tensor = kind.row.needs
        if kind in BEGINS_BACKWARD:
            maker, edge = stage + 1, stage
        if tensor is not None and 0 <= maker < self._schedule.num_stages:
            key = (tensor, maker, microbatch)
            if key not in self._made:
                self._wait(rank, key)
                return None
            source = self._made[key]
            if self._schedule.rank_of_stage[maker] != rank:
                channel = 2 * edge + (kind in BEGINS_BACKWARD)
        if needed := self._awaited[rank].get(position):
            moves = self._moves[self._pair[rank]]
            if len(moves) < needed:
                self._wait(rank, (self._pair[rank], "moves", needed))
                return None
            others = (moves[needed - 1],)
        posted = self._behind[rank][self._receives[rank][position]] if channel != _NONE else _START
        event = self._add(self._now[rank], kind, (stage,), others, source, posted, channel)
        if stage == 0 and kind in BEGINS_BACKWARD:
            self._done[microbatch] = event
        if kind.row.makes is not None:
            key = (kind.row.makes, stage, microbatch)
            self._made[key] = event
            self._wake(key)
        return event

    def _add(
        self,
        before: int,
        kind: Kind,
        stages: tuple[int, ...],
        others: tuple[int, ...] = (),
        source: int = _START,
        posted: int = _START,
        channel: int = _NONE,
    ) -> int:
        befores, durations, sources, receives, channels, awaited = self._events
        befores.append(before)
        durations.append(self._takes.setdefault((kind, stages), len(self._takes)))
        sources.append(source)
        receives.append(posted)
        channels.append(channel)
        awaited.append(others)
        self._num_events += 1
        return self._num_events

    def _wait(self, rank: int, key: object) -> None:
        self._waiting.setdefault(key, []).append(rank)

    def _wake(self, key: object) -> None:
        if key in self._waiting:
            self._runnable += self._waiting.pop(key)

    # --- moves of a pair, named by its lower rank

    def _set_up_moves(self) -> None:
        ranks, pairs = range(self._schedule.num_ranks), self._schedule.pairs
        is_balanced = self._schedule.balance
        partner = [pairs.of_rank(rank) if is_balanced else rank for rank in ranks]
        self._pair = [min(rank, partner[rank]) for rank in ranks]
        self._awaited = [awaited_moves(row) if is_balanced else {} for row in self._rows]
        self._requests: list[list[list[tuple[int, Instruction]]]] = [[[], []] for _ in ranks]  # of both ends of a pair
        self._moves: list[list[int]] = [[] for _ in ranks]

    def _request(self, rank: int, move: Instruction) -> None:
        pair = self._pair[rank]
        self._requests[pair][rank != pair].append((self._now[rank], move))
        moves, requests = self._moves[pair], self._requests[pair]
        nth = len(moves)
        if min(map(len, requests)) == nth:
            return
        ends, (one, other) = zip(*(each[nth] for each in requests), strict=True)
        named = one if one.kind in OWN_MOVES else other
        moves.append(self._add(moves[-1] if moves else _START, named.kind, (named.stage,), ends))
        self._wake((pair, "moves", nth + 1))

    # --- reductions

    def _post(self, rank: int, reduction: Instruction) -> None:
        self._pending[rank][reduction.version] += 1
        self._queues[rank].posted.append((self._now[rank], reduction))
        agenda = [self._queues[rank]]
        while agenda:  # what one completes lets the next of all its members join theirs
            queue = agenda.pop()
            if not queue.posted or queue.reached:
                continue
            queue.reached = True
            posted, first = queue.posted[0]
            key = (first.kind, first.version)
            members = self._running.setdefault(key, []) if self._num_members[key] > 1 else []
            members.append((queue, posted, first))
            if len(members) >= self._num_members[key]:
                self._running.pop(key, None)
                self._complete(members)
                agenda += [member for member, _, _ in members]

    def _complete(self, members: Sequence[tuple[_ReductionQueue, int, Instruction]]) -> None:
        kind, version = members[0][2].kind, members[0][2].version
        if kind in SHARED_REDUCTIONS:
            stages = tuple(sorted(each.stage for _, _, each in members))
        else:
            stages = self._stages[members[0][0].rank]
        waits = tuple(dict.fromkeys(each for queue, posted, _ in members for each in (queue.free_at, posted)))
        event = self._add(waits[0], kind, stages, waits[1:])
        if kind in SHARED_REDUCTIONS:
            self._shared[kind, version] = event
        elif kind is Kind.REDUCE_PARTIAL:
            self._own[kind, members[0][0].rank, version] = event
        for queue, _, _ in members:
            queue.posted.popleft()
            queue.reached, queue.free_at = False, event
            self._reduced[queue.rank][version] = event
            self._pending[queue.rank][version] -= 1
            if not self._pending[queue.rank][version]:
                self._wake((queue.rank, version))


def _receives_of_row(segments: Segments) -> dict[int, int]:
    """By position in the row of a computation that needs a tensor: where its receive stands."""
    found, start = {}, 0
    for segment in segments:
        found |= {start + needed: start + posted for needed, posted in receives(segment)}
        start += len(segment)
    return found


@lru_cache(maxsize=256)
def event_graph(schedule: Schedule, batches: tuple[int, ...]) -> EventGraph:
    """The same graph for whoever asks again."""
    return EventGraph.of(schedule, batches)
