"""A lower bound for little memory: the best order of one rank's computations, beside the memory of another rank.

Where few microbatches fit on a rank, they are in each other's way: one that waits there for room, or for its turn, is
held on all ranks before it meanwhile. So two ranks are looked at together, and all orders are tried:

- The **busy** rank keeps its limit and computes one thing at a time.
- The **holding** rank keeps its limit only, and computes any number of things at a time.
- Elsewhere a microbatch takes its least time. Recomputes take none, and an I (or B) has room for what they bring back.

Whatever a program does in its order, with these rules it is done as early. So no program is faster than the fastest
order, which a best-first search (A*) finds. A state has the counts of F and I of the busy rank and of F of the holding
one. What is to come is judged by the work of the busy rank, the room of both over time, and the turns of `Turns`. The
search leaves out

- starts that lie before the last one (a W belongs to the next F or I of its rank and may lie before it),
- states that have equal counts as another one, and nothing earlier than it,
- computations with a wait before them into which a W would fit, and those that wait for a W which could as well stand
  behind them: there is room for both, and the computation can begin when the W does. Either exchange delays nothing.

The least value of the states that are not looked at yet is a bound, too. So the search may stop after a number of
states, which is the same on any machine.
"""

import heapq
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.synthesis.bound import Turns, lower_bound
from megatron.pipeline.synthesis.path import own_places, path_seconds, weight_seconds
from megatron.pipeline.synthesis.problem import ROUNDING, Problem

_LEAST_STATES, _STATES_OF_MICROBATCH, _MOST_STATES = 20_000, 800, 50_000
_NEAR = 1.02
_BITS = 40  # of the longest time, counted in whole units so that sums are exact

_Times = tuple[int, ...]
# counts, last start, end of the busy rank's last computation, W to come by stage of the busy rank, by place the least
# starts of microbatches that come next, by part of the holding rank when known ones leave, and the least end.
_State = tuple[_Times, int, int, _Times, tuple[_Times, ...], tuple[_Times, ...], int]


def tightened(problem: Problem, bound: float, bound_from: str, seconds: float) -> tuple[float, str]:
    """Return a lower bound and its origin in words: the bound of the orders if it is better, and could be.

    Args:
        problem: the problem, without moves.
        bound, bound_from: what is known.
        seconds: the time of the best program. If it is near the bound, nothing more is tried, and neither if the
            limits of two ranks are no reason for the bound.
    """
    if seconds <= bound * _NEAR or math.inf in map(problem.limit_of, _two_ranks(problem)):
        return bound, bound_from
    if bound <= lower_bound(replace(_free(problem), limits=math.inf))[0] * _NEAR:
        return bound, bound_from
    better = bound_of_orders(problem)
    return better if better[0] > bound * (1 + ROUNDING) else (bound, bound_from)


def _two_ranks(problem: Problem) -> tuple[int, int]:
    """The rank of stage 0, which holds a microbatch longest, and the one whose first forward comes last."""
    return problem.rank_of_stage[0], max(range(problem.num_ranks), key=problem.rank_of_stage.index)


def _free(problem: Problem) -> Problem:
    """The problem if its recomputes take no time."""
    return replace(problem, kept=(), costs=replace(problem.costs, recompute=0.0))


def bound_of_orders(problem: Problem, states: int | None = None) -> tuple[float, str]:
    """Return a lower bound in seconds from the orders of two ranks, and its origin in words; 0 for one rank.

    Where microbatches are kept, the bound holds for any choice of them.

    Args:
        problem: the problem.
        states: after this number of states the search for the best orders of two ranks stops; None: a number that
            grows with that of the microbatches.
    """
    if states is None:
        states = max(_LEAST_STATES, min(_MOST_STATES, _STATES_OF_MICROBATCH * problem.num_microbatches))
    free = _free(problem)
    turns, found = Turns(free), [(0.0, "no order of two ranks")]
    outer, inner = _two_ranks(problem)
    if outer != inner:
        for busy, holding in ((inner, outer), (outer, inner)):
            seconds = Orders(free, busy, holding, turns.ends, turns.rests).least(states)
            found.append((seconds, f"the orders of rank {busy} and the room of rank {holding}"))
    return max(found)


