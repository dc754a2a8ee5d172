"""V-Half and V-Min: zero bubble in a V with half and with a third of 1F1B's activations (Qi et al., 2024).

Both repeat a *building block*: the times of the computations of one microbatch, with one unit of time for each F, I and
W. A rank has six units of work for a microbatch, so microbatch n comes 6n units after microbatch 0. No two of a rank's
four times are equal modulo 6, so computations do not collide, and W take the two units that are left. A stage holds a
microbatch from F to W, so the times of the block bound the memory of each rank. With `a` and `b` for a rank's lower and
upper stage:

             Fa    Fb           Ib                 Ia
    V-Half   2r    3p - 2 - r   3p - 1 + 2r + c    6p - 2 - r + c     c = 3 if p is even, else 0
    V-Min    r     2p - 1 - r   2p + r + c         4p - 1 - r + c     c = (2 - 2p) mod 6

Without the wait c, computations of a rank would collide, except that V-Min with p = 3k + 2 needs none. There the wait
takes no memory and makes the bubble smaller. At its two stages a rank of V-Half holds 2 floor((p + 2) / 2)
microbatches, a rank of V-Min 2 floor((p + 4) / 3), and a rank of ZB-V 2p.

Repeated blocks leave units free at both ends of a batch, so there the order is *squeezed*: a free rank takes the first
computation of its row whose input is there, if all that it overtakes still fits into the memory. Behind the last
microbatch that rank 0 begins, W wait while the rank can do anything else. Between the ends a rank of V-Half keeps the
order of its block; V-Min is squeezed everywhere. The rows are found by executing them in units of time. V-Half on two
ranks:

    rank 0   Fa0 Fa1  .  Fb0 Ib0 Fb1 Ib1 Wb0 Wb1 Fa2 Ia0 Wa0 Ia1 Fb2 Ib2 Ia2 Wa1 Wb2 Wa2
    rank 1    .  Fa0 Fb0 Fa1 Fb1 Ib0 Wb0 Ib1 Wb1 Ia0 Fa2 Ia1 Fb2 Wa0 Wa1 Ib2 Ia2 Wb2 Wa2
"""

import math
from abc import abstractmethod
from collections import deque
from functools import lru_cache
from typing import ClassVar

from megatron.pipeline.schedules.order import backward_input, backward_weight, forward
from megatron.pipeline.schedules.passes import Segment
from megatron.pipeline.schedules.zero_bubble_v import VOrder

_PERIOD = 6  # units of work of a rank for one microbatch
_FA, _FB, _IB, _IA, _WB, _WA = range(_PERIOD)  # a W is two places behind its I
_COMPUTATIONS = forward, forward, backward_input, backward_input, backward_weight, backward_weight
_Block = tuple[int, int, int, int]
"""The times at which a rank computes Fa, Fb, Ib and Ia of microbatch 0."""
_Turn = tuple[int, int]
"""A computation, from `_FA` to `_WA`, and its microbatch."""


class ControllableMemory(VOrder):
    """An order that repeats a block.

    Attributes:
        squeezes_all: the order is squeezed everywhere, and not only at both ends.
    """

    squeezes_all: ClassVar[bool] = False

    def validate_placement(self) -> None:
        super().validate_placement()
        if self.num_virtual_stages != self.virtual_stages:
            raise ValueError(f"{self.name} takes two stages on each rank; make num_virtual_stages 2, or use zb-h1")

    def max_in_flight(self, stage: int) -> int:
        return self.max_in_flight_on_rank(self.rank_of_stage[stage])

    def max_in_flight_on_rank(self, rank: int) -> int:
        return _most_held(self._blocks)

    @property
    def _blocks(self) -> tuple[_Block, ...]:
        return tuple(self._block(rank) for rank in range(self.num_ranks))

    @abstractmethod
    def _block(self, rank: int) -> _Block:
        """Return the building block of a rank."""

    def _segment(self, rank: int, batch: range) -> Segment:
        upper = self.num_stages - 1 - rank
        turns = _rows(self._blocks, len(batch), self.squeezes_all)[rank]
        return [
            _COMPUTATIONS[kind](rank if kind in (_FA, _IA, _WA) else upper, batch[microbatch])
            for kind, microbatch in turns
        ]


