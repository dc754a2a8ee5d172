"""Schedules that no preset of the project is: their stages lie elsewhere than on ranks 0, 1, ... in turn.

v                 0 1 1 0    there and back: the first and the last stage on one rank
reversed          3 2 1 0    one stage a rank, from the last rank to the first
shuffled          2 0 3 1
lopsided          1 0 0 0    numbers of stages that differ, and neighbours on one rank
"""

from collections.abc import Sequence
from contextlib import contextmanager
from unittest import mock

from megatron.pipeline.schedules import ORDERS, PLACEMENTS, PRESETS, Preset
from megatron.pipeline.schedules.order import Order, backward, forward
from megatron.pipeline.schedules.passes import Segment, Segments


class ThereAndBack(Order):
    """Every rank: all forwards of a batch, microbatch by microbatch through all its stages; then all backwards."""

    drains = True
    interleaves = True

    def segments(self, rank: int, batches: Sequence[range]) -> Segments:
        return [*(self._segment(rank, batch) for batch in batches), []]

    def max_in_flight(self, stage: int) -> int | None:
        return None

    def _segment(self, rank: int, batch: range) -> Segment:
        stages = [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]
        forwards = [forward(stage, microbatch) for microbatch in batch for stage in stages]
        return forwards + [backward(stage, microbatch) for microbatch in batch for stage in reversed(stages)]


class OneByOne(ThereAndBack):
    """The same with the backward of a microbatch before the next one's forward, so that it never drains."""

    drains = False

    def max_in_flight(self, stage: int) -> int:
        return 1

    def max_in_flight_on_rank(self, rank: int) -> int:
        return self.rank_of_stage.count(rank)

    def _segment(self, rank: int, batch: range) -> Segment:
        alone = (super(OneByOne, self)._segment(rank, range(microbatch, microbatch + 1)) for microbatch in batch)
        return [each for segment in alone for each in segment]


def reversed_ranks(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    return tuple(reversed(range(num_ranks))) * num_virtual_stages


def shuffled(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Even ranks stand behind odd ones: 1 0 for two, 2 0 3 1 for four."""
    half = num_ranks // 2
    return tuple(half * (1 - place % 2) + place // 2 for place in range(num_ranks)) * num_virtual_stages


def lopsided(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """One stage on each rank but rank 0, which has all others."""
    return (*range(num_ranks - 1, 0, -1), *(0,) * (num_ranks * (num_virtual_stages - 1) + 1))


_ORDERS = {"there-and-back": ThereAndBack, "one-by-one": OneByOne}
_PLACEMENTS = {"reversed": reversed_ranks, "shuffled": shuffled, "lopsided": lopsided}
PLACED = {
    "v": Preset("there-and-back", "flush", placement="v"),
    "2bw-v": Preset("one-by-one", "2bw", placement="v"),
    "lopsided": Preset("there-and-back", "flush", placement="lopsided"),
    "reversed": Preset("1f1b", "flush", placement="reversed"),
    "2bw-reversed": Preset("1f1b", "2bw", placement="reversed"),
    "pipedream-shuffled": Preset("1f1b", "stash", placement="shuffled"),
    "shuffled": Preset("1f1b", "flush", placement="shuffled"),
}


@contextmanager
def registered():
    """In this block the tables have these orders, placements and presets."""
    with mock.patch.dict(ORDERS, _ORDERS), mock.patch.dict(PLACEMENTS, _PLACEMENTS), mock.patch.dict(PRESETS, PLACED):
        yield