class Orders:
    """The orders of two ranks.

    Args:
        problem: the problem.
        busy: the rank that computes one thing at a time.
        holding: another rank.
        ends, rests: for each queue, the least seconds to the end of its computation number j, and from the start of
            its computation number j from the last one to the end of the batch.
    """

    def __init__(
        self,
        problem: Problem,
        busy: int,
        holding: int,
        ends: Sequence[Sequence[float]],
        rests: Sequence[Sequence[float]],
    ) -> None:
        self._problem, self._busy, self._holding = problem, busy, holding
        self._scale = 2.0 ** (_BITS - math.frexp(max(each[-1] for each in rests) or 1.0)[1])
        path, (forwards, backwards) = problem.path, own_places(problem, busy)
        self._places = sorted({*forwards, *backwards, *own_places(problem, holding)[0]})
        queues = [path[at] for at in self._places]
        self._is_busy = [problem.rank_of_queue[each] == busy for each in queues]
        self._is_forward = [problem.queues[each][0] is Kind.FORWARD for each in queues]
        self._stages = [problem.queues[each][1] for each in queues]
        self._seconds = [self._units(problem.seconds[each]) for each in queues]
        self._lags = [
            self._units(path_seconds(problem, at, after) - problem.seconds[path[at]])
            for at, after in itertools.pairwise(self._places)
        ]
        self._early = [[self._units(end - problem.seconds[each]) for end in ends[each]] for each in queues]
        self._rests = [[self._units(rest) for rest in reversed(rests[each])] for each in queues]
        self._own = sorted({stage for stage, mine in zip(self._stages, self._is_busy, strict=True) if mine})
        self._weights = [self._units(weight_seconds(problem, each)) for each in self._own]
        self._takes = [self._taken(place) for place in range(len(queues))]
        self._parts = self._parts_of_holding()
        self._last = max(place for place, mine in enumerate(self._is_busy) if mine)
        self._rooms = [problem.room_of(rank) for rank in (busy, holding)]
        self._behind = [self._behind_of(rank) for rank in (busy, holding)]
        self._deferred = [problem.deferred_sizes[each] if problem.splits else 0.0 for each in self._own]
        self._work = [each if mine else 0 for each, mine in zip(self._seconds, self._is_busy, strict=True)]
        for stage, weight in zip(self._own, self._weights, strict=True):
            self._work[self._places.index(len(path) - 1 - stage)] += weight
        self._of_weights = [each * size for each, size in zip(self._weights, self._deferred, strict=True)]
        self._spared = max(self._deferred)
        others = (each for each, rank in enumerate(problem.rank_of_stage) if rank == holding)
        self._longest = max(self._units(weight_seconds(problem, each)) for each in others)
        self._terms = [self._room_terms(each) for each in (self._parts_of_busy(), self._parts)]

    def _units(self, seconds: float) -> int:
        return max(0, math.floor(seconds * self._scale))

    def _held(self, stage: int) -> float:
        """What a microbatch holds at a stage from its forward on."""
        sizes = self._problem.input_sizes if stage in self._problem.recomputed else self._problem.saved_sizes
        return sizes[stage]

    def _taken(self, place: int) -> float:
        stage = self._stages[place]
        return self._held(stage) if self._is_forward[place] else self._problem.saved_sizes[stage] - self._held(stage)

    def _parts_of_holding(self) -> list[tuple[int, int, int, float]]:
        """What leaves the holding rank together.

        Returns:
            For each part, the place of the forward that brings it, the place behind which it is known when it leaves,
            the time from the end of that computation to then, and its size.
        """
        problem, parts = self._problem, []
        for stage, at in enumerate(problem.rank_of_stage):
            if at != self._holding:
                continue
            back, forward = len(problem.path) - 1 - stage, self._places.index(stage)
            place = max(place for place, each in enumerate(self._places) if each < back)
            known, queue = self._places[place], problem.path[back]
            until = path_seconds(problem, known, back) - problem.seconds[problem.path[known]] + problem.seconds[queue]
            later = problem.deferred_sizes[stage] if problem.splits and stage not in problem.recomputed else 0.0
            for size, more in ((self._held(stage) - later, 0.0), (later, weight_seconds(problem, stage))):
                if size > 0:
                    parts.append((forward, place, self._units(until + more), size))
        return parts

    def _parts_of_busy(self) -> list[tuple[int, int, int, float]]:
        """The same for the busy rank, where what a W frees is counted for the time of its computation only."""
        problem, parts = self._problem, []
        for stage, weight in zip(self._own, self._weights, strict=True):
            forward, back = self._places.index(stage), self._places.index(len(problem.path) - 1 - stage)
            parts.append((forward, back, 0, self._held(stage)))
            again = problem.saved_sizes[stage] - self._held(stage)
            parts.append((back, back, 0, again))
            if problem.splits:
                parts.append((back, back, weight - self._seconds[back], problem.deferred_sizes[stage]))
        return parts

    def _behind_of(self, rank: int) -> int:
        """The least time from the end of a rank's last I (or B) to the end of that of stage 0."""
        path, (_, backwards) = self._problem.path, own_places(self._problem, rank)
        last, end = backwards[-1], len(path) - 1
        seconds = path_seconds(self._problem, last, end) + self._problem.seconds[path[end]]
        return self._units(seconds - self._problem.seconds[path[last]])

    def _between(self, first: int, last: int) -> int:
        """The least time from the start of a place to the end of another."""
        return sum(self._seconds[first : last + 1]) + sum(self._lags[first:last])

    def _room_terms(self, parts: Sequence[tuple[int, int, int, float]]) -> tuple[list[float], list[float]]:
        """By place that a microbatch waits for: the room over time that it needs then, and more per unit of waiting."""
        needs, more = ([0.0] * len(self._places) for _ in range(2))
        for forward, known, time, size in parts:
            for place in range(known + 1):
                needs[place] += size * (self._between(max(place, forward), known) + time)
                more[place] += size * (place > forward)
        return needs, more

    def least(self, states: int) -> float:
        """Return the least seconds of an order, or less where the search stops after this number of states."""
        count, m = len(self._places), self._problem.num_microbatches
        slots = [self._slots(size) for _, _, _, size in self._parts]
        begin: _State = (
            (0,) * count, 0, 0, (0,) * len(self._own), ((),) * count, tuple((0,) * each for each in slots), 0
        )  # fmt: skip
        ticket = itertools.count()
        waiting = [(0.0, 0, next(ticket), begin, _values(begin))]
        seen: dict[_Times, list[_Times]] = {}
        last = count * m
        for number in itertools.count():
            value, done, _, state, values = heapq.heappop(waiting)
            if -done == last or number == states:
                return value / self._scale
            if number and not any(values is each for each in seen[state[0]]):
                continue  # another one was found that is earlier
            for after in self._next(state):
                new, known = _values(after), seen.setdefault(after[0], [])
                if any(all(map(operator.le, each, new)) for each in known):
                    continue
                known[:] = [each for each in known if not all(map(operator.le, new, each))]
                known.append(new)
                entry = max(value, self._judged(after)), done - 1, next(ticket), after, new
                heapq.heappush(waiting, entry)
        raise AssertionError("there is an order: one microbatch after another")

    def _slots(self, size: float) -> int:
        """The most microbatches of which the holding rank holds a part of this size."""
        most = self._problem.limit_of(self._holding) / size * (1 + ROUNDING) + ROUNDING
        return int(min(self._problem.num_microbatches, most))

    def _next(self, state: _State) -> Iterator[_State]:
        """Yield the states one computation later."""
        counts, now, free, pending, ready, leaving, _ = state
        for place, number in enumerate(counts):
            if number == self._problem.num_microbatches or (place and not ready[place]):
                continue
            least = max(now, self._early[place][number])
            if place:
                least = max(least, ready[place][0])
            if not self._is_busy[place]:
                start = self._room_at(counts, leaving, place, least)
                if start is not None:
                    yield self._after(state, place, start, free, pending)
                continue
            for weights, until in self._weights_before(counts, pending, place, free, least):
                start = max(least, until)
                yield self._after(state, place, start, start + self._seconds[place], weights)

    def _room_at(self, counts: _Times, leaving: tuple[_Times, ...], place: int, least: int) -> int | None:
        """When the holding rank has room for a forward, from `least` on; None: not yet known."""
        limit = self._problem.limit_of(self._holding) * (1 + ROUNDING)
        held, later = self._takes[place], []
        for (forward, known, _, size), times in zip(self._parts, leaving, strict=True):
            held += size * (counts[forward] - counts[known])
            for time in times:
                if time > least:
                    held += size
                    later.append((time, size))
        later.sort()
        for time, size in later:
            if held <= limit:
                break
            held, least = held - size, time
        return least if held <= limit else None

    def _weights_before(
        self, counts: _Times, pending: _Times, place: int, free: int, least: int
    ) -> Iterator[tuple[_Times, int]]:
        """Yield, for each choice of the W that stand before a computation, those that remain and the end of the chosen.

        `least`: the least start of the computation if no W stand before it.
        """
        problem, weights = self._problem, self._weights
        room = problem.limit_of(self._busy) * (1 + ROUNDING) - self._takes[place]
        sizes = self._deferred
        for each, (stage, mine) in enumerate(zip(self._stages, self._is_busy, strict=True)):
            if mine:
                room -= self._held(stage) * counts[each] * (1 if self._is_forward[each] else -1)
        for chosen in itertools.product(*(range(each + 1) for each in pending)):
            remain = tuple(all_ - part for all_, part in zip(pending, chosen, strict=True))
            spare = room - sum(each * size for each, size in zip(remain, sizes, strict=True))
            if spare < 0:
                continue
            until = free + sum(each * time for each, time in zip(chosen, weights, strict=True))
            start = max(least, until)
            fits = any(each and until + time <= start for each, time in zip(remain, weights, strict=True))
            behind = until > least and any(
                each and time and until - time >= least and spare >= size
                for each, time, size in zip(chosen, weights, sizes, strict=True)
            )
            if not fits and not behind:
                yield remain, until

    def _after(self, state: _State, place: int, start: int, free: int, pending: _Times) -> _State:
        counts, _, _, _, ready, leaving, least = state
        number, end = counts[place], start + self._seconds[place]
        if self._is_busy[place] and not self._is_forward[place]:
            own = self._own.index(self._stages[place])
            if self._problem.splits:
                pending = (*pending[:own], pending[own] + 1, *pending[own + 1 :])
            if own == 0 and number + 1 == self._problem.num_microbatches:
                least = end + self._behind[0] + self._units(weight_seconds(self._problem, 0))
        come = list(ready)
        come[place] = come[place][1:]
        if place + 1 < len(come):
            come[place + 1] += (max(end + self._lags[place], self._early[place + 1][number]),)
        busy = max(start, free)
        come = [
            tuple(max(each, busy if mine else start) for each in times)
            for times, mine in zip(come, self._is_busy, strict=True)
        ]
        left = []
        for (_, known, time, _), times in zip(self._parts, leaving, strict=True):
            if known == place:
                times = (*times[1:], end + time)
            left.append(tuple(max(each, start) for each in times))
        counts = (*counts[:place], number + 1, *counts[place + 1 :])
        return counts, start, free, pending, tuple(come), tuple(left), least

    def _judged(self, state: _State) -> float:
        """A lower bound on the end of all that goes on from a state."""
        counts, now, free, pending, ready, leaving, least = state
        m = self._problem.num_microbatches
        work = free + sum(map(operator.mul, pending, self._weights))
        for place, number in enumerate(counts):
            if number < m:
                begin = ready[place][0] if ready[place] else now
                least = max(least, begin + self._rests[place][number])
                work += (m - number) * self._work[place]
        found = float(max(least, work))
        if counts[self._last] < m:
            needs = self._needs(0, counts, ready, free)
            needs += sum(each * size for each, size in zip(pending, self._of_weights, strict=True))
            needs -= self._spared * self._behind[0]
            found = max(found, free + self._behind[0] + needs / self._rooms[0])
        if self._parts and counts[self._parts[0][1]] < m:
            needs = self._needs(1, counts, ready, now)
            needs += sum(
                size * (sum(times) - now * len(times))
                for (_, _, _, size), times in zip(self._parts, leaving, strict=True)
            )
            found = max(found, now + self._behind[1] - self._longest + needs / self._rooms[1])
        return found

    def _needs(self, which: int, counts: _Times, ready: tuple[_Times, ...], now: int) -> float:
        """The room over time that the microbatches on their way, and those to come, need from now on."""
        needs, more = self._terms[which]
        total = (self._problem.num_microbatches - counts[0]) * needs[0]
        for place, times in enumerate(ready):
            if times:
                total += len(times) * needs[place] + more[place] * (sum(times) - len(times) * now)
        return total


def _values(state: _State) -> _Times:
    """What is better if it is less, for states with equal counts."""
    _, now, free, pending, ready, leaving, least = state
    return now, free, *pending, *itertools.chain(*ready, *leaving), least
