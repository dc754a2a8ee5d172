"""Make words faster by pulling computations into gaps, from the beginning and from the end in turns.

A sweep goes through the words in the order of time. Where a rank waits, it takes a later computation that is ready,
ends before the awaited one has to start, and fits the limit until the place from which it is pulled. So nothing starts
later than before, and what follows the gaps moves up. A sweep with time running backwards then puts everything as late
as it can be. Forwards thus leave room, and gaps gather where the next sweep fills them. This is the justification of
project scheduling (Li and Willis 1992; Valls, Ballestin and Quintanilla 2005), with memory for the resource.

In a backward sweep, a computation waits for the computations that otherwise wait for it. It occupies the memory that it
otherwise frees, and frees the memory that it otherwise occupies.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from megatron.pipeline.synthesis.problem import NONE, ROUNDING, Problem, Words
from megatron.pipeline.synthesis.timing import Clock

_LATE = 0.05, 0.2, 0.5, 1.0  # in the work of a rank for one microbatch
_PARTS = 0.02, 0.1, 0.3, 1.0
_PATIENCE = 3  # the number of pairs of sweeps without a gain after which words are given up


class Squeeze:
    """Squeezes words of one problem.

    Attributes:
        problem, clock: the problem, and the clock that times its words.
    """

    def __init__(self, problem: Problem, clock: Clock) -> None:
        followers, after = [(NONE, 0.0)] * len(problem.queues), [NONE] * len(problem.queues)
        for queue, ((source, delay), before) in enumerate(zip(problem.sources, problem.before, strict=True)):
            if source != NONE:
                followers[source] = queue, delay
            if before != NONE:
                after[before] = queue
        self.problem, self.clock = problem, clock
        gives = [(each,) * problem.num_microbatches for each in problem.gives]
        seconds, takes = ([each[::-1] for each in values] for values in (problem.seconds_at, problem.takes_at))
        self._onwards = _Direction(
            problem, clock, problem.sources, followers, problem.before, problem.seconds_at, problem.takes_at, gives
        )
        self._backwards = _Direction(
            problem, Clock(problem, followers, seconds), followers, problem.sources, after, seconds, gives, takes
        )

    def loosened(self, words: Words, chance: random.Random) -> Words:
        """Return the words after a loose sweep, onwards or backwards: some gaps get computations that end too late."""
        loose = _Loose(self.problem.unit * chance.choice(_LATE), chance.choice(_PARTS), chance)
        if chance.random() < 0.5:
            return self._onwards.sweep(words, loose)
        return [word[::-1] for word in self._backwards.sweep([word[::-1] for word in words], loose)]

    def words(self, words: Words, most: int) -> tuple[float, Words]:
        """Squeeze words without a deadlock by up to `most` pairs of sweeps. Return the seconds and the words."""
        times = self.clock.times(words)
        assert times is not None, "words to squeeze have no deadlock"
        seconds, mean_start, best, vain = times.seconds, times.mean_start, words, 0
        for _ in range(most):
            backwards = self._backwards.sweep([word[::-1] for word in words])
            words = self._onwards.sweep([word[::-1] for word in backwards])
            times = self.clock.times(words)
            vain = 0 if times.seconds < seconds * (1 - ROUNDING) else vain + 1
            if (times.seconds, times.mean_start) < (seconds, mean_start):
                seconds, mean_start, best = times.seconds, times.mean_start, words
            if vain == _PATIENCE:
                break
        return seconds, best


@dataclass(frozen=True, slots=True)
class _Loose:
    """How loose a sweep is.

    Attributes:
        seconds: by how much a computation that a rank takes for a gap may end too late.
        part: the part of the gaps in which a computation may end too late.
        chance: draws these gaps.
    """

    seconds: float
    part: float
    chance: random.Random


@dataclass(frozen=True, slots=True)
class _Direction:
    """A problem in one direction of time.

    Attributes:
        sources: for each queue, the queue of another stage that it waits for, and the delay; or NONE.
        followers: for each queue, the queue of another stage that waits for it, and the delay; or NONE.
        before: for each queue, the queue of its stage that a microbatch passes first; or NONE.
        seconds: for each queue, the seconds of its computations in their order.
        takes, gives: the memory that a computation occupies from its start on, and frees at its end, likewise.
    """

    problem: Problem
    clock: Clock
    sources: Sequence[tuple[int, float]]
    followers: Sequence[tuple[int, float]]
    before: Sequence[int]
    seconds: Sequence[Sequence[float]]
    takes: Sequence[Sequence[float]]
    gives: Sequence[Sequence[float]]

    def sweep(self, words: Words, loose: _Loose | None = None) -> Words:
        """Return words with filled gaps. Nothing starts later than before, unless the sweep is loose."""
        return _Sweep(self, words, loose).run()


class _Sweep:
    """One sweep over words.

    Attributes:
        made: for each rank, the computations that it has taken so far.
    """

    def __init__(self, way: _Direction, words: Words, loose: _Loose | None) -> None:
        problem = way.problem
        times = way.clock.times(words)
        assert times is not None, "sweeps make no deadlock"
        self._way, self._words, self._starts, self._loose = way, words, times.starts, loose
        self._rounding = ROUNDING * times.seconds
        self._ready = [[0.0 if source == NONE else math.inf] * problem.num_microbatches for source, _ in way.sources]
        self._places: list[list[int]] = [[] for _ in problem.queues]
        self._numbers: list[list[int]] = []  # for each rank, the number of each place's computation in its queue
        for word in words:
            numbers = []
            for place, queue in enumerate(word):
                numbers.append(len(self._places[queue]))
                self._places[queue].append(place)
            self._numbers.append(numbers)
        self._counts = [0] * len(problem.queues)
        self._held, self._next = [0.0] * problem.num_ranks, [0] * problem.num_ranks
        self._taken = [bytearray(len(word) + 1) for word in words]
        self.made: Words = [[] for _ in words]

    def run(self) -> Words:
        problem, ready, counts = self._way.problem, self._ready, self._counts
        free, wakes = [0.0] * problem.num_ranks, [(0.0, rank) for rank in range(problem.num_ranks)]
        while wakes:
            time, rank = heappop(wakes)
            if time < free[rank]:
                continue
            queue = self._choose(rank, time)
            if queue is None:
                continue
            number = counts[queue]
            counts[queue] += 1
            self._taken[rank][self._places[queue][number]] = 1
            self._held[rank] += self._way.takes[queue][number] - self._way.gives[queue][number]
            self.made[rank].append(queue)
            free[rank] = time + self._way.seconds[queue][number]
            heappush(wakes, (free[rank], rank))
            follower, delay = self._way.followers[queue]
            if follower != NONE:
                other = problem.rank_of_queue[follower]
                ready[follower][number] = free[rank] + delay
                heappush(wakes, (max(ready[follower][number], free[other]), other))
        assert all(len(word) == len(made) for word, made in zip(self._words, self.made, strict=True))
        return self.made

    def _choose(self, rank: int, time: float) -> int | None:
        """Choose the rank's next computation: its next one in the word, or if that is not ready, one for the gap."""
        word, taken, place = self._words[rank], self._taken[rank], self._next[rank]
        while taken[place]:
            place += 1
        self._next[rank] = place
        if place == len(word):
            return None
        awaited, counts, ready = word[place], self._counts, self._ready
        if ready[awaited][counts[awaited]] <= time:
            return awaited
        problem, before = self._way.problem, self._way.before
        until, loose = self._starts[rank][place] + self._rounding, self._loose
        if loose is not None and loose.chance.random() < loose.part:
            until += loose.seconds
        chosen, first = None, len(word)
        for queue in problem.queues_of_rank[rank]:
            number = counts[queue]
            if (
                number < problem.num_microbatches
                and (before[queue] == NONE or number < counts[before[queue]])
                and ready[queue][number] <= time
                and time + self._way.seconds[queue][number] <= until
                and self._places[queue][number] < first
                and self._fits(rank, queue, number)
            ):
                chosen, first = queue, self._places[queue][number]
        return chosen

    def _fits(self, rank: int, queue: int, number: int) -> bool:
        """Whether the rank keeps its limit if it takes a computation before the ones in front that are still left."""
        takes, gives, taken = self._way.takes, self._way.gives, self._taken[rank]
        limit = self._way.problem.limit_of(rank) * (1 + ROUNDING)
        if not takes[queue][number] or math.isinf(limit):
            return True
        held = self._held[rank] + takes[queue][number]
        if held > limit:
            return False
        held -= gives[queue][number]
        word, numbers = self._words[rank], self._numbers[rank]
        for at in range(self._next[rank], self._places[queue][number]):
            if not taken[at]:
                other, own = word[at], numbers[at]
                held += takes[other][own]
                if held > limit:
                    return False
                held -= gives[other][own]
        return True
