"""What several programs ask of memory together."""

from megatron.pipeline.schedules import Schedule
from megatron.planner import most
from megatron.planner.memory.schedule_demand import proved_demand


def test_most_of_several_programs():
    """A ramp-up needs what the largest of its batches needs."""
    small, large = (proved_demand(Schedule.preset("gpipe", num_stages=2), count) for count in (2, 6))
    assert most([small, large]) == most([large, small]) == large
    assert large.saved_microbatches == (6, 6)
