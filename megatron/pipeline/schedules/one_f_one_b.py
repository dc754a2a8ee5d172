"""1F1B: some forwards ahead, then one forward and one backward in turn (PipeDream; PipeDream-2BW, Figures 2 and 3).

    stage 0   F0 F1 F2  .  .     B0 F3    B1 ...
    stage 1    . F0 F1  .  B0    F2 B1    F3 ...
    stage 2    .  . F0 B0  F1 B1    F2 B2    ...

Stage s is p-s-1 forwards ahead, as many as it takes for the last stage's first gradient to come back, so it saves the
activations of p-s microbatches. Where stages are no chain it is as many as edges lead from it to the end. The turns go
on across the borders of batches. With `extra_warmup` it is twice as far ahead: a gradient may then come that much
later, which hides its transfers, at the price of 2(p-s)-1 saved microbatches.
"""

from collections.abc import Sequence

from megatron.pipeline.schedules.order import Order, backward, forward
from megatron.pipeline.schedules.passes import Segments


class OneForwardOneBackward(Order):
    extends_warmup = True
    follows_edges = True

    def segments(self, stage: int, batches: Sequence[range]) -> Segments:
        ahead = self._ahead(stage)
        first, end = batches[0].start, batches[-1].stop
        segments = []
        for batch in batches:
            segment = []
            for microbatch in batch:
                segment.append(forward(stage, microbatch))
                if microbatch - ahead >= first:
                    segment.append(backward(stage, microbatch - ahead))
            segments.append(segment)
        rest = range(max(first, end - ahead), end)
        return [*segments, [backward(stage, microbatch) for microbatch in rest]]

    def max_in_flight(self, stage: int) -> int | None:
        return self._ahead(stage) + 1

    def _ahead(self, stage: int) -> int:
        """Forwards that a stage runs before the one that is followed by its first backward."""
        return self.graph.depth(stage) * (2 if self.extra_warmup else 1)
