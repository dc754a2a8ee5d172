"""ZB-H1: 1F1B with backwards in halves, so that the weight halves fill the bubbles (Qi et al., 2023, 3.1).

I computes the gradient of a stage's input, which the stage before waits for. W computes the gradients of its weights,
which are not needed before the batch ends. With one unit of time for each F, I and W:

    stage 0   F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
    stage 1    . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2    .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Stage s starts p-1-s forwards ahead, as in 1F1B, and each W of stage s stands s microbatches behind its I. So every
stage holds p microbatches between forward and end of W, as many as the first stage of 1F1B. A gradient does not wait
for the W of later stages. At the end, each stage computes its remaining W while it would otherwise wait. So each rank
idles for (p-1)(f+i-w) if f = i = w and a batch has at least p microbatches. The turns go on across the borders of
batches.
"""

from collections.abc import Sequence

from megatron.pipeline.schedules.order import Order, backward_input, backward_weight, forward, in_turns
from megatron.pipeline.schedules.passes import Segments


class ZeroBubbleH1(Order):
    def segments(self, stage: int, batches: Sequence[range]) -> Segments:
        ahead, late = self.num_stages - 1 - stage, stage
        return in_turns(stage, batches, (forward, 0), (backward_input, ahead), (backward_weight, ahead + late))

    def max_in_flight(self, stage: int) -> int:
        return self.num_stages
