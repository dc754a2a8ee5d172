"""The fastest program of several problems: placements, and sets of stages that are recomputed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.pipeline.synthesis.problem import ROUNDING, Problem
from megatron.pipeline.synthesis.search import Synthesis, synthesize

_SEARCHED = 3  # the most problems that are searched to the end


def recomputed_sets(rank_of_stage: Sequence[int]) -> Iterator[frozenset[int]]:
    """Yield the sets of recomputed stages to try.

    They are none, all, and those of about a quarter, a half and three quarters of the ranks, the first ones or the last
    ones.
    """
    num_ranks = max(rank_of_stage) + 1
    cuts = sorted({max(1, part * num_ranks // 4) for part in (1, 2, 3)} - {num_ranks})
    parts = [range(end) for end in cuts] + [range(first, num_ranks) for first in cuts]
    for ranks in (range(0), range(num_ranks), *parts):
        yield frozenset(stage for stage, rank in enumerate(rank_of_stage) if rank in ranks)


def synthesize_fastest(problems: Sequence[Problem], *, seconds: float) -> Synthesis:
    """Search for the fastest program of all problems. Its bound is the least of theirs.

    Where more than three problems could have it, a first round of each tells which are searched further.

    Args:
        problems: one or more.
        seconds: how long to search in all, without the first rounds.
    """
    if len(problems) == 1:
        return synthesize(problems[0], seconds=seconds)
    found = [synthesize(each, rounds=0) for each in problems]
    bound, bound_from = min((each.bound, each.bound_from) for each in found)
    found = _leading(found)
    if len(found) > _SEARCHED:
        found = _leading([synthesize(each.problem, rounds=1, known=[each.words]) for each in found])[:_SEARCHED]
    for number, begun in enumerate(found):
        if begun in _leading(found):
            found[number] = synthesize(begun.problem, seconds=seconds / len(found), known=[begun.words])
    return replace(min(found, key=lambda each: each.seconds), bound=bound, bound_from=bound_from)


def _leading(found: Sequence[Synthesis]) -> list[Synthesis]:
    """Return the fastest, and behind it those whose problem could have a faster program; fastest first."""
    first, *others = sorted(found, key=lambda each: each.seconds)
    return [first, *(each for each in others if each.bound < first.seconds * (1 - ROUNDING))]
