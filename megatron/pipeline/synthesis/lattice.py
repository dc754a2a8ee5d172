"""Patterns of several microbatches in a period, for memory that a pattern of one microbatch cannot use up.

Problem: a microbatch that goes down the ranks meets those that come up on every rank. If all of them go from rank to
rank in the same time h, two never compute at once where they have entered at a distance of a multiple of 2h: one is
then at the even places of a lattice of h, the other at the odd ones. So a period of one microbatch has to be such a
multiple. That is coarse on many ranks with little memory, where a microbatch is under way for many times 2h: the
shortest period that memory allows lies between two multiples.

Solution: k microbatches enter in a period of n times 2h, at distances that are as even as they can be on the lattice.
So each takes n/k times 2h, and memory is the same for all as soon as the pattern has begun to repeat.
"""

import math
import random
import time
from collections.abc import Iterator
from fractions import Fraction

from megatron.pipeline.synthesis.problem import ROUNDING, Words
from megatron.pipeline.synthesis.seeds import Pattern, Patterns

_MOST_MICROBATCHES = 6
_ATTEMPTS = 10
_MOST_PERIODS = 24
_LONGER_HOPS = 1.0, 1.0001, 1.002, 1.005, 1.01, 1.02, 1.05
_FOUND = 2  # the number of periods for which words are found: the longer one may fill and drain sooner


def words_of_lattices(
    patterns: Patterns, chance: random.Random, slowest: float, until: float = math.inf
) -> Iterator[tuple[float, Words]]:
    """Yield the seconds and the words of the patterns with the shortest periods that keep the limits.

    Args:
        slowest: seconds of a batch; patterns whose periods alone take longer are not tried.
        until: when to end (`time.monotonic()`).
    """
    problem, hop = patterns.problem, max(patterns.hops)
    if problem.num_ranks == 1 or hop <= 0 or problem.unit <= 0:
        return
    if (least := _residence(patterns, hop)) is None:
        return
    tried = made = 0
    for places in _places_of_a_microbatch(problem.unit / (2 * hop)):
        period = float(places) * 2 * hop
        if (problem.num_microbatches - 1) * period >= slowest or made == _FOUND or tried == _MOST_PERIODS:
            return
        if any(each > problem.limit_of(rank) * period * (1 + ROUNDING) for rank, each in enumerate(least)):
            continue
        tried += 1
        found = (
            _words(patterns, places, hop * chance.choice(_LONGER_HOPS), chance)
            for _ in range(_ATTEMPTS) if time.monotonic() < until
        )  # fmt: skip
        best = min(filter(None, found), key=lambda each: each[0], default=None)
        if best is not None:
            made += 1
            yield best


def _places_of_a_microbatch(least: float) -> list[Fraction]:
    """The numbers n/k of places, in order, from `least` to its double; for k = 1 the other patterns have them."""
    return sorted({
        Fraction(places, count)
        for count in range(2, _MOST_MICROBATCHES + 1)
        for places in range(math.ceil(count * least), math.floor(2 * count * least) + 1)
        if math.gcd(places, count) == 1
    })  # fmt: skip


def _pattern(patterns: Patterns, hop: float, period: float, turns: tuple[float, ...]) -> Pattern:
    """The pattern in which a microbatch takes `hop` seconds from rank to rank, if ranks are alike."""
    return Pattern(period, tuple(max(0.0, hop - each) for each in patterns.hops), turns)


def _residence(patterns: Patterns, hop: float) -> list[float] | None:
    """For each rank the sum over its stages of what a microbatch holds, times the seconds for which it holds that.

    None if seconds are so different that they cannot be added.
    """
    problem = patterns.problem
    period = 1e6 * (problem.unit + hop)  # no other microbatch is in the way
    offsets = patterns.offsets(_pattern(patterns, hop, period, (0.0,) * len(patterns.hops)))
    if offsets is None:
        return None
    sums = [0.0] * problem.num_ranks
    for queue, rank in enumerate(problem.rank_of_queue):
        end = offsets[queue] + problem.seconds[queue]
        sums[rank] += problem.gives[queue] * end - problem.takes[queue] * offsets[queue]
    return sums


def _words(patterns: Patterns, places: Fraction, hop: float, chance: random.Random) -> tuple[float, Words] | None:
    """Return the seconds and the words of one pattern, with turns at random; None if it exceeds a limit."""
    count, num_places = places.denominator, places.numerator
    period = num_places * 2 * hop
    turns = tuple(chance.choice((0.0, 0.0, 2 * hop * chance.random())) for _ in patterns.hops)
    entries = [2 * hop * (each * num_places // count) for each in range(count)]
    offsets = patterns.offsets_of_entries(_pattern(patterns, hop, period, turns), entries)
    if offsets is None or patterns.excess(patterns.held(offsets, period)):
        return None
    return patterns.timed(offsets, period)
