"""An order, a weight policy and a placement that the project does not have, as somebody's own file would bring them.

`Behind` does the forwards of a batch, then the backwards of the batch before, on ranks whose stages lie in a zigzag
that begins at the last rank. `3bw` has batch j use the weights of version j - 2.

    2 ranks, stages 1 and 2 on rank 0, 0 and 3 on rank 1; batches of 2; primes mark the second stage of a rank
    rank 1   F0 F1 F'0 F'1 | F2 F3 F'2 F'3 B'0 B'1 B0 B1 | ...
"""

from collections.abc import Sequence
from contextlib import contextmanager
from unittest import mock

from megatron.pipeline.program.weight_policies import POLICIES, WeightPolicy
from megatron.pipeline.schedules import ORDERS, PLACEMENTS, PRESETS, Preset
from megatron.pipeline.schedules.order import Order, backward, forward
from megatron.pipeline.schedules.passes import Segments


class Behind(Order):
    interleaves = True

    def segments(self, rank: int, batches: Sequence[range]) -> Segments:
        stages = [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]
        forwards = [[forward(stage, each) for stage in stages for each in batch] for batch in batches]
        backwards = [[backward(stage, each) for stage in reversed(stages) for each in batch] for batch in batches]
        return [*map(list.__add__, forwards, [[], *backwards[:-1]]), backwards[-1]]

    def max_in_flight(self, stage: int) -> int | None:
        return None


def from_the_end(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """A zigzag that begins at the last rank: 1 0 0 1 for two ranks."""
    turns = [tuple(range(num_ranks))[:: -1 if turn % 2 == 0 else 1] for turn in range(num_virtual_stages)]
    return sum(turns, start=())


PRESET = "3bw-behind"


@contextmanager
def registered():
    """In this block the tables have the three, and a preset of them."""
    with (
        mock.patch.dict(ORDERS, {"behind": Behind}),
        mock.patch.dict(POLICIES, {"3bw": WeightPolicy("3bw", delay=2)}),
        mock.patch.dict(PLACEMENTS, {"from-the-end": from_the_end}),
        mock.patch.dict(PRESETS, {PRESET: Preset("behind", "3bw", placement="from-the-end")}),
    ):
        yield
