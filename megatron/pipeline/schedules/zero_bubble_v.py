"""ZB-V: two stages on each rank, placed in a V, and backwards in halves (Qi et al., 2023, section 6).

No rank idles between its first and its last computation. Rank r has the stages r and 2p-1-r. A microbatch goes down the
ranks and comes back up, so the rank that begins the microbatch also ends it. Gradients go down and up in the same way.
On two ranks, with one unit of time for each F, I and W, and with `a` and `b` for a rank's lower and upper stage:

    rank 0   Fa0 Fa1 Fa2 Fb0 Ib0 Wb0 Fb1 Ib1 Wb1 Fa3 Ia0 Wa0 Fb2 Ib2 Wb2 Ia1 Wa1 Fb3 Ib3 Wb3 Ia2 Wa2 Ia3 Wa3
    rank 1    .  Fa0 Fb0 Fa1 Fb1 Ib0 Wb0 Fa2 Ia0 Wa0 Fb2 Ib1 Wb1 Fa3 Ia1 Wa1 Fb3 Ib2 Wb2 Ia2 Ib3 Ia3 Wa2 Wb3 Wa3

The turns of rank r with m microbatches:

    repeated      turn
    2(p-r) - 1    Fa                   the first microbatches go down
    r             Fb Fa                some microbatches come back, and others still go down
    p - r         Fb Ib Wb             backwards begin, and the first gradient has not come back to the lower stage
    m - 2p+1 + r  Fa Ia Wa Fb Ib Wb    the steady state
    p - 1 - r     Ia Wa Fb Ib Wb       no microbatch is left to begin
    r             Ia Ib                W are delayed, so that gradients are not
    p - r         Ia Wa
    r             Wb
    r             Wa

A rank holds at most 2p microbatches, summed over its two stages. This takes as much memory as p microbatches at a stage
with twice the layers, which the first stage of 1F1B holds. A batch of fewer than 2p-1 microbatches does not fill the V.
It takes the turns of 2p-1 microbatches, without the computations of the missing ones. With one stage on each rank the
order is ZB-H1.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count
from typing import ClassVar

from megatron.pipeline.program.edges import v
from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.schedules.order import Order, backward_input, backward_weight, forward
from megatron.pipeline.schedules.passes import Segment, Segments
from megatron.pipeline.schedules.zero_bubble_h1 import ZeroBubbleH1

_LOWER, _UPPER = 0, 1  # the two stages of a rank; gradients reach the upper one first
_COMPUTATIONS = forward, backward_input, backward_weight
_Turn = tuple[Callable[[int, int], Instruction], int]
"""A computation of the next microbatch at the lower or the upper stage of a rank."""


class VOrder(Order):
    """An order of one batch after another, for two stages on each rank, placed in a V.

    Attributes:
        name: the name of the order in messages; also that of its preset.
    """

    drains = True
    interleaves = True
    virtual_stages = 2
    name: ClassVar[str]

    def segments(self, rank: int, batches: Sequence[range]) -> Segments:
        return [*(self._segment(rank, batch) for batch in batches), []]

    def validate_placement(self) -> None:
        if self.microbatch_group_size is not None:
            raise ValueError(f"{self.name} takes no groups of microbatches; drop microbatch_group_size")
        if self.rank_of_stage != v(self.num_ranks, self.num_virtual_stages):
            raise ValueError(
                f"{self.name} takes stages that are placed there and back again, not {self.rank_of_stage}; use "
                f"placement v, as the preset {self.name} does"
            )

    @abstractmethod
    def _segment(self, rank: int, batch: range) -> Segment:
        """Return the computations of a rank for one batch."""


class ZeroBubbleV(VOrder):
    name = "zbv"

    def max_in_flight(self, stage: int) -> int:
        """Return the largest number in flight, which the stage reaches with the last forward before its first I."""
        if self._flat is not None:
            return self._flat.max_in_flight(stage)
        rank = self.rank_of_stage[stage]
        return 2 * self.num_ranks - rank if stage < self.num_ranks else rank + 1

    def max_in_flight_on_rank(self, rank: int) -> int:
        return self.num_virtual_stages * self.num_ranks

    @cached_property
    def _flat(self) -> ZeroBubbleH1 | None:
        """The order that replaces this one if each rank has one stage; None: ranks have two."""
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
        begun = 2 * p - 1 - rank  # forwards of the lower stage before the steady state
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
