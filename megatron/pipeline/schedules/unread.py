"""How much of a batch an order leaves to be done where the next batch begins: what a prediction cannot read."""

from functools import lru_cache

from megatron.pipeline.program.instruction import ENDS_BACKWARD
from megatron.pipeline.program.stages import stages_of
from megatron.pipeline.schedules.order import Order


@lru_cache(maxsize=256)
def unread(order: Order, rank_of_stage: tuple[int, ...], num_microbatches: int) -> tuple[int, ...]:
    """Read off the rows of two batches: where the second begins on a rank, and what stands behind that of the first."""
    batches, counts = [range(num_microbatches), range(num_microbatches, 2 * num_microbatches)], [0] * order.num_stages
    for rank in range(max(rank_of_stage) + 1):
        stages = stages_of(rank_of_stage, rank)
        for segment in order.segments(rank if order.interleaves else stages[0], batches)[1:]:
            for each in segment:
                counts[each.stage] += each.kind in ENDS_BACKWARD and each.microbatch < num_microbatches
    return tuple(counts)
