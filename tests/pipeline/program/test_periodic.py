"""Fill, periods and drain are the program of that many batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.schedules import Schedule
from tests.draws import draws
from tests.pipeline.strategies import schedules, sizes


@draws(60)
@given(st.data())
def test_unrolled_is_built(data: st.DataObject):
    """unroll(n) equals build with n batches more than the fill has, for any schedule."""
    schedule = data.draw(schedules(max_stages=5))
    num_microbatches = data.draw(sizes(schedule))
    periodic = schedule.build_periodic(num_microbatches)
    num_fill = len(periodic.extent.batches)
    for num_periods in (0, 1, data.draw(st.integers(2, 6))):
        unrolled = periodic.unroll(num_periods)
        assert unrolled == schedule.build((num_microbatches,) * (num_fill + num_periods))


def test_a_period_is_one_batch():
    """The period of 2bw holds m forwards, m backwards and one STEP on every rank, whatever is in flight around it."""
    periodic = Schedule.preset("2bw", num_stages=4).build_periodic(6)
    for row in periodic.period:
        words = [instruction.kind.value for instruction in row]
        assert (words.count("F"), words.count("B"), words.count("STEP")) == (6, 6, 1)


def test_negative_numbers_are_refused():
    """There are no -1 periods."""
    with pytest.raises(ValueError, match="cannot have -1 periods"):
        Schedule.preset("flush", num_stages=1).build_periodic(1).unroll(-1)
