"""Proof: a forward is stepped provisionally with just the gradients that no STEP has taken, where the policy says so.

    2B4@1 2F9@1~1 2B5@1 2F10@1~2       q = backwards of the stage since its last STEP, of batch 1

Where its version is that of its own batch there is nothing ahead of it, so q is 0. Backwards between STEP@v and
STEP@(v+1) are those of batch v, which is proved with the versions; so these gradients are of the batch that the
forward's version waits for, and fewer than all of it.

Which they are follows from the graph alone, too: at depth k, microbatch i finds those of the batch of microbatch i - k
that come before that, and no others. Several stages count on it (`update.shared_parameters`), so it is proved along.

These weights are one more set, which the next such forward of the stage overwrites. So its stage has to recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from megatron.pipeline.check.compact import STEP, B, CompactProgram, F, I, W
from megatron.pipeline.program.weight_policies import Ahead


def prove_unstepped(compact: CompactProgram, live_versions: Sequence[int]) -> tuple[int, ...]:
    """Prove the rules above for every (stage, microbatch).

    Args:
        compact: a program whose computations and versions are proved.
        live_versions: the largest number of live versions at each stage.

    Returns:
        The same, with one more at each stage that has a forward at provisional weights.

    Raises:
        ProgramError: naming the first forward with another number, or one that is not recomputed.
    """
    program, width = compact.program, compact.num_microbatches
    if program.weights.ahead is not Ahead.PROVISIONAL_STEP:
        return tuple(live_versions)
    firsts = [0, *accumulate(program.batches)]  # microbatch of each batch
    batch_of = [batch for batch, size in enumerate(program.batches) for _ in range(size)]
    depths = [program.graph.depth(stage) for stage in range(compact.num_stages)]
    done = [0] * compact.num_stages  # backwards since the last STEP
    end_done = [0] * compact.num_stages  # one past the last microbatch of them, and of those of which only I is done
    stepped_ahead = set()
    for rank, row in enumerate(program.rows):
        for position, (code, place) in enumerate(zip(compact.codes[rank], compact.places[rank], strict=True)):
            stage, index = divmod(place, width)
            if code in (B, I, W):
                done[stage] += code != I
                end_done[stage] = max(end_done[stage], index + 1)
            elif code == STEP:
                done[stage] = end_done[stage] = 0  # each stage has its own
            if code != F:
                continue
            forward, reason = row[position], ""
            is_behind = forward.version < program.first_batch + batch_of[index]
            wanted, before = done[stage] if is_behind else 0, max(0, index - depths[stage])
            if is_behind and wanted != before - firsts[batch_of[before]]:
                reason = (
                    f"{wanted} microbatches have gradients here that no STEP has taken, and at depth {depths[stage]} "
                    f"they are {before - firsts[batch_of[before]]}"
                )
            elif wanted and end_done[stage] > before:
                last, end = (program.first_microbatch + each for each in (end_done[stage] - 1, before))
                reason = (
                    f"the gradients here that no STEP has taken are to be those of the microbatches before {end}, and "
                    f"the backward of {last} stands before it"
                )
            elif forward.unstepped != wanted:
                reason = (
                    f"{wanted} microbatches have gradients that it is to be stepped with provisionally, not "
                    f"{forward.unstepped}"
                )
            elif forward.unstepped and not program.recomputes(stage):
                reason = "provisional weights are gone before its backward, and the stage does not recompute"
            if reason:
                raise compact.error(rank, position, reason)
            if forward.unstepped:
                stepped_ahead.add(stage)
    return tuple(live + (stage in stepped_ahead) for stage, live in enumerate(live_versions))
