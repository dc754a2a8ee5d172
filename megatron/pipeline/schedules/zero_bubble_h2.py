"""ZB-H2: zero bubble with nearly twice the memory of 1F1B (Qi et al., 2023, section 2.3).

Stage s starts 2(p-1-s) forwards ahead, twice as many as under ZB-H1, and its W stand 2s microbatches behind their I.
With one unit of time for each F, I and W, on two stages:

    stage 0   F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
    stage 1    . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

These are the turns of every second stage of ZB-H1 on 2p-1 stages, so each stage holds 2p-1 microbatches. No stage idles
between its first and its last computation. The rest of the bubble is the late start: stage s begins s forwards late,
(p-1)f in all. The paper lets the next batch begin before the last stage has ended, and takes the step back if a
gradient has overflowed or is clipped. Here each batch uses the true update of the batch before, so this part stays.
"""

from collections.abc import Sequence

from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.passes import Segments
from megatron.pipeline.schedules.zero_bubble_h1 import ZeroBubbleH1


class ZeroBubbleH2(Order):
    def segments(self, stage: int, batches: Sequence[range]) -> Segments:
        turns = ZeroBubbleH1(2 * self.num_stages - 1).segments(2 * stage, batches)
        return [[Instruction(each.kind, stage, each.microbatch) for each in segment] for segment in turns]

    def max_in_flight(self, stage: int) -> int:
        return 2 * self.num_stages - 1
