"""Closed forms: of which schedules and times they hold."""

from dataclasses import replace
from unittest import mock

import pytest

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs
from megatron.planner.time import CLOSED_FORMS, closed_form
from megatron.planner.time.closed_forms import closed_form_of
from megatron.planner.time.microbatch_flow import StageTimes
from tests.planner import made_up
from tests.planner.time.test_iteration import configuration


@pytest.fixture(autouse=True)
def registered():
    with made_up.registered():
        yield


def test_who_brings_an_order_may_bring_its_closed_form():
    asked = configuration("pairs", 2, 8)
    with mock.patch.dict(CLOSED_FORMS, {made_up.Pairs: {"drains": lambda stages, m: m * max(stages.work) + 7}}):
        assert closed_form(Costs(), asked).seconds == 8 * 3 + 7
        assert closed_form(Costs(), configuration("2bw-pairs", 2, 8)) is None
    assert closed_form(Costs(), asked) is None


def test_a_closed_form_holds_for_what_it_was_made_for():
    """1F1B further ahead, or with recomputations of its own, is another schedule."""
    plain = Schedule.preset("2bw", num_stages=4)
    assert closed_form_of(plain) is not None
    assert closed_form_of(replace(plain, extra_warmup=True)) is closed_form_of(replace(plain, recompute=True)) is None
    groups = Schedule.preset("interleaved", num_stages=8, num_virtual_stages=2, microbatch_group_size=6)
    assert closed_form_of(groups) is None and closed_form_of(replace(groups, microbatch_group_size=4)) is not None


@pytest.mark.parametrize(
    ("schedule", "options", "times"),
    [
        ("flush", {}, {"bandwidth": 1.0, "forward_bytes": 2.0}),  # two stages and a round trip, for two microbatches
        ("bpipe", {}, {"evict": 1.1}),
        ("interleaved", {"num_virtual_stages": 2}, {"bandwidth": 1.0, "forward_bytes": 1.1}),
        ("interleaved", {"num_virtual_stages": 2}, {"forward": [2.0, 1, 1, 1, 1, 1, 1, 1]}),
        ("2bw", {}, {"forward": [1.0, 1, 1, 1, 1, 1, 1, 2], "reduce_grad": 200.0}),
    ],
)
def test_a_form_says_of_which_times_it_does_not_hold(schedule, options, times):
    """Slow edges, slow moves, ranks that wait for a slow stage of another, reductions that show at stages that differ.
    Without them it holds."""
    chosen = Schedule.preset(schedule, num_stages=8, data_parallel=True, **options)
    form, m = closed_form_of(chosen), 16
    assert form(StageTimes(Costs(), chosen), m) is not None
    assert form(StageTimes(Costs(**times), chosen), m) is None
