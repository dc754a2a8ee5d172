"""Words to begin a search with: every registered order that has the placement, and patterns that repeat.

A *pattern* gives each queue an offset; microbatch n passes the queue n periods later. If the period is the time that a
rank computes for one microbatch, and no two offsets of the rank overlap modulo the period, the rank is always busy
between fill and drain (modulo scheduling, Rau 1994; for pipelines the building blocks of Qi et al. 2024, "Pipeline
Parallelism with Controllable Memory"). The offsets are found along the path of one microbatch, each at the first free
place. Waits along the path decide which places are free further on, and how many microbatches are in flight. They are
the same for all stages of a leg, the way from one end of the ranks to the other.
"""

import math
import random
from bisect import insort
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain, pairwise, product

from megatron.pipeline.program.instruction import BEGINS_BACKWARD, Instruction, Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.orders import ORDERS
from megatron.pipeline.synthesis.problem import NONE, ROUNDING, Problem, Words
from megatron.pipeline.synthesis.timing import Clock

_RESONANCES = 1.0, 0.5, 1 / 3, 2 / 3, 0.25, 0.75
_PERIODS = 1.0, 1.0, 1.02, 1.05, 1.1, 1.2
_PARENTS = 8
_GROUP_SIZES = 4  # the number of group sizes that are tried for orders that take groups of microbatches
_MOST_STEPS = 200  # the most places that are tried for one queue


def named_words(problem: Problem, weights: str = "flush", num_batches: int = 1) -> Iterator[tuple[str, Words]]:
    """Yield the words of each registered order that takes the stages as they are placed, with its name.

    An order's whole backwards become I and W where the problem splits backwards, and the other way round.
    """
    batches = [problem.num_microbatches] * num_batches
    choices: list[dict[str, int | bool]] = [{}, {"extra_warmup": True}]
    p, found = problem.num_ranks, []
    sizes = range(p + 1, min(2 * p, problem.num_microbatches) + 1, math.ceil(p / _GROUP_SIZES))
    choices += [{"microbatch_group_size": size} for size in sizes]
    for name, each in product(ORDERS, choices):
        with suppress(ValueError):
            schedule = Schedule(
                order=name, weights=weights, num_stages=problem.num_stages, rank_of_stage=problem.rank_of_stage, **each
            )
            schedule.validate(problem.num_microbatches)
            rows = [schedule.computations(rank, batches) for rank in range(p)]
            if rows not in found:
                found.append(rows)
                label = name + "".join(f" {key}={value}" for key, value in each.items())
                yield label, [_word(problem, row) for row in rows]


def _word(problem: Problem, row: tuple[Instruction, ...]) -> list[int]:
    """Return a row in the queues of the problem."""
    word = []
    for instruction in row:
        kind, stage = instruction.kind, instruction.stage
        if kind is Kind.FORWARD:
            word.append(problem.number_of[kind, stage])
        elif kind in BEGINS_BACKWARD:
            kinds = [problem.begins_backward]
            if stage in problem.recomputed:
                kinds.insert(0, Kind.RECOMPUTE)
            if problem.splits and kind is Kind.BACKWARD:
                kinds.append(Kind.BACKWARD_WEIGHT)
            word += [problem.number_of[each, stage] for each in kinds]
        elif kind is Kind.BACKWARD_WEIGHT and problem.splits:
            word.append(problem.number_of[kind, stage])
    return word


def legs_of(rank_of_stage: tuple[int, ...]) -> list[int]:
    """Return the leg of each stage: a leg ends where the ranks turn round or begin again."""
    legs, direction = [0], 0
    for before, after in pairwise(rank_of_stage):
        step = after - before
        turns = direction != 0 and (step > 0) != (direction > 0)
        legs.append(legs[-1] + (step == 0 or turns))
        direction = 0 if step == 0 or turns else step
    return legs


@dataclass(frozen=True)
class Pattern:
    """The parameters of a pattern.

    Attributes:
        period: the period, in seconds.
        strides: for each leg of the path, the wait before each computation but the first.
        turns: for each leg, the wait before its first computation.
    """

    period: float
    strides: tuple[float, ...]
    turns: tuple[float, ...]


