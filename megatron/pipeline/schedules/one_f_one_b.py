"""1F1B: a few forwards ahead, then one forward and one backward in turn (PipeDream; PipeDream-2BW, Figures 2 and 3).

    stage 0   F0 F1 F2 F3 .  .  .  .  B0 F4 B1 F5 ...
    stage 1    . F0 F1 F2 .  .  B0 F3 B1 F4 ...
    stage 2    .  . F0 F1 B0 F2 B1 F3 ...            (columns are not to scale)
    stage 3    .  .  . F0 B0 F1 B1 F2 ...

Stage s starts p-s-1 forwards ahead of its first backward, as many as it takes for the last stage's first gradient to come back, and so saves p-s
microbatches at most. The turns go on across the borders of batches. With `extra_warmup` it starts twice as far ahead: a gradient may then come later
by as much again, which hides the transfers, at the price of 2(p-s)-1 saved microbatches.
"""

from collections.abc import Sequence

from megatron.pipeline.passes import Legs
from megatron.pipeline.schedules.order import Order, backward, forward


class OneForwardOneBackward(Order):
    def legs(self, stage: int, batches: Sequence[range]) -> Legs:
        first, end = batches[0].start, batches[-1].stop
        ahead = self._ahead(stage)
        legs = []
        for batch in batches:
            leg = []
            for microbatch in batch:
                leg.append(forward(stage, microbatch))
                if microbatch - ahead >= first:
                    leg.append(backward(stage, microbatch - ahead))
            legs.append(leg)
        return [*legs, [backward(stage, microbatch) for microbatch in range(max(first, end - ahead), end)]]

    def max_in_flight(self, stage: int) -> int | None:
        return self._ahead(stage) + 1

    def _ahead(self, stage: int) -> int:
        """Forwards before the first backward, beyond that backward's own."""
        return (self.num_stages - stage - 1) * (2 if self.extra_warmup else 1)
