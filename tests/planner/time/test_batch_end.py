"""How long reductions and updates show: under any delay of weights, with predictions, and where a pipeline drains."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.one_f_one_b import OneForwardOneBackward
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.planner.time import CLOSED_FORMS, StageTimes, closed_form, simulated
from megatron.planner.time.closed_forms import closed_form_of, one_f_one_b
from tests.draws import draws
from tests.planner import made_up
from tests.planner.time.test_iteration import configuration

FORMED = ("double-buffered", "triple", "quadruple")


@draws(60)
@given(
    delay=st.sampled_from(FORMED), p=st.integers(1, 6), m=st.integers(1, 14), backward=st.sampled_from([1.0, 2.0, 3.5]),
    step=st.sampled_from([0.0, 0.5, 2.0]), norm=st.sampled_from([0.0, 1.0]), batches=st.floats(0.0, 5.0),
    where=st.integers(-1, 5),
)  # fmt: skip
def test_delays_of_any_number_of_batches_hide_reductions_as_simulated(
    delay, p, m, backward, step, norm, batches, where
):
    """Equal stages, reductions at all of them or at one, of up to five batches: to the last digit. But where
    a chain is longer than the computations of a batch and shorter than these with the step, the first batches, which
    have no step, fall behind with their chains and catch up slowly: a few batches do not say how long one takes."""
    with made_up.registered():
        asked = configuration(delay, p, m, data=2)
        schedule = asked.pipeline_schedule(tied_embeddings=False)
        assume(schedule.accepts(m))
        alone, reduce = m * (1 + backward), batches * m * (1 + backward)
        assume(not alone <= reduce + norm <= alone + step)
        stages = [reduce if where in (-1, stage) else 0.0 for stage in range(p)]
        costs = Costs(backward=backward, step=step, reduce_grad=stages, reduce_norm=norm)
        assert closed_form(costs, asked).seconds == pytest.approx(simulated(costs, asked, schedule).seconds, rel=1e-9)


@draws(60)
@given(
    p=st.integers(1, 5), more=st.integers(0, 8), read=st.none() | st.integers(0, 8),
    backward=st.sampled_from([1.0, 3.5]), step=st.sampled_from([0.0, 0.5, 2.0]),
    predict=st.sampled_from([0.0, 0.5, 3.0]), hold=st.sampled_from([0.0, 0.4]),
    batches=st.floats(0.0, 3.0), norm=st.sampled_from([0.0, 1.0]), embed=st.sampled_from([0.0, 0.5, 8.0]),
    reduces=st.booleans(),
)  # fmt: skip
def test_predictions_take_as_long_as_simulated(
    p, more, read, backward, step, predict, hold, batches, norm, embed, reduces
):
    """Equal stages: to the last digit, whatever each prediction reads and waits for."""
    m = p + more
    schedule = Schedule.preset(
        "2bw", predict=True, num_stages=p, data_parallel=True, reduce_partial=reduces, tied_embeddings=embed > 0,
        provisional_microbatches=None if read is None else 1 + min(read, m - p),
    )  # fmt: skip
    costs = Costs(
        backward=backward, step=step, predict=predict, hold=hold, reduce_norm=norm, reduce_embed=embed,
        reduce_grad=batches * m * (1 + backward),
    )  # fmt: skip
    form = closed_form_of(schedule)
    assert (form is None) == (reduces and embed > 0 and read is None)
    if form is not None:
        asked = configuration("2bw", p, m, data=2)
        assert form(StageTimes(costs, schedule), m) == pytest.approx(
            simulated(costs, asked, schedule).seconds, rel=1e-9
        )


def test_a_batch_with_predictions_takes_that_of_2bw_and_the_prediction():
    """And HOLD, where all stages read as many. What is not 2bw has none."""
    costs = Costs(step=0.5, predict=1.5, hold=0.25)
    plain, stage, uniform = (
        StageTimes(costs, Schedule.preset("2bw", num_stages=4, **options))
        for options in ({}, {"predict": True}, {"predict": True, "provisional_microbatches": 2})
    )
    seconds = [CLOSED_FORMS[OneForwardOneBackward]["overlaps_updates"](each, 8) for each in (plain, stage, uniform)]
    assert seconds == [24.5, 26.0, 26.25]


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_reductions_are_those_of_the_ranks_stage(placement):
    """Wherever the stages lie, a batch that drains ends as simulated, with reductions that differ by stage."""
    schedule = Schedule(
        order="1f1b", weights="flush", num_stages=4, rank_of_stage=placement, data_parallel=True
    )  # fmt: skip
    costs = Costs(forward=1.0, backward=2.0, step=0.5, reduce_grad=[0.0, 9.0, 1.0, 14.0], reduce_norm=0.25)
    seconds = simulate(schedule.build((6,)), costs).end
    assert one_f_one_b(StageTimes(costs, schedule), 6) == pytest.approx(seconds, rel=1e-12)
