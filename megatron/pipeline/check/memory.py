"""Proof: saved activations never exceed their bound.

A microbatch counts at a stage from the start of its forward to the end of its backward (of W, where the backward is
split). The count changes in the row's own order and nowhere else, so the peak does not depend on timing. With recompute
the microbatch counts just the same, for its stored input; what it saves in full between R and the end of its backward
is counted apart.

A rank's memory holds all its stages' activations, and its stages do not reach their peaks together: with several stages
on a rank, the sum over them is counted and bounded, too.
"""

from collections.abc import Sequence

from megatron.pipeline.check.compact import B, CompactProgram, F, R, W


def prove_memory(
    compact: CompactProgram, bounds: Sequence[int] | None, bounds_of_ranks: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Count saved microbatches at each stage and on each rank, and prove that they stay within the bounds.

    Args:
        compact: a program whose computations are proved.
        bounds: the largest number of saved microbatches that each stage may hold; None to count only.
        bounds_of_ranks: the same for each rank, over all its stages, a microbatch once at each of them.

    Returns:
        The peak of saved microbatches at each stage; the peak of those that are recomputed and not yet through their
        backward; the peak of saved microbatches on each rank.

    Raises:
        ProgramError: naming the first forward that exceeds a bound.
    """
    num_microbatches, num_stages = compact.num_microbatches, compact.num_stages
    limits = [num_microbatches] * num_stages if bounds is None else list(bounds)
    if len(limits) != num_stages:
        raise ValueError(f"{len(limits)} bounds are given for {num_stages} stages: give one for each stage")
    num_ranks = len(compact.codes)
    limits_of_ranks = [num_microbatches * num_stages] * num_ranks if bounds_of_ranks is None else list(bounds_of_ranks)
    if len(limits_of_ranks) != num_ranks:
        raise ValueError(f"{len(limits_of_ranks)} bounds are given for {num_ranks} ranks: give one for each rank")
    recompute = compact.program.recompute
    saved, peak_saved = [0] * num_stages, [0] * num_stages
    full, peak_full = [0] * num_stages, [0] * num_stages
    peak_on_rank = [0] * num_ranks
    for rank, (codes, places) in enumerate(zip(compact.codes, compact.places, strict=True)):
        on_rank = 0
        for position, (code, place) in enumerate(zip(codes, places, strict=True)):
            if code == F:
                on_rank += 1
                if on_rank > peak_on_rank[rank]:
                    if on_rank > limits_of_ranks[rank]:
                        limit = limits_of_ranks[rank]
                        reason = (
                            f"rank {rank} would save {on_rank} microbatches over its stages, and its bound is {limit}"
                        )
                        raise compact.error(rank, position, reason)
                    peak_on_rank[rank] = on_rank
                stage = place // num_microbatches
                saved[stage] += 1
                if saved[stage] > peak_saved[stage]:
                    if saved[stage] > limits[stage]:
                        reason = (
                            f"stage {stage} would save {saved[stage]} microbatches, and its bound is {limits[stage]}"
                        )
                        raise compact.error(rank, position, reason)
                    peak_saved[stage] = saved[stage]
            elif code in (B, W):
                on_rank -= 1
                saved[place // num_microbatches] -= 1
                full[place // num_microbatches] -= recompute
            elif code == R:
                stage = place // num_microbatches
                full[stage] += 1
                peak_full[stage] = max(peak_full[stage], full[stage])
    return tuple(peak_saved), tuple(peak_full), tuple(peak_on_rank)
