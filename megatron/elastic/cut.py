"""Units in a row, shared out to ranks in a row, so that the busiest rank has as little work as can be.

    5 1 1 1 4 3 on 3 ranks    exactly    5 1 | 1 1 4 | 3    busiest 6
                              greedily   5 | 1 1 1 4 | 3    busiest 7

Exact, by dynamic programming: the best cut of the first n units for k ranks is the best cut of fewer of them for k - 1,
and the rest. PipeTransformer (section 3.3) fills one rank after the other up to the mean of what is left, which is the
greedy way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

_EQUAL = 1 + 5e-14  # sums of the same times differ in their last bits


def cut_exactly(work: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """The number of units of each rank, 1 or more. Of the cuts whose busiest rank has least work, the one that gives
    the first ranks most.

    Raises:
        ValueError: fewer units than ranks, or work that is negative or no number.
    """
    counts = cut_that_fits(work, num_ranks, lambda rank, begin, end: True)
    assert counts is not None
    return counts


def cut_that_fits(
    work: Sequence[float], num_ranks: int, fits: Callable[[int, int, int], bool]
) -> tuple[int, ...] | None:
    """As `cut_exactly`, among the cuts that fit into the memory of the ranks; None where no cut fits.

    Args:
        fits: whether a rank (from 0 on) may have the units from `begin` to before `end`, both given.
    """
    _check(work, num_ranks)
    total = [0.0, *accumulate(work)]
    num_units = len(work)
    best = [0.0, *([math.inf] * num_units)]  # of the first n units, for the ranks so far
    begins: list[list[int]] = []  # of the last rank's units, by n, for 1, 2, ... ranks
    for rank in range(1, num_ranks + 1):
        now, chosen = [math.inf] * (num_units + 1), [0] * (num_units + 1)
        for end in range(rank, num_units + 1):
            for begin in range(rank - 1, end):
                busiest = max(best[begin], total[end] - total[begin])
                if busiest < math.inf and busiest <= now[end] * _EQUAL and fits(rank - 1, begin, end):
                    now[end], chosen[end] = min(busiest, now[end]), begin
        best = now
        begins.append(chosen)
    if best[num_units] == math.inf:
        return None
    counts, end = [], num_units
    for chosen in reversed(begins):
        counts.append(end - chosen[end])
        end = chosen[end]
    return tuple(reversed(counts))


def cut_greedily(work: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """The number of units of each rank in the paper's way: a rank takes units until it has the mean of the work that
    is left for it and the ranks behind it.

    Raises:
        ValueError: as `cut_exactly`.
    """
    _check(work, num_ranks)
    counts, begin = [], 0
    for rank in range(num_ranks):
        behind = num_ranks - rank - 1
        mean = math.fsum(work[begin:]) / (behind + 1)
        end, taken = begin + 1, work[begin]
        while end < len(work) - behind and (not behind or taken + work[end] / 2 <= mean):
            taken += work[end]
            end += 1
        counts.append(end - begin)
        begin = end
    return tuple(counts)


def busiest(work: Sequence[float], counts: Sequence[int]) -> float:
    """The most work of any rank."""
    ends = list(accumulate(counts, initial=0))
    assert ends[-1] == len(work), "each unit is somewhere"
    return max(math.fsum(work[begin:end]) for begin, end in pairwise(ends))


def _check(work: Sequence[float], num_ranks: int) -> None:
    if not 1 <= num_ranks <= len(work):
        raise ValueError(
            f"{len(work)} units cannot be shared out to {num_ranks} ranks, each of which needs one; give 1 to "
            f"{len(work)} ranks"
        )
    for place, each in enumerate(work):
        if not 0.0 <= each < math.inf:
            raise ValueError(f"unit {place} has work {each:g}; give a number of 0 and more")
