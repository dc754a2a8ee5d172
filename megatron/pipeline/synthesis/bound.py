"""A lower bound on the time of a problem's programs, from the work, the waits and the memory of one rank.

Four relaxations, each of one rank or of the path; the bound is the greatest.

- **Path.** The microbatches pass all stages and come back, one behind the other.
- **Turns.** The j-th computation of a queue ends after the j-th of each queue that feeds it, and after its own rank has
  computed j of everything before it. Where a limit lets a stage hold K microbatches, its j-th forward starts after its
  (j-K)-th backward has ended. So each computation has a head, the least time before it, and by the same rules from the
  end a tail, the least time behind it. A rank computes one thing at a time. Even if it could interrupt, it would need
  the time of the preemptive schedule that takes the longest tail first (Jackson 1955; Carlier 1982).
- **Fill and drain.** Before the first backward of a rank starts, the rank computes at most the forwards that its limit
  holds; behind its last forward, at most the backwards of the microbatches that it may hold. Both waits are at least
  the path of a microbatch to the end of the pipeline and back.
- **Room.** Each microbatch holds memory on a rank at least from its forward to the end of its path back. This memory
  times this time, summed over the microbatches, is at most the limit of the rank times the time of the batch. A rank
  whose microbatches have one size only can fill its limit with whole microbatches only.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.synthesis.path import own_places, path_seconds, weight_seconds
from megatron.pipeline.synthesis.problem import NONE, ROUNDING, Problem


def lower_bound(problem: Problem) -> tuple[float, str]:
    """Return the greatest lower bound in seconds, and its origin in words.

    Where microbatches are kept, the bound holds for any choice of them.
    """
    if problem.kept:
        return bound_of_any_recompute(problem)
    turns = Turns(problem)
    found = [(turns.longest, "the path of the microbatches")]
    for rank in range(problem.num_ranks):
        found.append((turns.of_rank(rank), f"the turns of rank {rank}"))
        found.append((_fill_and_drain(problem, rank), f"fill and drain of rank {rank} under its limit"))
        found.append((_room(problem, rank), f"the room of rank {rank} over time"))
    return max(found)


def bound_of_any_recompute(problem: Problem) -> tuple[float, str]:
    """Return a bound for every choice of the microbatches of `problem.recomputed` that are recomputed.

    It is the greatest of two kinds of bounds: the bound if recomputes took no time, and a trade on each rank. There, a
    recomputed microbatch costs its recompute, and a kept one takes memory over time (`held_over_time`).
    """
    free = replace(problem, kept=(), costs=replace(problem.costs, recompute=0.0))
    found, turns = [lower_bound(free)], Turns(free)
    for rank in range(problem.num_ranks):
        stages = [stage for stage in problem.recomputed if problem.rank_of_stage[stage] == rank]
        if stages and not math.isinf(problem.limit_of(rank)):
            time = _trade(problem, rank, stages) if len(stages) > 1 else _trade_of_turns(problem, turns, rank, *stages)
            found.append((time, f"room against recomputes on rank {rank}"))
    return max(found)


def _trade(problem: Problem, rank: int, stages: Sequence[int]) -> float:
    """The least time in which a rank can do its work and have its room over time; stages may recompute in part."""
    limit, (head, work, needs, less) = problem.limit_of(rank), to_trade(problem, rank, stages)
    costs, time = problem.costs.seconds(problem.num_stages)[Kind.RECOMPUTE], work
    for stage in sorted(stages, key=lambda each: -less[each] / (costs[each] or ROUNDING)):
        if needs <= limit * time:
            break
        more = problem.num_microbatches * costs[stage]
        gain = less[stage] + limit * more
        part = min(1.0, (needs - limit * time) / gain) if gain else 1.0
        time, needs = time + part * more, needs - part * less[stage]
    return head + max(time, needs / limit)


def _trade_of_turns(problem: Problem, turns: "Turns", rank: int, stage: int) -> float:
    """The same for a rank with one such stage: the least time over the number of microbatches that it recomputes."""
    head, _, needs, less = to_trade(problem, rank, [stage])
    limit, m = problem.limit_of(rank), problem.num_microbatches
    seconds = problem.costs.seconds(problem.num_stages)[Kind.RECOMPUTE][stage]
    least = math.inf
    for count in range(m + 1):
        room = head + (needs - less[stage] * count / m) / limit
        if room < least:
            least = min(least, max(room, turns.of_rank_again(rank, stage, seconds, count)))
    return least


def to_trade(problem: Problem, rank: int, stages: Sequence[int]) -> tuple[float, float, float, dict[int, float]]:
    """The terms of a rank's trade between room and recomputes.

    Returns:
        The least seconds before its first computation; the seconds of its work without recomputes; the room over time
        that it needs if it keeps everything; and, by stage, how much less it needs if the stage recomputes.
    """
    whole, m = replace(problem, kept=(), recomputed=frozenset(), limits=math.inf), problem.num_microbatches
    forwards, _ = own_places(problem, rank)
    room = {each: m * held_over_time(whole, rank, each) for each in range(problem.num_stages)}
    less = {each: max(0.0, room[each] - m * held_over_time(problem, rank, each)) for each in stages}
    return path_seconds(problem, 0, forwards[0]), whole.work(rank), sum(room.values()), less


class Turns:
    """Heads and tails of all computations.

    Attributes:
        ends: for each queue, the least time to the end of its computation number j.
        rests: for each queue, the least time from the start of its computation number j from the last one to the end
            of the batch.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        m, queues = problem.num_microbatches, len(problem.queues)
        self.ends = [[0.0] * m for _ in range(queues)]
        self.rests = [[0.0] * m for _ in range(queues)]
        self._order = self._queues_in_order()
        self._holds = [self._most_in_flight(stage) for stage in range(problem.num_stages)]
        self._find_ends()
        self._find_rests()

    @property
    def longest(self) -> float:
        return max(each[-1] for each in self.ends)

    def of_rank(self, rank: int, further: Sequence[tuple[float, float, float]] = ()) -> float:
        """Return the time of the rank's computations with their heads and tails, if it could interrupt them.

        `further`: the head, seconds and tail of further computations.
        """
        problem, m = self._problem, self._problem.num_microbatches
        jobs = list(further)
        for queue in problem.queues_of_rank[rank]:
            seconds = problem.seconds[queue]
            for j in range(m):
                jobs.append((self.ends[queue][j] - seconds, seconds, self.rests[queue][m - 1 - j] - seconds))
        jobs.sort()
        time = longest = 0.0
        waiting: list[list[float]] = []
        at = 0
        while at < len(jobs) or waiting:
            if not waiting:
                time = max(time, jobs[at][0])
            while at < len(jobs) and jobs[at][0] <= time + ROUNDING * max(1.0, time):
                heapq.heappush(waiting, [-jobs[at][2], jobs[at][1]])
                at += 1
            job = waiting[0]
            until = jobs[at][0] if at < len(jobs) else math.inf
            if time + job[1] <= until:
                time += job[1]
                longest = max(longest, time - job[0])
                heapq.heappop(waiting)
            else:
                job[1] -= until - time
                time = until
        return longest

    def of_rank_again(self, rank: int, stage: int, seconds: float, count: int) -> float:
        """Return the bound of `of_rank` with `count` recomputes of a stage, which take `seconds` each."""
        forward, back = (self._problem.number_of[kind, stage] for kind in (Kind.FORWARD, self._problem.begins_backward))
        # The k-th recomputed microbatch is microbatch k or a later one; counted from the end, likewise.
        again = [(self.ends[forward][k], seconds, self.rests[back][count - 1 - k]) for k in range(count)]
        return self.of_rank(rank, again)

    def _queues_in_order(self) -> list[int]:
        """All queues, each behind those that it waits for in one microbatch."""
        problem, order = self._problem, []
        for queue in problem.path:
            kind, stage = problem.queues[queue]
            if kind is problem.begins_backward and stage in problem.recomputed:
                order.append(problem.number_of[Kind.RECOMPUTE, stage])
            order.append(queue)
        return order + [each for each, (kind, _) in enumerate(problem.queues) if kind is Kind.BACKWARD_WEIGHT]

    def _most_in_flight(self, stage: int) -> int:
        """The most microbatches between forward and I (or B) that the limit of the stage's rank allows at the stage.

        Each of them still has its I, and then the rank holds one microbatch whole. Each is also held at the stages
        before on the rank, since its gradient has not come to these.
        """
        problem = self._problem
        whole, rank = problem.saved_sizes[stage], problem.rank_of_stage[stage]
        own = [each for each, at in enumerate(problem.rank_of_stage[: stage + 1]) if at == rank]
        *before, taken = (problem.takes[problem.number_of[Kind.FORWARD, each]] for each in own)
        room = problem.room_of(rank)
        if math.isinf(room) or not taken + sum(before):
            return problem.num_microbatches
        return 1 + max(0, math.floor((room - whole - sum(before)) / (taken + sum(before)) * (1 + ROUNDING) + ROUNDING))

    def _together(self, queue: int, *, after: bool) -> float:
        """Seconds that a rank computes for each microbatch up to a queue's end, or (`after`) from its start on."""
        problem, own = self._problem, {queue}
        path = problem.path if not after else problem.path[::-1]
        rank, (kind, stage) = problem.rank_of_queue[queue], problem.queues[queue]
        if after and kind is problem.begins_backward and problem.splits:
            own.add(problem.number_of[Kind.BACKWARD_WEIGHT, stage])
        if kind is Kind.BACKWARD_WEIGHT and not after:
            own.add(problem.number_of[Kind.BACKWARD_INPUT, stage])
            queue = problem.number_of[Kind.BACKWARD_INPUT, stage]
        if queue in path:
            for other in path[: path.index(queue)]:
                if problem.rank_of_queue[other] == rank:
                    own.add(other)
                    if after and problem.splits and problem.queues[other][0] is Kind.BACKWARD_INPUT:
                        own.add(problem.number_of[Kind.BACKWARD_WEIGHT, problem.queues[other][1]])
        return sum(problem.seconds[each] for each in own)

    def _find_ends(self) -> None:
        problem, begins = self._problem, [math.inf] * self._problem.num_ranks
        together = [self._together(queue, after=False) for queue in range(len(problem.queues))]
        for j in range(problem.num_microbatches):
            for queue in self._order:
                kind, stage = problem.queues[queue]
                seconds, ends = problem.seconds[queue], self.ends[queue]
                source, delay = problem.sources[queue]
                time = 0.0 if source == NONE else self.ends[source][j] + delay
                if (before := problem.before[queue]) != NONE:
                    time = max(time, self.ends[before][j])
                if j:
                    time = max(time, ends[j - 1])
                if kind is Kind.FORWARD and j >= self._holds[stage]:
                    back = problem.number_of[problem.begins_backward, stage]
                    time = max(time, self.ends[back][j - self._holds[stage]])
                rank = problem.rank_of_queue[queue]
                begins[rank] = min(begins[rank], time)
                ends[j] = max(time + seconds, begins[rank] + (j + 1) * together[queue])

    def _find_rests(self) -> None:
        """Find `rests` as `_find_ends` finds `ends`, but from the end: a W may be last, then an I, then an F."""
        problem = self._problem
        together = [self._together(queue, after=True) for queue in range(len(problem.queues))]
        feeds: list[list[tuple[int, float]]] = [[] for _ in problem.queues]
        for queue, (source, delay) in enumerate(problem.sources):
            if source != NONE:
                feeds[source].append((queue, delay))
            if (before := problem.before[queue]) != NONE:
                feeds[before].append((queue, 0.0))
        for j in range(problem.num_microbatches):
            for queue in reversed(self._order):
                kind, stage = problem.queues[queue]
                rests = self.rests[queue]
                time = max((self.rests[each][j] + delay for each, delay in feeds[queue]), default=0.0)
                if j:
                    time = max(time, rests[j - 1])
                if kind is problem.begins_backward and j >= self._holds[stage]:
                    time = max(time, self.rests[problem.number_of[Kind.FORWARD, stage]][j - self._holds[stage]])
                rests[j] = max(time + problem.seconds[queue], (j + 1) * together[queue])


