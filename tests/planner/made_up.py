"""Schedules that are in no table of the project, made up so that nothing can know them by name."""

from collections.abc import Sequence
from contextlib import contextmanager
from unittest import mock

from megatron.pipeline.program.weight_policies import POLICIES, WeightPolicy
from megatron.pipeline.schedules import ORDERS, PRESETS, Preset
from megatron.pipeline.schedules.order import Order, backward, forward
from megatron.pipeline.schedules.passes import Segments


class Pairs(Order):
    """Two forwards and two backwards in turn: 1F1B whose turns are of two microbatches.

    stage 0   F0 F1 F2 F3   .  .     B0 B1 F4 F5 B2 B3
    stage 1    .    F0 F1 B0 B1 F2 F3 B2 B3
    """

    def segments(self, stage: int, batches: Sequence[range]) -> Segments:
        ahead = self.max_in_flight(stage) - 2
        first, end = batches[0].start, batches[-1].stop
        segments = []
        for batch in batches:
            segment = []
            for microbatch in batch[::2]:
                segment += [forward(stage, microbatch), forward(stage, microbatch + 1)]
                if microbatch - ahead >= first:
                    segment += [backward(stage, microbatch - ahead), backward(stage, microbatch - ahead + 1)]
            segments.append(segment)
        return [*segments, [backward(stage, microbatch) for microbatch in range(max(first, end - ahead), end)]]

    def max_in_flight(self, stage: int) -> int:
        return 2 * (self.num_stages - stage)

    def validate(self, num_microbatches: int) -> None:
        if num_microbatches % 2:
            raise ValueError(f"pairs do not make up {num_microbatches} microbatches; give an even number")


class ThereAndBack(Order):
    """A rank of two stages runs all forwards, the lower stage's first, and then all backwards, the upper stage's first.

    rank 0   Fa0 Fa1  .   .   .   .  Fd0 Fd1 Bd0 Bd1  .   .   .   .  Ba0 Ba1
    rank 1    .  Fb0 Fb1 Fc0 Fc1  .   .   .   .  Bc0 Bc1 Bb0 Bb1
    """

    drains = True
    interleaves = True

    def segments(self, rank: int, batches: Sequence[range]) -> Segments:
        stages = [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]
        segments = []
        for batch in batches:
            forwards = [forward(stage, microbatch) for stage in stages for microbatch in batch]
            segments.append(forwards + [backward(stage, each) for stage in reversed(stages) for each in batch])
        return [*segments, []]

    def max_in_flight(self, stage: int) -> None:
        return None


class Wrong(Order):
    """The first stage waits for a gradient before it has sent all that this takes."""

    def segments(self, stage: int, batches: Sequence[range]) -> Segments:
        ahead = stage
        segments = []
        for batch in batches:
            segment = []
            for microbatch in batch:
                segment.append(forward(stage, microbatch))
                if microbatch - ahead >= batches[0].start:
                    segment.append(backward(stage, microbatch - ahead))
            segments.append(segment)
        end = batches[-1].stop
        return [*segments, [backward(stage, each) for each in range(max(batches[0].start, end - ahead), end)]]

    def max_in_flight(self, stage: int) -> int:
        return stage + 1


@contextmanager
def registered():
    """In this block the tables have them."""
    orders = {"pairs": Pairs, "there-and-back": ThereAndBack}
    policies = {"3bw": WeightPolicy("3bw", delay=2), "4bw": WeightPolicy("4bw", delay=3)}
    presets = {
        "double-buffered": Preset("1f1b", "2bw"),
        "triple": Preset("1f1b", "3bw"),
        "quadruple": Preset("1f1b", "4bw"),
        "pairs": Preset("pairs", "flush"),
        "2bw-pairs": Preset("pairs", "2bw"),
        "triple-pairs": Preset("pairs", "3bw"),
        "v-gpipe": Preset("there-and-back", "flush", placement="v"),
    }
    with mock.patch.dict(ORDERS, orders), mock.patch.dict(POLICIES, policies), mock.patch.dict(PRESETS, presets):
        yield
