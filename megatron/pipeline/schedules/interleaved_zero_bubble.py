"""Interleaved 1F1B with backwards in halves, whose W fill the bubbles.

Forwards, and I in the place of backwards, stand as in `Interleaved`, which is Megatron-LM's order. Rank r is
2(p-1-r) + (v-1)*group forwards ahead there, so the first rank is ahead most. Here each W of rank r stands so many I
behind its own that every rank holds as many microbatches as the first one: 2r of them. On two ranks with two stages
each, called `a` and `b`, and four microbatches:

    rank 0   Fa0 Fa1 Fb0 Fb1  .  Fa2 Ib0 Wb0 Fa3 Ib1 Wb1 Fb2 Ia0 Wa0 Fb3 Ia1 Wa1 Ib2 Wb2 Ib3 Wb3 Ia2 Wa2 Ia3 Wa3
    rank 1    .  Fa0 Fa1 Fb0 Ib0 Fb1 Ib1 Fa2 Ia0 Wb0 Fa3 Ia1 Wb1 Fb2 Ib2 Wa0 Fb3 Ib3 Wa1 Ia2 Wb2 Ia3 Wb3 Wa2 Wa3

I and the I of other ranks do not wait for W, and W are computed where a rank would otherwise wait at the end. With one
unit of time for each F, I and W a rank idles for (p-1)f/v, with f for the whole share of a rank, if the batch has whole
groups. With one stage on each rank the order is ZB-H1.
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