def size_per_second(kind: tuple[float, float]) -> float:
    """The sort key of kinds of computations (seconds, size) that orders them as they fill a limit."""
    seconds, size = kind
    return size / seconds if seconds else math.inf


def most_work(kinds: list[tuple[float, float]], limit: float, count: int) -> float:
    """The most seconds of up to `count` computations of each kind (seconds, size) within a limit; fractions count."""
    total = 0.0
    for seconds, size in sorted(kinds, key=size_per_second):
        number = count if size <= 0 else min(count, max(0.0, limit) / size)
        total += number * seconds
        limit -= number * size
    return total


@dataclass(frozen=True)
class FillAndDrain:
    """The two waits of a rank, and the computations that may fill them.

    Attributes:
        fill: the least seconds to the start of its first backward.
        drain: the least seconds behind its last forward.
        filling, draining: kinds of computations (seconds, size) that may stand there: forwards, and backwards of held
            microbatches. There are as many of each kind as there are microbatches.
        recomputes: the seconds of all recomputes, which may stand anywhere.
    """

    fill: float
    drain: float
    filling: list[tuple[float, float]]
    draining: list[tuple[float, float]]
    recomputes: float

    @classmethod
    def of(cls, problem: Problem, rank: int) -> "FillAndDrain":
        forwards, backwards = own_places(problem, rank)
        end = len(problem.path) - 1
        drain = path_seconds(problem, forwards[-1], end) - problem.seconds[problem.path[forwards[-1]]]
        drain += problem.seconds[problem.path[end]] + weight_seconds(problem, 0)
        stages = [problem.queues[problem.path[at]][1] for at in forwards]
        forward = [problem.number_of[Kind.FORWARD, each] for each in stages]
        draining = []
        for stage in stages:
            own = [each for each, (kind, at) in enumerate(problem.queues) if at == stage and kind is not Kind.FORWARD]
            size = problem.input_sizes[stage] if stage in problem.recomputed else problem.saved_sizes[stage]
            backward = [each for each in own if problem.queues[each][0] is not Kind.BACKWARD_WEIGHT]
            seconds = sum(problem.seconds[each] for each in backward)
            weight = weight_seconds(problem, stage)
            draining += [(seconds + weight, size), (weight, problem.deferred_sizes[stage])]
        return cls(
            path_seconds(problem, 0, backwards[0]), drain,
            [(problem.seconds[each], problem.takes[each]) for each in forward], draining,
            problem.work(rank) - problem.work_without_recompute(rank),
        )  # fmt: skip


