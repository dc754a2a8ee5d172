"""Orders that are in no table of the project: what an order may do, and no preset does."""

from collections.abc import Sequence
from contextlib import contextmanager
from unittest import mock

from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.schedules import ORDERS, PRESETS, Preset
from megatron.pipeline.schedules.interleaved import Interleaved
from megatron.pipeline.schedules.one_f_one_b import OneForwardOneBackward
from megatron.pipeline.schedules.order import Order, backward, forward
from megatron.pipeline.schedules.passes import Segments


class Entangled(Order):
    """One stage, batches of three: the first backward of a batch stands between the last two of the batch before.

    F0 F1 F2 B0 | F3 B1 B3 B2 F4 F5 | F6 B4 B6 B5 F7 F8 | B7 B8
    """

    def segments(self, stage: int, batches: Sequence[range]) -> Segments:
        segments, waiting = [], []
        for first, *rest in batches:
            between = [waiting[0], first, waiting[1]] if waiting else []
            segment = [forward(stage, first), *(backward(stage, each) for each in between)]
            segment += [forward(stage, microbatch) for microbatch in rest]
            segments.append(segment if waiting else [*segment, backward(stage, first)])
            waiting = rest
        return [*segments, [backward(stage, microbatch) for microbatch in waiting]]

    def max_in_flight(self, stage: int) -> int:
        return 3

    def validate(self, num_microbatches: int) -> None:
        if num_microbatches != 3:
            raise ValueError(f"entangled batches have 3 microbatches, not {num_microbatches}; give them 3")


def split(segments: Segments, lag: int, *, whole: Sequence[int] = ()) -> Segments:
    """The same with I in place of B, and W behind the I of `lag` microbatches more, whichever batch and stage they are
    of; what is left at the end comes in the order of the I. `whole`: positions, modulo 4, of microbatches that keep B.
    """
    waiting, result = [], []
    for segment in segments:
        halves = []
        for each in segment:
            if each.kind is not Kind.BACKWARD or each.microbatch % 4 in whole:
                halves.append(each)
                continue
            halves.append(Instruction(Kind.BACKWARD_INPUT, each.stage, each.microbatch))
            waiting.append(Instruction(Kind.BACKWARD_WEIGHT, each.stage, each.microbatch))
            if len(waiting) > lag:
                halves.append(waiting.pop(0))
        result.append(halves)
    result[-1] += waiting
    return result


class _Split1F1B(OneForwardOneBackward):
    """1F1B with split backwards."""

    lag: int
    whole: Sequence[int] = ()

    def segments(self, stage: int, batches: Sequence[range]) -> Segments:
        return split(super().segments(stage, batches), self.lag, whole=self.whole)

    def max_in_flight(self, stage: int) -> int:
        return super().max_in_flight(stage) + self.lag


class SplitAtOnce(_Split1F1B):
    """Each W follows its I."""

    lag = 0


class SplitLate(_Split1F1B):
    """W two microbatches behind I: under 2bw the first I of a batch stand before the last W of the one before."""

    lag = 2


class SplitInPart(_Split1F1B):
    """Some microbatches have whole backwards, which stand between the halves of others."""

    lag, whole = 1, (1, 2)


class SplitAtTheEnd(_Split1F1B):
    """All W of a batch behind its last I, on every stage."""

    lag = 64


class SplitInterleaved(Interleaved):
    """Two stages a rank: the W of one stand between the I of the other."""

    def segments(self, rank: int, batches: Sequence[range]) -> Segments:
        return split(super().segments(rank, batches), 3)

    def max_in_flight(self, stage: int) -> int:
        return super().max_in_flight(stage) + 3

    def max_in_flight_on_rank(self, rank: int) -> int:
        return super().max_in_flight_on_rank(rank) + 3


SPLIT = {
    "split-at-once": SplitAtOnce,
    "split-late": SplitLate,
    "split-in-part": SplitInPart,
    "split-at-the-end": SplitAtTheEnd,
    "split-interleaved": SplitInterleaved,
}


@contextmanager
def registered():
    """In this block the tables have these orders, `2bw-entangled`, and of each split order its name as a preset with
    weights `flush`, and `2bw-NAME`; and `whole-v`, the stages of `zbv` with whole backwards.
    """
    presets = {
        "2bw-entangled": Preset("entangled", "2bw"),
        "whole-v": Preset("merged-1f1b", "flush", placement="v"),
    }
    for name in SPLIT:
        presets |= {name: Preset(name, "flush"), f"2bw-{name}": Preset(name, "2bw")}
    with mock.patch.dict(ORDERS, {"entangled": Entangled, **SPLIT}), mock.patch.dict(PRESETS, presets):
        yield