class VHalf(ControllableMemory):
    name = "v-half"

    def _block(self, rank: int) -> _Block:
        p, wait = self.num_ranks, 0 if self.num_ranks % 2 else 3
        return 2 * rank, 3 * p - 2 - rank, 3 * p - 1 + 2 * rank + wait, 6 * p - 2 - rank + wait


class VMin(ControllableMemory):
    name = "v-min"
    squeezes_all = True

    def _block(self, rank: int) -> _Block:
        p, wait = self.num_ranks, (2 - 2 * self.num_ranks) % _PERIOD
        return rank, 2 * p - 1 - rank, 2 * p + rank + wait, 4 * p - 1 - rank + wait


def _repeated(block: _Block, num_microbatches: int) -> list[tuple[int, _Turn]]:
    """Return the turns of a rank that repeats its block, each with its time; W take the times that are left."""
    turns = {
        time + _PERIOD * microbatch: (kind, microbatch)
        for kind, time in enumerate(block)
        for microbatch in range(num_microbatches)
    }
    row: list[tuple[int, _Turn]] = []
    late: deque[_Turn] = deque()
    last, time = max(turns), 0
    while time <= last or late:
        if time in turns:
            kind, microbatch = turns[time]
            row.append((time, turns[time]))
            if kind in (_IB, _IA):
                late.append((kind + 2, microbatch))
        elif late:
            row.append((time, late.popleft()))
        time += 1
    return row


def _held_after(held: int, kind: int) -> int:
    """Return how many microbatches a rank holds after a computation, if it held `held` before."""
    return held + (kind <= _FB) - (kind >= _WB)


@lru_cache(maxsize=256)
def _most_held(blocks: tuple[_Block, ...]) -> int:
    """Return the largest number of microbatches that a rank holds at its two stages."""
    most = 0
    for block in blocks:
        held = 0
        for _, (kind, _) in _repeated(block, 2 * len(blocks) + 1):  # no stage holds a microbatch that many periods
            held = _held_after(held, kind)
            most = max(most, held)
    return most


@lru_cache(maxsize=64)
def _rows(blocks: tuple[_Block, ...], num_microbatches: int, squeezes_all: bool) -> tuple[tuple[_Turn, ...], ...]:
    """Return the turns of each rank for one batch: the repeated blocks, squeezed."""
    num_ranks, most = len(blocks), _most_held(blocks)
    steady, drain = blocks[0][_IA], blocks[0][_FA] + _PERIOD * (num_microbatches - 1)
    squeezes_all = squeezes_all or drain < steady  # the batch does not fill the pipeline
    left = [_repeated(block, num_microbatches) for block in blocks]
    rows: list[list[_Turn]] = [[] for _ in blocks]
    ends: dict[tuple[int, int, int], int] = {}
    held, now = [0] * num_ranks, 0

    def choose(rank: int) -> int | None:
        """Return the index in `left[rank]` of the turn that the rank takes; None: the rank waits."""
        row, count, most_before, late, overtaken = left[rank], held[rank], held[rank], None, set()
        begin = row[0][0]
        end = math.inf if squeezes_all or begin >= drain else steady if begin < steady else begin + 1
        for place, (time, (kind, microbatch)) in enumerate(row):
            if time >= end or len(overtaken) == _PERIOD:
                break
            fits = place == 0 or kind > _FB or most_before < most
            before = _before(rank, kind, num_ranks)
            is_ready = before is None or ends.get((*before, microbatch), now + 1) <= now
            if fits and is_ready and kind not in overtaken:
                if begin < drain or kind < _WB:
                    return place
                late = place if late is None else late
            overtaken.add(kind)
            count = _held_after(count, kind)
            most_before = max(most_before, count)
        return late

    while any(left):
        chosen = [(rank, choose(rank)) for rank in range(num_ranks) if left[rank]]
        now += 1
        for rank, place in chosen:
            if place is not None:
                _, (kind, microbatch) = left[rank].pop(place)
                rows[rank].append((kind, microbatch))
                held[rank] = _held_after(held[rank], kind)
                ends[rank, kind, microbatch] = now
    return tuple(map(tuple, rows))


def _before(rank: int, kind: int, num_ranks: int) -> tuple[int, int] | None:
    """Return the rank and the kind of the computation whose result a computation needs; None: it needs none."""
    if kind >= _WB:
        return rank, kind - 2
    source = rank - 1 if kind in (_FA, _IB) else rank + 1
    if 0 <= source < num_ranks:
        return source, kind
    return None if kind == _FA else (rank, kind - 1)
