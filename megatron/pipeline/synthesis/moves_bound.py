"""A lower bound on the time of a problem's programs if microbatches may also leave their rank and come back.

A program with moves becomes a program without limits if its moves are left out. So the bound without limits holds: the
path and the turns of the ranks. Two more bounds hold if copies take time, because copies then carry a limited amount:

- **Fill and drain.** Until the first backward of a rank starts, at t, the rank computes the forwards that its limit
  holds, and those whose activations have left by then: at most t over the time of a copy. The wait t less this work is
  least at the earliest t, or where another stage's forwards would be next. The same holds behind the last forward, for
  the backwards of the microbatches that are held or come back. If all forwards stand before the first backward, the two
  waits overlap. Then everything above the limit has left, and all backwards follow.
- **Room.** A microbatch that leaves still takes room for its forward, for both copies, and for its backward. At most as
  many leave as the copies have time for. The memory of all microbatches, summed over time, fits under the limit after
  the savings of those that leave are subtracted.

With a pair rank both directions share one queue, and no more leaves than the other rank's limit holds. The memory on
both ranks, summed over time, fits under both limits. A program has one way for its moves, so for `best` the least bound
holds.

**If any microbatches may be recomputed, too** (`bound_of_any_choice`), each of these bounds is weakened until it holds
for every choice:

- A program without its recomputes and its moves is one without limits that recomputes nothing. So the path and the
  turns hold if recomputes take no time and nothing has a limit.
- For fill and drain, each microbatch that is there holds at least its input, and recomputes take no time.
- The room is a trade. If all microbatches stayed and were kept, they would hold a certain size over time. A recomputed
  microbatch holds less between its forward and its recompute, and its rank computes longer. A moved microbatch holds
  less while it is away, and its copies occupy their lanes. A microbatch that is recomputed and moved saves at most the
  sum of the two savings. The savings that recomputes and copies can make within a time grow with this time, and so does
  the room under the limit. So there is a least time at which everything fits, and every program needs at least this
  time.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.synthesis.bound import (
    FillAndDrain,
    Turns,
    held_over_time,
    lower_bound,
    most_work,
    size_per_second,
    to_trade,
)
from megatron.pipeline.synthesis.moves import HOST, Way, moved_size, pair_ranks
from megatron.pipeline.synthesis.path import own_places, path_seconds
from megatron.pipeline.synthesis.problem import Problem


def bound_with_moves(problem: Problem, ways: Sequence[Way]) -> tuple[float, str]:
    """Return a lower bound in seconds on programs with moves in one of `ways` or none, and the bound's origin in words.

    Where microbatches are kept, the bound holds for any choice of them.
    """
    if problem.kept:
        return bound_of_any_choice(problem, ways)
    return min(_bound(problem, way) for way in ways)


def bound_of_any_choice(problem: Problem, ways: Sequence[Way]) -> tuple[float, str]:
    """Return the same bound, for any choice of moves and of the recomputed microbatches of `problem.recomputed`."""
    return min(_bound_of_any(problem, way) for way in ways)


def _bound_of_any(problem: Problem, way: Way) -> tuple[float, str]:
    free = replace(problem, kept=(), costs=replace(problem.costs, recompute=0.0))
    boundless = replace(free, limits=math.inf)
    whole = replace(boundless, recomputed=frozenset())
    found, turns = [lower_bound(boundless)], Turns(boundless)
    others = range(problem.num_ranks) if way is HOST else pair_ranks(problem)
    for rank, other in enumerate(others):
        if math.isinf(problem.limit_of(rank)):
            continue
        trade, most = _Trade(problem, turns, rank), _most_away(problem, way, rank, other)
        name = f"room against recomputes and moves on rank {rank}"
        found.append((trade.least(_Copies.of(whole, way, rank, most)), name))
        name = f"fill and drain of rank {rank} with moves"
        found.append((_fill_and_drain(free, rank, _Copies.of(free, way, rank, most)), name))
        if way is not HOST and rank < other:
            name = f"room against recomputes on ranks {rank} and {other}"
            found.append((trade.least_with(_Trade(problem, turns, other)), name))
    return max(found)


def _bound(problem: Problem, way: Way) -> tuple[float, str]:
    found = [lower_bound(replace(problem, limits=math.inf))]
    others = range(problem.num_ranks) if way is HOST else pair_ranks(problem)
    for rank, other in enumerate(others):
        if math.isinf(problem.limit_of(rank)):
            continue
        copies = _Copies.of(problem, way, rank, _most_away(problem, way, rank, other))
        if way is not HOST and rank < other:
            found.append((_room_of_pair(problem, rank, other), f"the room of ranks {rank} and {other} over time"))
        found.append((_fill_and_drain(problem, rank, copies), f"fill and drain of rank {rank} with moves"))
        found.append((_room(problem, rank, copies), f"the room of rank {rank} over time with moves"))
    return max(found)


def _most_away(problem: Problem, way: Way, rank: int, other: int) -> float:
    """The most memory that may be away from `rank`, whose pair rank is `other`."""
    return math.inf if way is HOST else problem.limit_of(other) if rank != other else 0.0


@dataclass(frozen=True)
class _Copies:
    """The memory that copies can carry away from a rank and back, and the time that they take.

    Attributes:
        out_rate, back_rate: the most that leaves and that comes back, in size per second.
        most: the most that may be away.
        lanes: for each lane, the seconds for which each stage of the rank occupies it with a microbatch.
        seconds: for each stage of the rank, the seconds of both copies of a microbatch.
    """

    out_rate: float
    back_rate: float
    most: float
    lanes: list[dict[int, float]]
    seconds: dict[int, float]

    @classmethod
    def of(cls, problem: Problem, way: Way, rank: int, most: float) -> "_Copies":
        out, back = way.seconds(problem)
        stages = [each for each, at in enumerate(problem.rank_of_stage) if at == rank]
        both = {each: out[each] + back[each] for each in stages}
        lanes = [{each: of[each] for each in stages} for of in (out, back)] if way is HOST else [both]
        rates = []
        for seconds in (out, back):
            sizes = {each: moved_size(problem, each) for each in stages}
            rates.append(max(_ratio(size, seconds[each]) for each, size in sizes.items()))
        return cls(*rates, most, lanes, both)

    def room(self, limit: float, rate: float, seconds: float) -> float:
        """The memory that a rank has room for, if copies at `rate` may run for some seconds."""
        moved = rate if math.isinf(rate) else rate * max(0.0, seconds)
        return limit + min(self.most, moved)


def _ratio(size: float, seconds: float) -> float:
    if not seconds:
        return math.inf if size else 0.0
    return size / seconds


def _fill_and_drain(problem: Problem, rank: int, copies: _Copies) -> float:
    limit, waits = problem.limit_of(rank), FillAndDrain.of(problem, rank)
    forwards, backwards = own_places(problem, rank)
    end = len(problem.path) - 1
    first = problem.path[forwards[0]]
    begin = path_seconds(problem, 0, forwards[0]) + problem.seconds[first]  # before that nothing can leave
    behind = path_seconds(problem, backwards[-1], end) + problem.seconds[problem.path[end]]  # nothing comes back
    before = _least_idle(problem, waits.fill, waits.filling, limit, copies, copies.out_rate, begin) - waits.recomputes
    after = _least_idle(problem, waits.drain, waits.draining, limit, copies, copies.back_rate, behind)
    apart = problem.work(rank) + max(0.0, before) + max(0.0, after)
    seconds, away = (problem.num_microbatches * sum(each) for each in zip(*waits.filling, strict=True))
    if (away := away - limit) > copies.most:
        return apart
    filled = max(waits.fill, begin + away / copies.out_rate if away > 0 else 0.0)
    return min(apart, filled + problem.work(rank) - seconds - waits.recomputes)


def _least_idle(
    problem: Problem,
    wait: float,
    kinds: list[tuple[float, float]],
    limit: float,
    copies: _Copies,
    rate: float,
    begin: float,
) -> float:
    """The least difference between a wait of `wait` or longer and the work in it.

    The work is concave in the wait, so the difference is least at its beginning or where the work bends.
    """
    m, ends = problem.num_microbatches, {wait}
    if 0 < rate < math.inf:
        bends, full = [copies.most], 0.0
        for _, size in sorted(kinds, key=size_per_second):
            full += m * size
            bends.append(full - limit)
        ends |= {max(wait, begin + each / rate) for each in bends if math.isfinite(each)}
    return min(each - most_work(kinds, copies.room(limit, rate, each - begin), m) for each in ends)


def _room(problem: Problem, rank: int, copies: _Copies) -> float:
    """The bound from the memory that a rank's microbatches hold over time, if copies carry some of them away."""
    forwards, _ = own_places(problem, rank)
    total = problem.num_microbatches * held_over_time(problem, rank)
    head = path_seconds(problem, 0, forwards[0])
    if not copies.most:
        return head + total / problem.limit_of(rank)
    return head + max(_seconds_of_room(problem, rank, total, lane, copies.seconds) for lane in copies.lanes)


