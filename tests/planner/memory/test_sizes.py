"""Smaller batches that stand for a large one."""

from megatron.pipeline.schedules import Schedule
from megatron.planner.memory.schedule_demand import representative_sizes
from tests.planner import made_up


def test_they_differ_by_groups_of_p():
    flush = Schedule.preset("flush", num_stages=4)
    assert representative_sizes(flush, 102, least=8, step=4, count=3) == (10, 14, 18)
    assert representative_sizes(flush, 18, least=8, step=4, count=3) == ()


def test_the_schedule_takes_them():
    """Pairs of microbatches on 3 ranks: 3 more do not do, 6 do. Interleaved takes multiples of its groups."""
    with made_up.registered():
        assert representative_sizes(Schedule.preset("pairs", num_stages=3), 96, least=6, step=3, count=2) == (6, 12)
    groups = Schedule.preset("interleaved", num_stages=4, num_virtual_stages=2, microbatch_group_size=5)
    assert representative_sizes(groups, 100, least=4, step=2, count=2) == (10, 20)