class Patterns:
    """Makes words from patterns, at random and by changing the best so far.

    Attributes:
        problem: the problem. Its number of microbatches may be any.
        hops: for each leg of the path, the mean seconds from rank to rank.
    """

    def __init__(self, problem: Problem, clock: Clock) -> None:
        self.problem, self._clock = problem, clock
        self._legs = legs_of(problem.rank_of_stage)
        self._num_legs = 2 * (max(self._legs) + 1)
        self.hops = self._mean_hops()
        self._best: list[tuple[float, float, int, Pattern]] = []
        self._made = 0

    def words(self, chance: random.Random) -> tuple[float, Words] | None:
        """Return the seconds of words that keep the limits, and the words; or None where this attempt gave none."""
        if self.problem.unit <= 0:  # computations take no time, so there is no period
            return None
        if self._best and chance.random() < 0.7:
            waits = self.changed(chance.choice(self._best)[3], chance)
        else:
            waits = self.at_random(chance)
        offsets = self.offsets(waits)
        if offsets is None:
            return None
        self._made += 1
        if excess := self.excess(self.held([offsets], waits.period)):
            self._keep(excess, 0.0, waits)
            return None
        made = self.timed([offsets], waits.period)
        if made is not None:
            self._keep(0.0, made[0], waits)
        return made

    def timed(self, offsets: Sequence[list[float]], period: float) -> tuple[float, Words] | None:
        """Return the seconds of the words of a pattern, and the words; None if they exceed a limit.

        `offsets`: of each microbatch that enters in a period.
        """
        words = [self._word(rank, offsets, period) for rank in range(self.problem.num_ranks)]
        times = self._clock.times(words)
        return None if times is None or not self.problem.accepts(words) else (times.seconds, words)

    def _keep(self, excess: float, seconds: float, waits: Pattern) -> None:
        if not any(each[:2] == (excess, seconds) for each in self._best):
            insort(self._best, (excess, seconds, self._made, waits))
            del self._best[_PARENTS:]

    def held(self, offsets: Sequence[list[float]], period: float) -> list[float]:
        """The most that each rank holds once the pattern has begun to repeat. `offsets`: as for `timed`.

        It needs no words, so its time does not grow with the number of microbatches.
        """
        problem, most = self.problem, [0.0] * self.problem.num_ranks
        for rank, own in enumerate(problem.queues_of_rank):
            passed = [(other, of_microbatch[other]) for of_microbatch in offsets for other in own]
            for queue, begin in passed:
                if problem.takes[queue]:
                    held = 0.0
                    for other, before in passed:
                        periods, into = divmod(begin - before, period)
                        held += (periods + 1) * (problem.takes[other] - problem.gives[other])
                        held += problem.gives[other] * (into == 0.0)
                    most[rank] = max(most[rank], held)
        return most

    def excess(self, held: list[float]) -> float:
        """The sum over the ranks of the fractions by which they exceed their limits."""
        limits = map(self.problem.limit_of, range(self.problem.num_ranks))
        return sum(max(0.0, each / limit - 1 - ROUNDING) for each, limit in zip(held, limits, strict=True))

    def _word(self, rank: int, offsets: Sequence[list[float]], period: float) -> list[int]:
        turns = (
            (offsets[microbatch % len(offsets)][queue] + period * (microbatch // len(offsets)), queue)
            for queue in self.problem.queues_of_rank[rank]
            for microbatch in range(self.problem.num_microbatches)
        )
        return [queue for _, queue in sorted(turns)]

    def _leg(self, place: int) -> int:
        """The leg of a place of the path."""
        stages = self.problem.num_stages
        return self._legs[place] if place < stages else self._num_legs - 1 - self._legs[2 * stages - 1 - place]

    def offsets(self, waits: Pattern, *, moves: bool = True) -> list[float] | None:
        """Return when microbatch 0 passes each queue, or None where it finds no free place. `moves`: as below."""
        found = self.offsets_of_entries(waits, (0.0,), moves=moves)
        return None if found is None else found[0]

    def offsets_of_entries(
        self, waits: Pattern, entries: Sequence[float], *, moves: bool = True
    ) -> list[list[float]] | None:
        """Return when each of the microbatches that enter in a period passes each queue, or None without a free place.

        `entries`: when they enter. If `moves`, a W without a free place may overlap other computations, which move when
        words are timed.
        """
        problem, period, found = self.problem, waits.period, []
        busy: list[list[tuple[float, float]]] = [[] for _ in range(problem.num_ranks)]
        for entry in entries:
            if (offsets := self._passed(waits, entry, busy)) is None:
                return None
            found.append(offsets)
        weights = [each for each, (kind, _) in enumerate(problem.queues) if kind is Kind.BACKWARD_WEIGHT]
        waiting = [(offsets[problem.before[queue]], queue, offsets) for offsets in found for queue in weights]
        for begin, queue, offsets in sorted(waiting, key=lambda each: each[0]):
            ready = begin + problem.seconds[problem.before[queue]]
            at = _free(busy[problem.rank_of_queue[queue]], ready, problem.seconds[queue], period)
            if at is None and not moves:
                return None
            offsets[queue] = ready if at is None else at
        return found

    def _passed(self, waits: Pattern, entry: float, busy: list[list[tuple[float, float]]]) -> list[float] | None:
        """Return when a microbatch that enters at `entry` passes each queue of the path; its places become `busy`."""
        problem, period = self.problem, waits.period
        offsets, time, leg = [0.0] * len(problem.queues), entry, self._leg(0)
        for place, queue in enumerate(problem.path):
            stage, now = problem.queues[queue][1], self._leg(place)
            if place:
                time += problem.seconds[problem.path[place - 1]] + problem.sources[queue][1]
                time += waits.strides[now] if now == leg else waits.turns[now]
            leg, before = now, 0.0
            if place >= problem.num_stages and stage in problem.recomputed:
                before = problem.seconds[problem.number_of[Kind.RECOMPUTE, stage]]
            at = _free(busy[problem.rank_of_queue[queue]], time, before + problem.seconds[queue], period)
            if at is None:
                return None
            if before:
                offsets[problem.number_of[Kind.RECOMPUTE, stage]] = at
            offsets[queue] = time = at + before
        return offsets

    def at_random(self, chance: random.Random) -> Pattern:
        """Choose waits at random. Mostly the strides of two successive legs add up to a part of the period.

        If such legs pass the ranks in opposite directions, their computations then meet on no rank or on all ranks.
        """
        period = self.problem.unit * chance.choice(_PERIODS)
        strides = [0.0] * self._num_legs
        if chance.random() < 0.75:
            resonance = chance.choice(_RESONANCES) * period
            for leg in range(0, self._num_legs, 2):
                spare = (resonance - self.hops[leg] - self.hops[leg + 1]) % period
                part = chance.random()
                strides[leg], strides[leg + 1] = spare * part, spare * (1 - part)
        else:
            strides = [chance.choice((0.0, chance.random() * 0.15)) * period for _ in strides]
        most = max(1, math.ceil(self.problem.num_ranks / 2))
        turns = [chance.choice((0, 0, 0, chance.randrange(most + 1))) * period for _ in strides]
        return Pattern(period, tuple(strides), tuple(turns))

    def changed(self, waits: Pattern, chance: random.Random) -> Pattern:
        """Return `waits` with a random change of the period, of a stride, or of a turn."""
        leg, kind = chance.randrange(self._num_legs), chance.random()
        if kind < 0.15:
            return replace(waits, period=max(0.8 * self.problem.unit, waits.period * (1 + chance.gauss(0, 0.03))))
        if kind < 0.5:
            strides = list(waits.strides)
            step = chance.gauss(0, chance.choice((0.003, 0.03))) * waits.period
            strides[leg] = max(0.0, strides[leg] + step)
            if chance.random() < 0.5:  # the sum with the leg beside it stays
                strides[leg ^ 1] = max(0.0, strides[leg ^ 1] - step)
            return replace(waits, strides=tuple(strides))
        turns = list(waits.turns)
        turns[leg] = max(0.0, turns[leg] + chance.choice((-1.0, 1.0, chance.gauss(0, 0.2))) * waits.period)
        return replace(waits, turns=tuple(turns))

    def _mean_hops(self) -> list[float]:
        """The mean seconds from rank to rank on each leg of the path."""
        problem = self.problem
        sums, counts = [0.0] * self._num_legs, [0] * self._num_legs
        for place, queue in enumerate(problem.path[:-1]):
            sums[self._leg(place)] += problem.seconds[queue] + problem.sources[problem.path[place + 1]][1]
            counts[self._leg(place)] += 1
        return [total / max(1, count) for total, count in zip(sums, counts, strict=True)]


def _free(busy: list[tuple[float, float]], time: float, seconds: float, period: float) -> float | None:
    """Take the first time from `time` on at which a rank has `seconds` free in each period; None if there is none."""
    for _ in range(_MOST_STEPS):
        place, wait = time % period, 0.0
        for begin, length in busy:
            if (into := (place - begin) % period) < length * (1 - ROUNDING):
                wait = max(wait, length - into)
            elif (ahead := (begin - place) % period) < seconds * (1 - ROUNDING):
                wait = max(wait, ahead + length)
        if not wait:
            busy.append((place, seconds))
            return time
        time += wait
    return None


def one_after_another(problem: Problem) -> Words:
    """Return words that pass each microbatch through the whole pipeline before the next one: they need least memory."""
    one = [problem.one_microbatch(rank) for rank in range(problem.num_ranks)]
    return [list(chain.from_iterable([word] * problem.num_microbatches)) for word in one]


def listed(problem: Problem, words: Words) -> Words | None:
    """Return words made by list scheduling: a free rank takes the first in `words` that is ready and fits its limit.

    A forward leaves room for the forwards of later stages of its rank, so the oldest microbatch can always go on.
    Returns None if a limit is too small even so.
    """
    m, ranks = problem.num_microbatches, problem.rank_of_queue
    turns: list[list[int]] = [[] for _ in problem.queues]
    for word in words:
        for place, queue in enumerate(word):
            turns[queue].append(place)
    later_forwards, feeds = _later_forwards(problem), [[] for _ in problem.queues]
    for queue, (source, delay) in enumerate(problem.sources):
        if source != NONE:
            feeds[source].append((queue, delay))
    ready = [[0.0 if source == NONE else math.inf] * m for source, _ in problem.sources]
    counts, held, free = [0] * len(problem.queues), [0.0] * problem.num_ranks, [0.0] * problem.num_ranks
    limits = [problem.limit_of(rank) * (1 + ROUNDING) for rank in range(problem.num_ranks)]
    made: Words = [[] for _ in range(problem.num_ranks)]
    wakes = [(0.0, rank) for rank in range(problem.num_ranks)]
    while wakes:
        time, rank = heappop(wakes)
        if time < free[rank]:
            continue
        first, later = None, math.inf
        for queue in problem.queues_of_rank[rank]:
            number, ahead = counts[queue], problem.before[queue]
            if number == m or (ahead != NONE and number >= counts[ahead]):
                continue
            if takes := problem.takes_at[queue][number]:
                room = sum(problem.takes_at[each][number] for each in later_forwards[queue])
                if held[rank] + takes + room > limits[rank]:
                    continue
            if ready[queue][number] > time:
                later = min(later, ready[queue][number])
            elif first is None or turns[queue][number] < turns[first][counts[first]]:
                first = queue
        if first is None:
            if later < math.inf:
                heappush(wakes, (later, rank))
            continue
        number = counts[first]
        counts[first] += 1
        held[rank] += problem.takes_at[first][number] - problem.gives[first]
        free[rank] = time + problem.seconds_at[first][number]
        made[rank].append(first)
        heappush(wakes, (free[rank], rank))
        for queue, delay in feeds[first]:
            ready[queue][number] = free[rank] + delay
            heappush(wakes, (max(ready[queue][number], free[ranks[queue]]), ranks[queue]))
    return made if all(count == m for count in counts) else None


def _later_forwards(problem: Problem) -> list[list[int]]:
    """For each forward, the forwards of later stages of its rank; none for other queues."""
    return [
        [each for each in problem.queues_of_rank[problem.rank_of_queue[queue]]
         if kind is problem.queues[each][0] is Kind.FORWARD and problem.queues[each][1] > stage]
        for queue, (kind, stage) in enumerate(problem.queues)
    ]  # fmt: skip
