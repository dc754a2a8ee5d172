"""The order of 1F1B."""

import pytest

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import Schedule
from tests.pipeline.strategies import fewest_microbatches, kinds_of


@pytest.mark.parametrize("extra_warmup", [False, True])
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_1f1b_warms_up_as_far_as_it_says(num_stages: int, extra_warmup: bool):
    """Stage s runs p-s-1 forwards (twice that with extra warm-up), then one forward and one backward in turn."""
    schedule = Schedule.preset("2bw", num_stages=num_stages, extra_warmup=extra_warmup)
    batches = (fewest_microbatches(schedule),) * 3
    for stage, row in enumerate(schedule.build(batches).rows):
        warmup = (num_stages - stage - 1) * (2 if extra_warmup else 1)
        words = "".join(each.kind.value for each in kinds_of(row, Kind.FORWARD, Kind.BACKWARD))
        assert words == "F" * warmup + "FB" * (sum(batches) - warmup) + "B" * warmup


def test_a_stage_saves_what_is_in_flight():
    """p-s microbatches, 2(p-s)-1 with extra warm-up, and never more than run together."""
    assert Schedule.preset("2bw", num_stages=4).max_saved_microbatches((4, 6)) == (4, 3, 2, 1)
    assert Schedule.preset("flush", num_stages=4).max_saved_microbatches((2, 3)) == (3, 3, 2, 1)
    assert Schedule.preset("2bw", num_stages=3, extra_warmup=True).max_saved_microbatches((5,)) == (5, 3, 1)
