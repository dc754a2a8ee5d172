"""The fastest program over several problems, which differ in placement or in the set of recomputed stages."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from megatron.pipeline.synthesis.bound import bound_of_any_recompute, lower_bound
from megatron.pipeline.synthesis.keep import synthesize_keeping
from megatron.pipeline.synthesis.moves import ways_of
from megatron.pipeline.synthesis.moves_bound import bound_of_any_choice, bound_with_moves
from megatron.pipeline.synthesis.orders_bound import tightened
from megatron.pipeline.synthesis.problem import ROUNDING, Problem
from megatron.pipeline.synthesis.search import KNOWN, Synthesis, synthesize

_SEARCHED = 3  # the most problems that are searched to the end


def recomputed_sets(rank_of_stage: Sequence[int]) -> Iterator[frozenset[int]]:
    """Yield the sets of recomputed stages to try.

    These are no stage, all stages, and the stages of the first or the last quarter, half and three quarters of the
    ranks.
    """
    num_ranks = max(rank_of_stage) + 1
    cuts = sorted({max(1, part * num_ranks // 4) for part in (1, 2, 3)} - {num_ranks})
    parts = [range(end) for end in cuts] + [range(first, num_ranks) for first in cuts]
    for ranks in (range(0), range(num_ranks), *parts):
        yield frozenset(stage for stage, rank in enumerate(rank_of_stage) if rank in ranks)


def synthesize_fastest(
    problems: Sequence[Problem],
    *,
    recomputes_some: bool = False,
    moves: str = "none",
    seconds: float = 30.0,
    rounds: int | None = None,
    seed: int = 0,
    processes: int = 1,
    known: Sequence[Synthesis] = (),
    done: Callable[[float], None] = lambda _: None,
) -> Synthesis:
    """Search for the fastest program over all problems. Its bound is the least of the problems' bounds.

    A problem whose bound is above the fastest program so far is not searched. If more than three problems remain, a
    first round of each decides which are searched further.

    Args:
        problems: one or more.
        recomputes_some: where a problem recomputes all stages, any of its microbatches may be kept, and with `moves`
            any of these may move.
        seconds: how long to search in all, without the first rounds and the time of the bound (`orders_bound.py`).
        known: programs to begin with, such as those that were found for smaller limits.
        moves, rounds, seed, processes, done: as for `synthesize`.
    """
    search, keeping_search = (partial(each, moves=moves, seed=seed, tightens=False)
                              for each in (synthesize, synthesize_keeping))  # fmt: skip
    begun = []
    for each in problems:
        found = search(each, rounds=0, known=[other.words for other in known if _is_alike(other.problem, each)])
        if recomputes_some and _keeps(each):
            bound, bound_from = bound_of(each, moves=moves, recomputes_some=True)
            found = replace(found, bound=bound, bound_from=bound_from)
        begun.append(found)
    keeping = [each for each in begun if recomputes_some and _keeps(each.problem)]
    found = _leading([each for each in begun if each not in keeping])
    if len(found) > _SEARCHED:
        found = _leading([_from(search(each.problem, rounds=1, known=[each.words]), each) for each in found])[
            :_SEARCHED
        ]
    found += keeping
    for number, each in enumerate(found):
        if each in _leading(found):
            further = (keeping_search if each in keeping else search)(
                each.problem, seconds=seconds / len(found), rounds=rounds, processes=processes, known=[each.words],
                done=lambda part, number=number: done((number + part) / len(found)),
            )  # fmt: skip
            found[number] = _from(further, each)
    best = min(found, key=lambda each: each.seconds)
    bound, bound_from = _least_bound(begun, best.seconds, with_moves=moves != "none")
    return replace(best, bound=bound, bound_from=bound_from)


def _least_bound(begun: Sequence[Synthesis], seconds: float, *, with_moves: bool) -> tuple[float, str]:
    """Return the least of the problems' bounds, each as tight as it has to be for that."""
    waiting = [(each.bound, number, each.bound_from) for number, each in enumerate(begun)]
    heapq.heapify(waiting)
    tight: set[int] = set()
    while True:
        bound, number, bound_from = waiting[0]
        if with_moves or number in tight:
            return bound, bound_from
        tight.add(number)
        bound, bound_from = tightened(begun[number].problem, bound, bound_from, seconds)
        heapq.heapreplace(waiting, (bound, number, bound_from))


def bound_of(problem: Problem, *, moves: str = "none", recomputes_some: bool = False) -> tuple[float, str]:
    """Return a lower bound in seconds on the programs that `synthesize_fastest` may find, and its origin in words."""
    ways = ways_of(moves, problem)
    if recomputes_some and _keeps(problem):
        return bound_of_any_choice(problem, ways) if ways else bound_of_any_recompute(problem)
    return bound_with_moves(problem, ways) if ways else lower_bound(problem)


def _keeps(problem: Problem) -> bool:
    return len(problem.recomputed) == problem.num_stages


def _from(found: Synthesis, begun: Synthesis) -> Synthesis:
    """Return `found`, of a search that began with the words of `begun`, with the name of what these were made from."""
    return replace(found, begun_with=begun.begun_with) if found.begun_with == KNOWN else found


def _is_alike(one: Problem, other: Problem) -> bool:
    """Whether words for one problem are words for the other, except for its limits."""
    return (one.rank_of_stage, one.recomputed) == (other.rank_of_stage, other.recomputed)


def _leading(found: Sequence[Synthesis]) -> list[Synthesis]:
    """Return the fastest result, then the others whose bound allows a faster program; fastest first."""
    if not found:
        return []
    first, *others = sorted(found, key=lambda each: each.seconds)
    return [first, *(each for each in others if each.bound < first.seconds * (1 - ROUNDING))]
