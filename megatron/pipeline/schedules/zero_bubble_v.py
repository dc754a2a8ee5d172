"""ZB-V: two stages a rank in a V, and backwards that are split, so that no rank idles between its first and its last
computation (Qi et al., 2023, section 6).

Rank r has the stages r and 2p-1-r: a microbatch goes down the ranks and comes back up, so the rank that begins it also
ends it, and its gradients go down and up in the same way. With one unit each for F, I and W, on two ranks; `a` is a
rank's lower stage, `b` its upper one:

    rank 0   Fa0 Fa1 Fa2 Fb0 Ib0 Wb0 Fb1 Ib1 Wb1 Fa3 Ia0 Wa0 Fb2 Ib2 Wb2 Ia1 Wa1 Fb3 Ib3 Wb3 Ia2 Wa2 Ia3 Wa3
    rank 1    .  Fa0 Fb0 Fa1 Fb1 Ib0 Wb0 Fa2 Ia0 Wa0 Fb2 Ib1 Wb1 Fa3 Ia1 Wa1 Fb3 Ib2 Wb2 Ia2 Ib3 Ia3 Wa2 Wb3 Wa3

What rank r does with m microbatches:

    2(p-r) - 1    Fa                   the first microbatches go down
    r             Fb Fa                some have come back, others still go down
    p - r         Fb Ib Wb             backwards begin; so many until the first gradient is back here
    m - 2p+1 + r  Fa Ia Wa Fb Ib Wb
    p - 1 - r     Ia Wa Fb Ib Wb       no microbatch is left to begin
    r             Ia Ib                W wait, so that gradients do not
    p - r         Ia Wa
    r             Wb, then r Wa        what is left

A rank holds 2p microbatches at its two stages at most, as much as p at a stage of twice the layers, which the first
stage of 1F1B holds. A batch of fewer than 2p-1 microbatches does not fill the V; its turns are those of 2p-1, without
what is not there. With one stage on each rank this is ZB-H1.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count

from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.schedules.order import Order, backward_input, backward_weight, forward
from megatron.pipeline.schedules.passes import Segment, Segments
from megatron.pipeline.schedules.placements import v
from megatron.pipeline.schedules.zero_bubble_h1 import ZeroBubbleH1

_LOWER, _UPPER = 0, 1  # a rank's stages, of which gradients come to the upper one first
_COMPUTATIONS = forward, backward_input, backward_weight
_Turn = tuple[Callable[[int, int], Instruction], int]
"""What is computed, and at which of a rank's stages; each time with that stage's next microbatch."""


class ZeroBubbleV(Order):
    drains = True
    interleaves = True
    virtual_stages = 2

    def segments(self, rank: int, batches: Sequence[range]) -> Segments:
        return [*(self._segment(rank, batch) for batch in batches), []]

    def validate_placement(self) -> None:
        if self.microbatch_group_size is not None:
            raise ValueError("zbv takes no groups of microbatches; drop microbatch_group_size")
        if self.rank_of_stage != v(self.num_ranks, self.num_virtual_stages):
            raise ValueError(
                f"zbv takes stages that are placed there and back again, not {self.rank_of_stage}; use placement v, as "
                "the preset zbv does"
            )

    def max_in_flight(self, stage: int) -> int:
        """The most is reached with the forward before the stage's first backward."""
        if self._flat is not None:
            return self._flat.max_in_flight(stage)
        rank = self.rank_of_stage[stage]
        return 2 * self.num_ranks - rank if stage < self.num_ranks else rank + 1

    def max_in_flight_on_rank(self, rank: int) -> int:
        return self.num_virtual_stages * self.num_ranks

    @cached_property
    def _flat(self) -> ZeroBubbleH1 | None:
        """The order where ranks have one stage."""
        return ZeroBubbleH1(self.num_stages) if self.num_virtual_stages == 1 else None

    def _segment(self, rank: int, batch: range) -> Segment:
        if self._flat is not None:
            return [each for segment in self._flat.segments(rank, [batch]) for each in segment]
        stages = rank, self.num_stages - 1 - rank
        done = {(compute, chunk): count() for compute in _COMPUTATIONS for chunk in (_LOWER, _UPPER)}
        segment = []
        for compute, chunk in self._turns(rank, max(len(batch), 2 * self.num_ranks - 1)):
            index = next(done[compute, chunk])
            if index < len(batch):
                segment.append(compute(stages[chunk], batch[index]))
        return segment

    def _turns(self, rank: int, num_microbatches: int) -> list[_Turn]:
        p, from_turn = self.num_ranks, self.num_ranks - rank
        fa, fb, ia, ib, wa, wb = ((compute, chunk) for compute in _COMPUTATIONS for chunk in (_LOWER, _UPPER))
        begun = 2 * p - 1 - rank  # microbatches, when backwards of the lower stage begin
        return [
            *[fa] * (2 * from_turn - 1),
            *[fb, fa] * rank,
            *[fb, ib, wb] * from_turn,
            *[fa, ia, wa, fb, ib, wb] * (num_microbatches - begun),
            *[ia, wa, fb, ib, wb] * (begun - p),
            *[ia, ib] * rank,
            *[ia, wa] * from_turn,
            *[wb] * rank,
            *[wa] * rank,
        ]
