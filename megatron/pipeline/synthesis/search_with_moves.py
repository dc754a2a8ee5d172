"""The fastest programs with moves: the pass puts moves into many words, and the best words are changed at random.

A change is a loose sweep (`squeeze.py`) or a few warm moves of computations (`improve.py`) under one of the relaxed
limits. Then the pass puts moves into the words, and the simulator, which knows the copies, times the result. Slower
words are sometimes kept.
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product

from megatron.pipeline.synthesis.improve import accepts, changed_words
from megatron.pipeline.synthesis.moved_rows import Lead, MovedProgram, Mover
from megatron.pipeline.synthesis.problem import ROUNDING, Problem, Words
from megatron.pipeline.synthesis.squeeze import Squeeze
from megatron.pipeline.synthesis.timing import Clock

AHEAD = sorted((Lead(*each) for each in product((1, 2, 4, 8), (1, 2, 4, 8))), key=lambda each: each.out * each.back)
_FIRST = 2  # how many of these are tried with all words
_KEPT = 6
SWEEPS = 2
FEW_MOVES = 5, 20, 60
WORSE = 0.05  # the temperature of changes, in the work of a rank for one microbatch


def fastest(mover: Mover, found: Iterable[tuple[str, Words]], until: float) -> list[MovedProgram]:
    """Return the fastest programs within the limits that the pass makes of words.

    Args:
        mover: puts moves into words.
        found: words with their names.
        until: the time of the clock from which on no words are tried.
    """
    clock, tried, kept = Clock(mover.problem), set(), []
    for name, words in found:
        times, text = clock.times(words), tuple(map(tuple, words))
        if times is None or text in tried or (kept and times.seconds >= kept[0].seconds):
            continue
        tried.add(text)
        kept = _with(kept, mover, words, name, AHEAD[:_FIRST], until)
    for each in list(kept):
        kept = _with(kept, mover, each.words, each.begun_with, AHEAD[_FIRST:], until)
    return kept


def _with(
    kept: list[MovedProgram], mover: Mover, words: Words, name: str, aheads: Iterable[Lead], until: float
) -> list[MovedProgram]:
    """Return the fastest programs among `kept` and those that the pass makes of further words."""
    for ahead in aheads:
        if time.monotonic() < until and (made := mover.moved(words, ahead, name)) is not None:
            kept = _best([*kept, made])
    return kept


def _best(found: Iterable[MovedProgram]) -> list[MovedProgram]:
    """Return the fastest programs, of which no two take equally long."""
    kept: dict[float, MovedProgram] = {}
    for each in sorted(found, key=lambda each: each.cost):
        kept.setdefault(each.cost[0], each)
    return list(kept.values())[:_KEPT]


def changed(
    mover: Mover, relaxed: Sequence[Problem], kept: list[MovedProgram], bound: float, more: Callable[[int], bool],
    seed: int,
) -> list[MovedProgram]:  # fmt: skip
    """Change programs with moves at random, and return the fastest of all, old and new.

    Args:
        mover: puts moves into words.
        relaxed: the problem under relaxed limits.
        kept: the programs to begin with.
        bound: a lower bound in seconds; a program that reaches it ends the search.
        more: number of changes -> whether to make another.
        seed: the seed of all choices.
    """
    chance, now, number = random.Random(seed), kept[0], 0
    squeezes = [Squeeze(each, Clock(each)) for each in relaxed]
    while kept[0].seconds > bound * (1 + ROUNDING) and more(number):
        number += 1
        squeeze = squeezes[chance.randrange(len(squeezes))]
        words = changed_words(squeeze, now.words, chance, FEW_MOVES)
        if chance.random() < 0.75:
            words = squeeze.words(words, SWEEPS)[1]
        for ahead in (now.ahead, chance.choice(AHEAD)):
            made = mover.moved(words, ahead, now.begun_with)
            if made is None:
                continue
            kept = _best([*kept, made])
            if accepts(made.seconds - now.seconds, WORSE * mover.problem.unit, chance):
                now = made
    return kept
