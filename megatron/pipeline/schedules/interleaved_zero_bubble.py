"""Interleaved 1F1B with backwards in halves, whose W fill the bubbles.

Forwards, and I in the place of backwards, stand as in `Interleaved`, which is Megatron-LM's order. Rank r is
2(p-1-r) + (v-1)*group forwards ahead there, so the first rank is ahead most. Here each W of rank r stands 2r I behind
its own I, so every rank holds as many microbatches as the first rank. On two ranks with two stages each, called `a` and
`b`, and four microbatches:

    rank 0   Fa0 Fa1 Fb0 Fb1  .  Fa2 Ib0 Wb0 Fa3 Ib1 Wb1 Fb2 Ia0 Wa0 Fb3 Ia1 Wa1 Ib2 Wb2 Ib3 Wb3 Ia2 Wa2 Ia3 Wa3
    rank 1    .  Fa0 Fa1 Fb0 Ib0 Fb1 Ib1 Fa2 Ia0 Wb0 Fa3 Ia1 Wb1 Fb2 Ib2 Wa0 Fb3 Ib3 Wa1 Ia2 Wb2 Ia3 Wb3 Wa2 Wa3

Gradients do not wait for the W of later stages, and at the end each rank computes its remaining W. With one unit of
time for each F, I and W and a batch of two groups or more, a rank idles for (p-1)f/v, with f for its whole share of the
model. With more than six ranks it idles a few units more, because the first rank waits between its first rounds of
forwards.
With one stage on each rank the order is ZB-H1.
"""

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules.interleaved import Interleaved
from megatron.pipeline.schedules.order import backward_input, backward_weight
from megatron.pipeline.schedules.passes import Segment


class InterleavedZeroBubble(Interleaved):
    name = "interleaved-zb"

    def _held(self, rank: int) -> int:
        return self._ahead(0, self._group_size)

    def _segment(self, rank: int, batch: range) -> Segment:
        late = self._held(rank) - self._ahead(rank, self._group_size)
        segment: Segment = []
        waiting: Segment = []
        for each in super()._segment(rank, batch):
            if each.kind is Kind.FORWARD:
                segment.append(each)
                continue
            segment.append(backward_input(each.stage, each.microbatch))
            waiting.append(backward_weight(each.stage, each.microbatch))
            if len(waiting) > late:
                segment.append(waiting.pop(0))
        return [*segment, *waiting]
