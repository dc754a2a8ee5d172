"""GPipe: all forwards of a batch, then all of its backwards (Huang et al., 2019; PipeDream-2BW, Figures 1a and 3).

    stage 0   F0 F1 F2 F3  .     .  B0    B1    B2    B3
    stage 1    . F0 F1 F2 F3 B0    B1    B2    B3

The backwards run in ascending order, so gradients are summed in the same order as under 1F1B. A stage saves the
activations of a whole batch.
"""

from collections.abc import Sequence

from megatron.pipeline.schedules.order import Order, backward, forward
from megatron.pipeline.schedules.passes import Segments


class GPipe(Order):
    drains = True
    follows_edges = True

    def segments(self, stage: int, batches: Sequence[range]) -> Segments:
        forwards = [[forward(stage, microbatch) for microbatch in batch] for batch in batches]
        backwards = [[backward(stage, microbatch) for microbatch in batch] for batch in batches]
        return [*map(list.__add__, forwards, backwards), []]

    def max_in_flight(self, stage: int) -> int | None:
        return None
