"""Proof: saved activations never exceed their bound.

A microbatch counts at a stage from the start of its forward to the end of its backward (of W, where the backward is
split). The count changes in the row's own order and nowhere else, so the peak does not depend on timing. With recompute
the microbatch counts just the same, for its stored input; what it saves in full between R and the end of its backward
is counted apart.
"""

from collections.abc import Sequence

from megatron.pipeline.check.compact import B, CompactProgram, F, R, W


def prove_memory(compact: CompactProgram, bounds: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Count saved microbatches at each stage, and prove that they stay within `bounds`.

    Args:
        compact: a program whose computations are proved.
        bounds: the largest number of saved microbatches that each stage may hold; None to count only.

    Returns:
        The peak of saved microbatches at each stage, and the peak of those that are recomputed and not yet through
        their backward.

    Raises:
        ProgramError: naming the first forward that exceeds its stage's bound.
    """
    num_microbatches, num_stages = compact.num_microbatches, compact.num_stages
    limits = [num_microbatches] * num_stages if bounds is None else list(bounds)
    if len(limits) != num_stages:
        raise ValueError(f"{len(limits)} bounds are given for {num_stages} stages: give one for each stage")
    recompute = compact.program.recompute
    saved, peak_saved = [0] * num_stages, [0] * num_stages
    full, peak_full = [0] * num_stages, [0] * num_stages
    for rank, (codes, places) in enumerate(zip(compact.codes, compact.places, strict=True)):
        for position, (code, place) in enumerate(zip(codes, places, strict=True)):
            if code == F:
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
                saved[place // num_microbatches] -= 1
                full[place // num_microbatches] -= recompute
            elif code == R:
                stage = place // num_microbatches
                full[stage] += 1
                peak_full[stage] = max(peak_full[stage], full[stage])
    return tuple(peak_saved), tuple(peak_full)