def _seconds_of_room(
    problem: Problem, rank: int, total: float, lane: dict[int, float], copies: dict[int, float]
) -> float:
    """The least seconds in which the memory held over time, less the savings of a lane's copies, fits the limit."""
    limit, time = problem.limit_of(rank), 0.0
    for saved, seconds in _saves_of_copies(problem, lane, copies):
        if not seconds:
            total -= saved
            continue
        rate = saved / seconds
        if (found := (total + rate * time) / (limit + rate)) <= time + seconds:
            return max(found, time)
        total, time = total - saved, time + seconds
    return max(0.0, total / limit)


def _saves_of_copies(problem: Problem, lane: dict[int, float], copies: dict[int, float]) -> list[tuple[float, float]]:
    """The savings of a rank's stages if all microbatches are copied: memory over time, and the seconds in a lane.

    The stage that saves most in a second comes first.
    """
    end, saves = len(problem.path) - 1, []
    for stage, seconds in lane.items():
        kept = problem.seconds[problem.number_of[Kind.FORWARD, stage]] + copies[stage]
        away = max(0.0, path_seconds(problem, stage, end - stage) - kept)
        saves.append((problem.num_microbatches * moved_size(problem, stage) * away, problem.num_microbatches * seconds))
    return sorted(saves, key=lambda each: -_ratio(*each))


