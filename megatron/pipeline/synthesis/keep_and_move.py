"""Programs in which each microbatch is kept, recomputed, or kept and moved.

For words and a choice of the kept microbatches, the pass of `moved_rows.py` moves the microbatches without room. The
fastest of many choices, and the programs found with recomputes alone and with moves alone, are changed at random. A
change keeps a few microbatches that are recomputed, or recomputes a few that are kept; or it changes the words, as
`search_with_moves.py` does.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from megatron.pipeline.program.extent import Kept
from megatron.pipeline.synthesis.improve import accepts, changed_words
from megatron.pipeline.synthesis.moved_rows import Lead, MovedProgram, Mover, word_of
from megatron.pipeline.synthesis.moves import relaxed
from megatron.pipeline.synthesis.problem import ROUNDING, Problem, Words
from megatron.pipeline.synthesis.search import CHANGES, Synthesis, goes_on, part_of_round, with_moves
from megatron.pipeline.synthesis.search_with_moves import FEW_MOVES, SWEEPS, WORSE
from megatron.pipeline.synthesis.squeeze import Squeeze
from megatron.pipeline.synthesis.timing import Clock
from megatron.processes import map_forked

_MOST = 3  # the most microbatches that a change keeps or recomputes
_AHEAD = tuple(Lead(*each) for each in product((1, 2, 4, 8), (1, 2, 4, 8), (0, 3, 6, 12)))
_FIRST = tuple(Lead(*each) for each in ((2, 2), (4, 4), (8, 4), (2, 2, 3), (2, 4, 6), (4, 4, 12)))  # for all choices
_BEGUN = 3  # the number of programs that are changed at random


@dataclass(frozen=True)
class _Either:
    """A choice of kept microbatches (`mover.problem`), and a program for it."""

    mover: Mover
    made: MovedProgram

    @property
    def cost(self) -> tuple[float, int]:
        return self.made.cost


def of_both_kinds(
    mover: Mover, found: Sequence[Synthesis], choices: Iterable[tuple[Problem, str, Words]], *,
    bound: float, seconds: float, rounds: int | None, seed: int, processes: int,
) -> Iterator[Synthesis]:  # fmt: skip
    """Yield the fastest programs with moves in one way, made from `found` and from choices of kept microbatches.

    Args:
        bound: a lower bound in seconds; a program that reaches it ends the search.
        seconds: how long to search.
        rounds, seed, processes: as for `synthesize`.
    """
    until = math.inf if rounds is not None else time.monotonic() + seconds
    if min(each.seconds for each in found) <= bound * (1 + ROUNDING) or not relaxed(mover.problem, mover.way):
        return
    begun = [(each.problem, each.begun_with, each.words) for each in found]
    begun = [*_made(mover, begun, _FIRST, until), *_fastest(mover, choices, until)]
    begun = sorted(begun, key=_cost)[:_BEGUN]
    now, seeds = time.monotonic(), [seed + 1_000_003 * each for each in range(processes)]
    for number, each in enumerate(begun, 1):
        attempts = math.inf if rounds is None else rounds * CHANGES * part_of_round(mover.problem)
        more = partial(goes_on, now + max(0.0, until - now) * number / len(begun), attempts)
        best = min(map_forked(partial(_changed, each, bound, more), seeds, processes), key=_cost)
        yield with_moves(replace(found[0], problem=best.mover.problem), best.made)


def keeping_all(problem: Problem, found: Synthesis) -> Synthesis:
    """Return `found`, a program without recomputes, as a solution of `problem` that keeps every microbatch."""
    items = product(sorted(problem.recomputed), range(problem.num_microbatches))
    problem = replace(problem, kept=tuple(Kept(*each) for each in items))
    return replace(found, problem=problem, words=[word_of(problem, row) for row in found.program.rows])


def _cost(each: _Either) -> tuple[float, int]:
    return each.cost


def _made(
    mover: Mover, choices: Iterable[tuple[Problem, str, Words]], aheads: Sequence[Lead], until: float
) -> Iterator[_Either]:
    """Yield the fastest program that the pass makes of each choice, if one keeps the limits."""
    for problem, name, words in choices:
        if time.monotonic() > until:
            return
        chosen = mover.keeping(problem)
        found = [made for ahead in aheads if (made := chosen.moved(words, ahead, name)) is not None]
        if found:
            yield _Either(chosen, min(found, key=lambda each: each.cost))


def _fastest(mover: Mover, choices: Iterable[tuple[Problem, str, Words]], until: float) -> list[_Either]:
    """Return the fastest programs of choices, no two of which keep the same microbatches."""
    by_choice: dict[tuple[Kept, ...], _Either] = {}
    for each in sorted(_made(mover, choices, _FIRST, until), key=_cost):
        by_choice.setdefault(each.mover.problem.kept, each)
    return list(by_choice.values())[:_BEGUN]


def _changed(begin: _Either, bound: float, more: Callable[[int], bool], seed: int) -> _Either:
    """Return the fastest of a program and of the programs that random changes make of it."""
    chance, best, now, number = random.Random(seed), begin, begin, 0
    problem = begin.mover.problem
    unit = max(map(problem.work_without_recompute, range(problem.num_ranks))) / problem.num_microbatches
    while best.cost[0] > bound * (1 + ROUNDING) and more(number):
        number += 1
        mover, words = now.mover, now.made.words
        chooses = chance.random() < 0.5
        if chooses:
            try:
                mover = mover.keeping(_rechosen(mover.problem, chance))
            except ValueError:  # one microbatch with its kept activations exceeds the limit
                continue
        ways = relaxed(mover.problem, mover.way)
        if not ways:
            continue
        relaxation = chance.choice(ways)
        squeeze = Squeeze(relaxation, Clock(relaxation))
        if not chooses:
            words = changed_words(squeeze, words, chance, FEW_MOVES)
        if chance.random() < 0.75:
            words = squeeze.words(words, SWEEPS)[1]
        for ahead in (now.made.ahead, chance.choice(_AHEAD)):
            made = mover.moved(words, ahead, now.made.begun_with)
            if made is None:
                continue
            best = min(best, _Either(mover, made), key=_cost)
            if accepts(made.seconds - now.made.seconds, WORSE * unit, chance):
                now = _Either(mover, made)
    return best


def _rechosen(problem: Problem, chance: random.Random) -> Problem:
    """Return the problem with a few microbatches of a stage kept that were recomputed, or the other way round."""
    stage, kept, keeps = chance.choice(sorted(problem.recomputed)), set(problem.kept), chance.random() < 0.5
    ours = [Kept(stage, each) for each in range(problem.num_microbatches)]
    among = [each for each in ours if (each in kept) == keeps] or ours
    first = chance.randrange(len(among))
    kept ^= set(among[first : first + chance.randint(1, _MOST)])
    return replace(problem, kept=tuple(sorted(kept)))
