"""Which stages live on a rank, read off `rank_of_stage`: of all ranks at once, since a look through all stages for each
rank would grow with the square of their number.
"""

from collections.abc import Sequence
from functools import lru_cache


def stages_of(rank_of_stage: Sequence[int], rank: int) -> tuple[int, ...]:
    """The stages that live on a rank, ascending; none where there is no such rank."""
    return _by_rank(tuple(rank_of_stage)).get(rank, ())


def stages_by_rank(rank_of_stage: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Those of each rank, from 0 to the last."""
    found = _by_rank(tuple(rank_of_stage))
    return tuple(found.get(rank, ()) for rank in range(max(found) + 1))


@lru_cache(maxsize=1024)
def _by_rank(rank_of_stage: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for stage, rank in enumerate(rank_of_stage):
        found.setdefault(rank, []).append(stage)
    return {rank: tuple(stages) for rank, stages in found.items()}
