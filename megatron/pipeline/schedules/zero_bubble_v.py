"""ZB-V: two stages a rank in a V, and backwards that are split, so that only the start and the end are idle (Qi et al.,
2023, section 6; 2024, 4.1).

Rank r has the stages r and 2p-1-r: a microbatch goes down the ranks and comes back up, so the rank that begins it also
ends it, and its gradients go down and up in the same way. Two ranks; `a` is a rank's lower stage, `b` its upper one, and
F, I and W take a unit each:

    rank 0   Fa0 Fa1 Fa2  .  Fb0 Ib0 Wb0 Fb1 Ib1 Wb1 Fa3 Ia0 Wa0 Fb2 Ib2 Wb2 ...
    rank 1    .  Fa0 Fb0 Fa1 Fb1 Fa2 Ib0 ...

Turns of a rank, by how far it is from the V's end:

    2(p-r) - 1    Fa                                  the first microbatches go down
    r             Fb Fa                               some have come back, others still go down
    p - r         Fb Ib Wb                            backwards begin: so many until the first gradient is back here
    others        Fa Ia Wa Fb Ib Wb                   while there are microbatches
    r             Ia Ib                               forwards are over; W wait, and gradients do not
    p - r         Ia Wa                               the last of Ia, and W from the first that waits
    rest          W of b, then of a, that are left

A rank holds 2p microbatches at its two stages, as much as p at a stage of twice the layers: what the first stage of 1F1B
holds. Batches of fewer than 2p-1 microbatches do not fill the V; their turns are those of a full one, without what is not
there.
"""

from collections.abc import Sequence
from itertools import count

from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.passes import Segment, Segments
from megatron.pipeline.schedules.placements import v

_F, _I, _W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_LOWER, _UPPER = 0, 1  # a rank's stages, of which gradients come to the upper one first


class ZeroBubbleV(Order):
    drains = True
    interleaves = True
    virtual_stages = 2

    def segments(self, rank: int, batches: Sequence[range]) -> Segments:
        return [*(self._segment(rank, batch) for batch in batches), []]

    def validate_placement(self) -> None:
        if self.rank_of_stage != v(self.num_ranks, 2):
            raise ValueError(
                f"zbv takes stages that are placed there and back again, not {self.rank_of_stage}; use placement v, as "
                "the preset zbv does"
            )

    def max_in_flight(self, stage: int) -> int:
        """The most is reached with the forward before the stage's first backward."""
        rank = self.rank_of_stage[stage]
        return 2 * self.num_ranks - rank if stage < self.num_ranks else rank + 1

    def max_in_flight_on_rank(self, rank: int) -> int:
        return 2 * self.num_ranks

    def _segment(self, rank: int, batch: range) -> Segment:
        stages = rank, self.num_stages - 1 - rank
        done = {(kind, chunk): count() for kind in (_F, _I, _W) for chunk in (_LOWER, _UPPER)}
        segment = []
        for kind, chunk in self._turns(rank, max(len(batch), 2 * self.num_ranks - 1)):
            index = next(done[kind, chunk])
            if index < len(batch):
                segment.append(Instruction(kind, stages[chunk], batch[index]))
        return segment

    def _turns(self, rank: int, num_microbatches: int) -> list[tuple[Kind, int]]:
        """What a rank does, and at which of its stages; each time with that stage's next microbatch."""
        p, from_turn = self.num_ranks, self.num_ranks - rank
        fa, fb, ia, ib, wa, wb = ((kind, chunk) for kind in (_F, _I, _W) for chunk in (_LOWER, _UPPER))
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
