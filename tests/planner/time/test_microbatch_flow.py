"""How long microbatches take through the stages: against simulation, and in cases that are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.planner.time.microbatch_flow import (
    StageTimes,
    busy_at,
    busy_at_rank,
    flow,
    keeps_up,
    passage,
    round_trips,
)
from tests.draws import draws


def times(p: int, *, order: str = "flush", **costs: object) -> StageTimes:
    return StageTimes(Costs(**costs), Schedule.preset(order, num_stages=p))


@draws(40)
@given(forward=st.lists(st.sampled_from([1.0, 1.5, 2.0, 4.0]), min_size=1, max_size=6), more=st.integers(0, 20))
def test_the_slowest_stage_decides_about_a_batch_that_drains(forward, more):
    """As simulated, with stages that differ and transfers that take no time."""
    p = len(forward)
    stages = times(p, forward=forward, backward=2.0)
    seconds = simulate(Schedule.preset("flush", num_stages=p).build((p + more,)), Costs(forward=forward)).end
    assert max(busy_at(stages, p + more)) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("c", [0.0, 0.25, 1.0])
def test_the_rate_is_that_of_a_long_batch(c):
    """Of stages that are alike: what further microbatches add in a simulation, with slow edges, too. They keep up with
    the slowest stage where a round trip hides its transfers."""
    stages = times(4, bandwidth=1.0, forward_bytes=c, backward_bytes=c)
    plan = Schedule.preset("flush", num_stages=4)
    few, many = (
        simulate(plan.build((m,)), Costs(bandwidth=1.0, forward_bytes=c, backward_bytes=c)).end for m in (64, 128)
    )
    assert round_trips(stages) == pytest.approx((many - few) / 64, rel=1e-2)
    assert keeps_up(round_trips(stages), 3.0) == (c == 0)


def test_what_stands_between_a_backward_and_the_next_forward_delays_round_trips():
    """Between two stages as many microbatches are in flight as there are stages."""
    stages = times(2)
    assert round_trips(stages) == 3 and round_trips(stages, [0.0, 3.0]) == 6


def test_a_passage_is_there_and_back():
    """A stage's work and the edge behind it in both directions; behind the last stage there is none."""
    stages = times(3, bandwidth=1.0, forward_bytes=0.5, backward_bytes=0.25)
    assert passage(stages) == [3.75, 3.75, 3.0]


def test_microbatches_in_one_direction():
    """The stage, the edge, or half of both where a receive is posted two computations ahead."""
    assert flow([1.0, 1.0, 1.0], [0.0, 0.5, 3.0], 0.75) == [1.0, 1.0, 2.0]
    assert flow([1.0], [0.0], 1.5) == [1.5]


@pytest.mark.parametrize(("p", "v", "groups"), [(2, 2, 1), (4, 2, 3), (4, 3, 2)])
def test_ranks_with_several_stages_are_busy_as_simulated(p, v, groups):
    chosen = Schedule.preset("interleaved", num_stages=p * v, num_virtual_stages=v)
    m = p * groups
    ranks = [rank for rank in range(p) if 2 * (p - 1 - rank) + (v - 1) * p + 1 <= m * v]
    found = busy_at_rank(StageTimes(Costs(), chosen), m, ranks)
    assert max(found) == pytest.approx(simulate(chosen.build((m,)), Costs()).end, rel=1e-9)
