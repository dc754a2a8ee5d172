"""The division of consecutive units among ranks such that the busiest rank has the least possible work.

    5 1 1 1 4 3 on 3 ranks    exactly    5 1 | 1 1 4 | 3    busiest 6
                              greedily   5 | 1 1 1 4 | 3    busiest 7

The exact way is dynamic programming: the best cut of the first n units for k ranks is the best cut of fewer units for
k - 1 ranks, and the rest for the last rank. PipeTransformer (section 3.3) uses the greedy way: it fills one rank after
the other up to the mean of the remaining work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

_EQUAL = 1 + 5e-14  # sums of the same times differ in their last bits


def cut_exactly(work: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """The number of units of each rank, at least 1, such that the busiest rank has the least work.

    Of several such cuts, the result gives the most units to the first ranks.

    Raises:
        ValueError: there are fewer units than ranks, or a unit's work is negative or not finite.
    """
    counts = cut_that_fits(work, num_ranks, lambda rank, begin, end: True)
    assert counts is not None
    return counts


def cut_that_fits(
    work: Sequence[float], num_ranks: int, fits: Callable[[int, int, int], bool]
) -> tuple[int, ...] | None:
    """The best cut, as `cut_exactly` defines it, among the cuts that fit into the memory of the ranks; None if none
    fits.

    Args:
        fits: (rank, begin, end) -> whether the rank may have units `begin` to `end` - 1. Ranks and units count from 0.
    """
    _check(work, num_ranks)
    total = [0.0, *accumulate(work)]
    num_units = len(work)
    best = [0.0, *([math.inf] * num_units)]  # by n, the busiest rank's work for the first n units on the ranks so far
    begins: list[list[int]] = []  # for 1, 2, ... ranks, by n: the first unit of the last rank
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
    """The number of units of each rank in the paper's way: a rank takes units up to the mean of the remaining work over
    this rank and the later ones.

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
    """The work of the busiest rank."""
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
