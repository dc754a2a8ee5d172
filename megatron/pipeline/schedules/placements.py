"""The table of placements: which rank holds which stage if ranks hold several stages.

    placement     2 ranks, 2 stages on each
    round-robin   0 1 0 1    stages are dealt out in turn, as in Megatron-LM's interleaving
    v             0 1 1 0    there and back again, so that a rank holds the first and the last stage (Qi et al. 2024)

With one stage on each rank both placements are equal. Layers, data, loss, seeds and checkpoints depend on the stage and
not on the rank, because all other code reads `rank_of_stage`.
"""

from collections.abc import Callable, Sequence

from megatron.documents import counted


def round_robin(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Return the rank of each stage; rank r has the stages r, r + num_ranks, r + 2 * num_ranks, ..."""
    return tuple(range(num_ranks)) * num_virtual_stages


def v(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Return the rank of each stage; every second turn over the ranks goes backwards."""
    there = tuple(range(num_ranks))
    return sum((there if turn % 2 == 0 else there[::-1] for turn in range(num_virtual_stages)), start=())


PLACEMENTS: dict[str, Callable[[int, int], Sequence[int]]] = {"round-robin": round_robin, "v": v}


def rank_of_stage(placement: str, num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Return the rank of each stage under a placement.

    Args:
        placement: a key of `PLACEMENTS`.
        num_ranks: the number of ranks of the pipeline.
        num_virtual_stages: the number of stages on each rank.

    Raises:
        ValueError: the placement is unknown, or it uses another number of ranks or stages.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"there is no placement {placement!r}; choose from {', '.join(PLACEMENTS)}")
    placed = tuple(PLACEMENTS[placement](num_ranks, num_virtual_stages))
    validate_placement(placed, num_ranks * num_virtual_stages)
    if max(placed) + 1 != num_ranks:
        raise ValueError(
            f"placement {placement} puts the {len(placed)} stages on {counted(max(placed) + 1, 'rank')}, and the "
            f"pipeline has {num_ranks}; give each rank a stage, and none to others"
        )
    return placed


def validate_placement(rank_of_stage: Sequence[int], num_stages: int) -> None:
    """Raise ValueError unless `rank_of_stage` places `num_stages` stages on ranks 0, 1, ... without a gap."""
    if len(rank_of_stage) != num_stages:
        raise ValueError(
            f"rank_of_stage places {len(rank_of_stage)} stages, and the pipeline has {num_stages}; give each its rank"
        )
    if sorted(set(rank_of_stage)) != list(range(max(rank_of_stage, default=0) + 1)):
        raise ValueError(
            f"rank_of_stage {tuple(rank_of_stage)} leaves a rank without a stage; number them 0, 1, ... and use all"
        )