def _fill_and_drain(problem: Problem, rank: int) -> float:
    """The bound from the first wait of a rank for a gradient and its wait behind its last forward."""
    limit, m = problem.room_of(rank), problem.num_microbatches
    if math.isinf(limit):
        return 0.0
    waits = FillAndDrain.of(problem, rank)
    before = most_work(waits.filling, limit, m) + waits.recomputes
    after = most_work(waits.draining, limit, m)
    rest = problem.work(rank) - before - after
    # The two waits do not overlap if work is left between them. A rest within rounding does not count.
    return waits.fill + waits.drain + rest if rest > ROUNDING * problem.work(rank) else 0.0


def held_over_time(problem: Problem, rank: int, stage: int | None = None) -> float:
    """The least memory times seconds that one microbatch can take on a rank (at one of its stages)."""
    end, held = len(problem.path) - 1, 0.0
    for each, at in enumerate(problem.rank_of_stage):
        if at != rank or stage not in (None, each):
            continue
        backward = problem.path[end - each]
        until = path_seconds(problem, each, end - each)
        if each in problem.recomputed:
            recompute = problem.costs.seconds(problem.num_stages)[Kind.RECOMPUTE][each]
            held += problem.input_sizes[each] * until
            held += (problem.saved_sizes[each] - problem.input_sizes[each]) * recompute
        else:
            held += problem.saved_sizes[each] * until
        held += problem.saved_sizes[each] * problem.seconds[backward]
        held += problem.deferred_sizes[each] * weight_seconds(problem, each)
    return held


def _room(problem: Problem, rank: int) -> float:
    """The bound from the memory that the microbatches of a rank hold, summed over time.

    Behind the last I or B of the rank's first stage, the last gradient still has its way to stage 0. In this time the
    rank holds memory only for W that are still to come, and computes one W at a time.
    """
    limit = problem.room_of(rank)
    if math.isinf(limit):
        return 0.0
    forwards, backwards = own_places(problem, rank)
    end, last = len(problem.path) - 1, problem.path[backwards[-1]]
    before = path_seconds(problem, 0, forwards[0])
    behind = path_seconds(problem, backwards[-1], end) + problem.seconds[problem.path[end]] - problem.seconds[last]
    stages = [stage for stage, at in enumerate(problem.rank_of_stage) if at == rank]
    spared = max(problem.deferred_sizes[each] for each in stages) * behind if problem.splits else 0.0
    needs = problem.num_microbatches * held_over_time(problem, rank)
    return before + behind + max(0.0, needs - spared) / limit