def _room_of_pair(problem: Problem, rank: int, other: int) -> float:
    """The bound from the memory that both ranks of a pair hold over time, on whichever of them it lies."""
    heads = [path_seconds(problem, 0, own_places(problem, each)[0][0]) for each in (rank, other)]
    held = sum(held_over_time(problem, each) for each in (rank, other))
    limits = problem.limit_of(rank) + problem.limit_of(other)
    return min(heads) + problem.num_microbatches * held / limits


class _Trade:
    """The memory that a rank holds over time if it keeps everything, and the part that recomputes save.

    Args:
        problem: has the stages that may recompute any of their microbatches, and the time of a recompute.
        turns: heads and tails if recomputes take no time and nothing has a limit.
        rank: the rank.
    """

    def __init__(self, problem: Problem, turns: Turns, rank: int) -> None:
        stages = [stage for stage in sorted(problem.recomputed) if problem.rank_of_stage[stage] == rank]
        # Without recomputes one microbatch may exceed a limit, which does not matter here.
        self._whole, self._limit = (
            replace(problem, kept=(), recomputed=frozenset(), limits=math.inf),
            problem.limit_of(rank),
        )
        self._head, work, self._needs, less = to_trade(problem, rank, stages)
        self._least = self._head + work
        m, costs = problem.num_microbatches, problem.costs.seconds(problem.num_stages)[Kind.RECOMPUTE]
        self._saves = sorted(((less[each], m * costs[each]) for each in stages), key=lambda each: -_ratio(*each))
        self._ends: list[float] | None = None  # with one such stage: number of recomputes -> least end of the rank
        if len(stages) == 1:
            again = (turns.of_rank_again(rank, stages[0], costs[stages[0]], count) for count in range(m + 1))
            self._less, self._ends = less[stages[0]] / m, list(accumulate(again, max))
            self._least = self._ends[0]

    def _saved_by(self, end: float) -> float:
        """The most that recomputes save if the rank is done by then."""
        if self._ends is not None:
            return self._less * (bisect_right(self._ends, end) - 1)
        return _saved_within(self._saves, end - self._least)

    def least(self, copies: _Copies) -> float:
        """The least time by which the rank has done its work and its memory over time has fitted, with copies."""
        lanes: list[list[tuple[float, float]]] = []
        if copies.most:
            lanes = [_saves_of_copies(self._whole, each, copies.seconds) for each in copies.lanes]

        def fits(end: float) -> bool:
            carried = min((_saved_within(each, end - self._head) for each in lanes), default=0.0)
            return self._needs - self._saved_by(end) - carried <= self._limit * (end - self._head)

        return _least_time(fits, self._least)

    def least_with(self, other: "_Trade") -> float:
        """The least time by which two ranks have done their work and their common memory over time has fitted."""

        def fits(end: float) -> bool:
            needs = sum(each._needs - each._saved_by(end) for each in (self, other))
            return needs <= (self._limit + other._limit) * (end - min(self._head, other._head))

        return _least_time(fits, max(self._least, other._least))


def _saved_within(saves: Sequence[tuple[float, float]], seconds: float) -> float:
    """The most that is saved within some seconds. `saves`: (saved, seconds) for all microbatches; fractions count."""
    total = 0.0
    for saved, takes in saves:
        part = 1.0 if takes <= seconds else max(0.0, seconds / takes)
        total, seconds = total + part * saved, seconds - part * takes
    return total


def _least_time(fits: Callable[[float], bool], time: float) -> float:
    """The least time from `time` on at which `fits` holds, rounded down. From there on `fits` has to hold always."""
    if fits(time):
        return time
    low, high = time, 2 * time + 1.0
    while not fits(high):
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low
