"""Orders that are in no table of the project: what an order may do, and no preset does."""

from collections.abc import Sequence
from contextlib import contextmanager
from unittest import mock

from megatron.pipeline.schedules import ORDERS, PRESETS, Preset
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


@contextmanager
def registered():
    """In this block the tables have these orders, and `2bw-entangled`."""
    with (
        mock.patch.dict(ORDERS, {"entangled": Entangled}),
        mock.patch.dict(PRESETS, {"2bw-entangled": Preset("entangled", "2bw")}),
    ):
        yield
