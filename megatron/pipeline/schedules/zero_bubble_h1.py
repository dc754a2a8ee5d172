"""ZB-H1: 1F1B whose backwards are split, so that what nobody waits for fills the bubbles (Qi et al., 2023, 3.1).

I computes the gradient of a stage's input, which the stage before waits for; W the gradients of its weights, which
nobody waits for before the batch ends. With one unit each for F, I and W:

    stage 0   F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
    stage 1    . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2    .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Stage s begins p-1-s forwards ahead, as in 1F1B, and its W stand s microbatches behind their I. So every stage holds p
microbatches between forward and end of W, as many as the first stage of 1F1B. Gradients come back without the W of the
stages behind, and at the end each stage computes the W that it has left while those before it still wait: a batch of p
microbatches and more idles for (p-1)(f+i-w) where f = i = w. The turns go on across the borders of batches.
"""

from collections.abc import Sequence

from megatron.pipeline.schedules.order import Order, backward_input, backward_weight, forward
from megatron.pipeline.schedules.passes import Segments


class ZeroBubbleH1(Order):
    def segments(self, stage: int, batches: Sequence[range]) -> Segments:
        ahead, late = self.num_stages - 1 - stage, stage
        first, end = batches[0].start, batches[-1].stop
        segments = []
        for batch in batches:
            segment = []
            for microbatch in batch:
                segment.append(forward(stage, microbatch))
                if microbatch - ahead >= first:
                    segment.append(backward_input(stage, microbatch - ahead))
                if microbatch - ahead - late >= first:
                    segment.append(backward_weight(stage, microbatch - ahead - late))
            segments.append(segment)
        rest = []
        for microbatch in range(max(first, end - ahead), end + late):
            if microbatch < end:
                rest.append(backward_input(stage, microbatch))
            if microbatch - late >= first:
                rest.append(backward_weight(stage, microbatch - late))
        return [*segments, rest]

    def max_in_flight(self, stage: int) -> int:
        return self.num_stages
