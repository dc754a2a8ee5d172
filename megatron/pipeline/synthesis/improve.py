"""Make words faster by moving one computation at a time, or by changing some and squeezing the rest.

A move takes a computation to another place of its word. Half of the moves take a computation from the critical path. A
third pull a later computation into a gap in which its rank waits. The others are at random. A move that breaks an order
or a limit is dropped before it is timed. The climb minimises the time plus the mean start of all computations, because
the time alone does not show that fill or drain have become shorter on some ranks only. Slower words are accepted with a
probability that falls (simulated annealing, Kirkpatrick et al. 1983).

`shaken` changes words by a few warm moves or by a loose sweep, and squeezes them (iterated local search, Lourenço et
al. 2003). A pair of sweeps takes the time of some tens of moves. It shortens fill and drain on all ranks together,
which single moves do not.
"""

import math
import random
from collections.abc import Sequence

from megatron.pipeline.synthesis.problem import Problem, Words
from megatron.pipeline.synthesis.squeeze import Squeeze
from megatron.pipeline.synthesis.timing import Clock, Times

_WARMEST = 0.01  # the first temperature, in the work of a rank for one microbatch
_STEPS = (-1, -1, -1, 1, 1, -2, 2, -3, 3, -5, 5, -8, 8)
_SLACK = 1e-9
_SWEEPS = 6  # the most pairs of sweeps behind a change
_FEW_MOVES = 60, 200
_WORSE = 0.02  # the temperature of changes, in the work of a rank for one microbatch


class Climb:
    """Improves words of one problem.

    Attributes:
        words: the current words.
        best: the fastest words so far, with their seconds.
    """

    def __init__(self, problem: Problem, clock: Clock, words: Words, chance: random.Random) -> None:
        self._problem, self._clock, self._chance = problem, clock, chance
        self._unit = problem.unit
        self.words = [list(word) for word in words]
        times = clock.times(self.words)
        assert times is not None, "words to begin with have no deadlock"
        self.best: tuple[float, Words] = times.seconds, [list(word) for word in words]
        self._accept(times)

    def run(self, attempts: int, warmth: float = 1.0) -> None:
        """Try a number of moves, from `warmth` times the first temperature down to none."""
        chance = self._chance
        for attempt in range(attempts):
            move = self._move()
            if move is None:
                continue
            rank, word, place = move
            before = self.words[rank]
            self.words[rank] = word
            times = self._clock.times(self.words, self._times, rank, place)
            temperature = _WARMEST * warmth * self._unit * (1 - attempt / attempts) ** 2 + 1e-12 * self._unit
            if times is None:
                self.words[rank] = before
                continue
            worse = times.seconds + times.mean_start - self._cost
            if accepts(worse, temperature, chance):
                self._accept(times)
                if times.seconds < self.best[0] * (1 - _SLACK):
                    self.best = times.seconds, [list(each) for each in self.words]
            else:
                self.words[rank] = before

    def _accept(self, times: Times) -> None:
        self._times, self._cost = times, times.seconds + times.mean_start
        self._gaps: list[tuple[int, int, float]] | None = None
        self._path: list[tuple[int, int]] | None = None

    def _move(self) -> tuple[int, list[int], int] | None:
        """Choose a move. Returns a rank, its new word, and the first place that differs.

        Returns None if the choice changes nothing or is not allowed.
        """
        chance, kind = self._chance, self._chance.random()
        if kind < 0.35 and (pulled := self._pull()):
            rank, place, to = pulled
        else:
            if kind < 0.85:
                rank, place = chance.choice(self._critical())
            else:
                rank = chance.randrange(len(self.words))
                place = chance.randrange(len(self.words[rank]))
            to = min(max(0, place + chance.choice(_STEPS)), len(self.words[rank]) - 1)
        word = self.words[rank]
        if word[place] == word[to]:
            return None
        moved = word[:]
        moved.insert(to, moved.pop(place))
        if moved == word or not self._problem.is_in_order(moved, rank):
            return None
        return rank, moved, min(place, to)

    def _pull(self) -> tuple[int, int, int] | None:
        """Choose a gap, and a later computation of its rank that is ready before the gap ends."""
        if self._gaps is None:
            self._gaps = self._find_gaps()
        if not self._gaps:
            return None
        rank, place, end = self._chance.choice(self._gaps)
        word, queue = self.words[rank], self._chance.choice(self._problem.queues_of_rank[rank])
        if queue not in word[place + 1 :]:
            return None
        at = word.index(queue, place + 1)
        source, delay = self._problem.sources[queue]
        if source >= 0 and self._times.ends[source][word[:at].count(queue)] + delay > end:
            return None
        return rank, at, place

    def _find_gaps(self) -> list[tuple[int, int, float]]:
        """For each wait of a rank, the rank, the place of the computation that waits, and its start."""
        gaps, ends = [], [iter(each) for each in self._times.ends]
        for rank, (word, starts) in enumerate(zip(self.words, self._times.starts, strict=True)):
            free = 0.0
            for place, (queue, start) in enumerate(zip(word, starts, strict=True)):
                if start > free + _SLACK * self._unit:
                    gaps.append((rank, place, start))
                free = next(ends[queue])
        return gaps

    def _critical(self) -> list[tuple[int, int]]:
        """The rank and place of each computation of a longest path."""
        if self._path is None:
            self._path = self._find_path()
        return self._path

    def _find_path(self) -> list[tuple[int, int]]:
        problem, starts, ends = self._problem, self._times.starts, self._times.ends
        places: list[list[tuple[int, int]]] = [[] for _ in problem.queues]
        microbatches: list[list[int]] = []
        for rank, word in enumerate(self.words):
            numbers = []
            for place, queue in enumerate(word):
                numbers.append(len(places[queue]))
                places[queue].append((rank, place))
            microbatches.append(numbers)
        rank = max(range(len(starts)), key=lambda each: ends[self.words[each][-1]][-1])
        place, path = len(self.words[rank]) - 1, []
        while True:
            path.append((rank, place))
            start = starts[rank][place]
            if start <= 0.0:
                return path
            if place:
                before = self.words[rank][place - 1]
                if ends[before][microbatches[rank][place - 1]] >= start - _SLACK * self._unit:
                    place -= 1
                    continue
            source, _ = problem.sources[self.words[rank][place]]
            rank, place = places[source][microbatches[rank][place]]


def changed_words(squeeze: Squeeze, words: Words, chance: random.Random, few_moves: Sequence[int]) -> Words:
    """Return words changed by a loose sweep or by warm moves. `few_moves`: the possible numbers of moves."""
    if chance.random() < 0.5:
        return squeeze.loosened(words, chance)
    climb = Climb(squeeze.problem, squeeze.clock, words, chance)
    climb.run(chance.choice(few_moves), warmth=chance.choice((1.0, 4.0)))
    return climb.words


def accepts(worse: float, temperature: float, chance: random.Random) -> bool:
    """Whether to go on with words that take `worse` seconds more."""
    return worse <= 0 or (temperature > 0 and chance.random() < math.exp(-worse / temperature))


def shaken(squeeze: Squeeze, words: Words, chance: random.Random, count: int) -> tuple[float, Words]:
    """Change and squeeze words `count` times. Returns the fastest words and their seconds."""
    now = best = squeeze.words(words, _SWEEPS)
    for _ in range(count):
        made = squeeze.words(changed_words(squeeze, now[1], chance, _FEW_MOVES), _SWEEPS)
        if accepts(made[0] - now[0], _WORSE * squeeze.problem.unit, chance):
            now = made
        best = min(best, now, key=lambda each: each[0])
    return best
