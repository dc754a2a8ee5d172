"""Whether an order splits backwards into I and W: read off what it computes, so that no order has to say it."""

from functools import lru_cache

from megatron.pipeline.program.instruction import HALVES
from megatron.pipeline.program.stages import stages_by_rank
from megatron.pipeline.schedules.order import Order

_MOST_GROUPS = 8  # of p microbatches, among which a batch is looked for that the order takes


@lru_cache(maxsize=256)
def splits_backward(order: Order) -> bool:
    """Whether some rank has an I or a W in a batch that fills the pipeline, or in the largest that the order takes."""
    p = order.num_ranks
    sizes = (*range(2 * p, _MOST_GROUPS * p + 1), *range(2 * p - 1, 0, -1))
    size = next((each for each in sizes if _takes(order, each)), None)
    if size is None:
        return False
    for rank, stages in enumerate(stages_by_rank(order.rank_of_stage)):
        segments = order.segments(rank if order.interleaves else stages[0], [range(size)])
        if any(each.kind in HALVES for segment in segments for each in segment):
            return True
    return False


def _takes(order: Order, num_microbatches: int) -> bool:
    try:
        order.validate(num_microbatches)
    except ValueError:
        return False
    return True
