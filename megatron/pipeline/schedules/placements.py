"""Which rank holds which stage, where ranks hold several: one table entry for each way.

    placement     2 ranks, 2 stages on each
    round-robin   0 1 0 1    Megatron-LM's interleaving: dealt out in turn
    v             0 1 1 0    there and back again, so that a rank holds the first and the last stage (Qi et al. 2024)

With one stage on each rank both are the same. Everything else reads `rank_of_stage`, and so follows the stage and not
the rank: layers, data, loss, seeds, checkpoints.
"""

from collections.abc import Callable, Sequence

from megatron.documents import counted


def round_robin(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """The rank of each stage; rank r has the stages r, r + num_ranks, r + 2 * num_ranks, ..."""
    return tuple(range(num_ranks)) * num_virtual_stages


def v(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """The rank of each stage; every second turn goes backwards."""
    there = tuple(range(num_ranks))
    return sum((there if turn % 2 == 0 else there[::-1] for turn in range(num_virtual_stages)), start=())


PLACEMENTS: dict[str, Callable[[int, int], Sequence[int]]] = {"round-robin": round_robin, "v": v}


def rank_of_stage(placement: str, num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Where a placement of that name puts the stages of all ranks.

    Raises:
        ValueError: another name, or one that puts them on fewer or more ranks.
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
    """Raises ValueError where it does not place `num_stages` stages on ranks 0, 1, ... without a gap."""
    if len(rank_of_stage) != num_stages:
        raise ValueError(
            f"rank_of_stage places {len(rank_of_stage)} stages, and the pipeline has {num_stages}; give each its rank"
        )
    if sorted(set(rank_of_stage)) != list(range(max(rank_of_stage, default=0) + 1)):
        raise ValueError(
            f"rank_of_stage {tuple(rank_of_stage)} leaves a rank without a stage; number them 0, 1, ... and use all"
        )
