"""The order of GPipe."""

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import Schedule
from tests.pipeline.strategies import kinds_of


def test_gpipe_runs_backwards_in_ascending_order():
    """All forwards of a batch, then all its backwards, ascending, so that sums of gradients agree with 1F1B's."""
    for row in Schedule.preset("gpipe", num_stages=3).build((3, 2)).rows:
        words = [f"{each.kind.value}{each.microbatch}" for each in kinds_of(row, Kind.FORWARD, Kind.BACKWARD)]
        assert words == ["F0", "F1", "F2", "B0", "B1", "B2", "F3", "F4", "B3", "B4"]


def test_a_stage_saves_a_whole_batch():
    """GPipe's stash grows with m: the largest batch of the program."""
    assert Schedule.preset("gpipe", num_stages=3).max_saved_microbatches((3, 5)) == (5, 5, 5)
