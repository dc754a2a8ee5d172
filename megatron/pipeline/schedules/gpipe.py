"""GPipe: all forwards of a batch, then all its backwards (Huang et al., 2019; PipeDream-2BW, Figures 1a and 3).

    stage 0   F0 F1 F2 F3  .  .  B0 B1 B2 B3
    stage 1    . F0 F1 F2 F3 B0 B1 B2 B3

The backwards run in ascending order, so that gradients are summed in the same order as under 1F1B. A stage saves a whole batch.
"""

from collections.abc import Sequence

from megatron.pipeline.passes import Legs
from megatron.pipeline.schedules.order import Order, backward, forward


class GPipe(Order):
    def legs(self, stage: int, batches: Sequence[range]) -> Legs:
        legs = [[forward(stage, each) for each in batch] + [backward(stage, each) for each in batch] for batch in batches]
        return [*legs, []]

    def max_in_flight(self, stage: int) -> int | None:
        return None
