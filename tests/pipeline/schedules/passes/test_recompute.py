"""Recompute stands right before the backward."""

from megatron.pipeline.schedules.passes.activations import add_recompute
from tests.pipeline.schedules.passes.written import extent, segments, texts


def test_recompute_stands_right_before_the_backward():
    """So one microbatch at a time is there in full, and the recompute runs while the gradient is on its way."""
    assert texts(add_recompute(segments("0F0 0B0", "0B1"), extent("flush", recompute=True))) == [
        "0F0 0R0 0B0",
        "0R1 0B1",
    ]


def test_recompute_serves_both_halves_of_a_backward():
    """Where the backward is split, its input half recomputes and its weight half finds what it needs."""
    assert texts(add_recompute(segments("0F0 0I0 0W0"), extent("flush", recompute=True))) == ["0F0 0R0 0I0 0W0"]
