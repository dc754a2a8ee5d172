"""Programs whose batches follow one another: a full rate, the least memory, and what nothing can be below."""

import itertools
import math
import re

import pytest
from hypothesis import assume, example, given, settings

from megatron.pipeline.program.edges import v
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules.program_schedule import read_schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem, begin_steady, synthesize_steady
from tests.pipeline.synthesis.made_up import problems


def problem(placement, m, *, head=0.0, stages_of_rank=1, **more):
    each = [1 / stages_of_rank] * len(placement)
    each[-1] += head
    costs = Costs(forward=each, backward_input=each, backward_weight=each, backward=[2 * one for one in each])
    return Problem(
        rank_of_stage=placement, num_microbatches=m, costs=costs, saved=1 / stages_of_rank, **more
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("placement", "stages_of_rank", "head", "most"),
    [
        (range(4), 1, 0.0, 4.0),  # as much as 1F1B
        (range(8), 1, 1.0, 4.0),  # half of it
        (v(4, 2), 2, 0.0, 2.0),
        (v(8, 2), 2, 0.0, 4.0),
        (v(8, 2), 2, 1.0, 2.5),
    ],
)
def test_the_busiest_rank_is_always_busy_with_little_memory(placement, stages_of_rank, head, most):
    """The simulator finds this rate, the proof what is held, and the file goes on alike for ever."""
    asked = problem(tuple(placement), 12, stages_of_rank=stages_of_rank, head=head)
    found = synthesize_steady(asked, rounds=3)
    assert found.seconds == pytest.approx(max(map(asked.work, range(asked.num_ranks))), rel=1e-9)
    assert found.bound == pytest.approx(found.seconds, rel=1e-9)
    assert max(found.least_held) <= max(found.held) <= most
    schedule = read_schedule("a.csv", text=found.csv)
    assert schedule.repetition.num_period == 1 and not schedule.drains_between_periods
    saved = schedule.max_saved_on_rank([12] * 3)
    assert [each / stages_of_rank for each in saved] == list(found.held)
    many = simulate(schedule.build((12,) * 9), asked.costs)
    assert many.steady_time_per_batch() == pytest.approx(found.seconds, rel=1e-9)
    if stages_of_rank == 1:
        assert max(found.held) <= found.named["1f1b"] == len(placement)


def test_less_memory_takes_a_longer_period():
    """Which is not below the bound of the room, and limits are kept."""
    found = synthesize_steady(problem(v(4, 2), 8, stages_of_rank=2, limits=1.0), rounds=4)
    assert max(found.held) <= 1.0
    assert 24.0 < found.bound <= found.seconds * (1 + 1e-9)
    assert "room" in found.bound_from
    assert found.certificate()["bound_holds_for"]["limits"] == [1.0] * 4


def test_more_room_is_not_slower():
    """Just below what 1F1B holds, no pattern is near the full rate."""
    four, three, two = (
        synthesize_steady(problem((0, 1, 2, 3), 8, limits=limit), rounds=1) for limit in (4.0, 3.0, 2.0)
    )
    assert four.seconds < three.seconds < two.seconds and three.begun_with == "a repeating pattern"
    assert max(three.held) <= 3


def test_a_beginning_is_the_registered_order_that_holds_least_or_a_pattern():
    """Not zb-h1, which holds four on each rank; and within a limit, in less time than one microbatch after another."""
    found = begin_steady(problem((0, 1, 2, 3), 8))
    assert (found.begun_with, found.held, found.seconds) == ("1f1b", (4.0, 3.0, 2.0, 1.0), 24.0)
    found = begin_steady(problem((0, 1, 2, 3), 8, limits=2.0))
    assert found.begun_with == "a repeating pattern" and max(found.held) <= 2 and found.seconds < 72
    assert begin_steady(problem(v(4, 2), 8, stages_of_rank=2)).seconds == pytest.approx(24.0)


def test_whole_backwards_and_recompute_have_patterns_too():
    """Stages that cannot split their backwards, and stages that keep their inputs alone."""
    whole = problem(v(4, 2), 8, stages_of_rank=2, splits=False)
    found = synthesize_steady(whole, rounds=3)
    assert found.seconds == pytest.approx(24.0) and max(found.held) < 4
    costs = Costs(forward=1.0, backward=2.0, recompute=1.0)
    asked = Problem(rank_of_stage=(0, 1, 2), num_microbatches=6, costs=costs, stage_input=0.25, splits=False,
                    recomputed=frozenset({0}))  # fmt: skip
    found = synthesize_steady(asked, rounds=3)
    assert found.seconds == pytest.approx(24.0) and found.held[0] < 2


@pytest.mark.parametrize("m", [1, 2, 4, 7])
def test_small_batches_take_a_longer_period(m):
    """A batch begins with weights that have the gradients of the batch before the last, which have to be there."""
    asked = problem(tuple(range(8)), m)
    found = synthesize_steady(asked, rounds=1)
    way = 8 + 8 + 1  # F and I of all stages, and the W of the first one
    assert found.bound == pytest.approx(max(3 * m, (way + m - 1) / 2))
    assert found.bound * (1 - 1e-9) <= found.seconds <= m * max(3.0, 1.2 * way / (m + 1))
    assert ("the way of a batch's last microbatch" in found.bound_from) == ((way + m - 1) / 2 > 3 * m)
    schedule = read_schedule("a.csv", text=found.csv)
    assert simulate(schedule.build((m,) * 9), asked.costs).steady_time_per_batch() >= found.bound * (1 - 1e-9)


def test_computations_that_take_no_time_stand_where_they_free_memory():
    """At one instant a W without a duration comes before the recompute that needs its room, and a batch's last backward
    before the first forward of the batch after the next.
    """
    costs = Costs(forward=[8.0, 5.0, 1.0], backward_input=[9.0, 1.0, 0.0], backward_weight=0.0, latency=[1.0, 0.5])
    asked = Problem(rank_of_stage=(0, 0, 1), num_microbatches=3, costs=costs, saved=[1.2, 0.4, 2.4], limits=[1.2, 5.0],
                    recomputed=frozenset({0}))  # fmt: skip
    found = synthesize_steady(asked, rounds=1)
    assert found.held[0] <= 1.2 and found.held[1] <= 5.0
    costs = Costs(forward=1.0, backward=[0.0, 0.0], recompute=[0.0, 0.0])
    found = synthesize_steady(Problem(rank_of_stage=(0, 1), num_microbatches=1, costs=costs, splits=False), rounds=2)
    assert found.seconds >= found.bound * (1 - 1e-9)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=0.0, backward=0.0), "give the seconds of computations"),
        (Costs(forward=1e308), "are more than a number can hold; give smaller costs"),
        (Costs(latency=1e308), "are more than a number can hold; give smaller costs"),
    ],
)
def test_what_takes_no_time_or_too_much_is_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        synthesize_steady(Problem(rank_of_stage=(0, 1), num_microbatches=4, costs=costs))


def least_by_trying(asked: Problem, period: int) -> float:
    """The least that the fullest rank holds, over all times of one microbatch in whole seconds; by counting."""
    forward, back = ([asked.number_of[kind, stage] for stage in (0, 1)]
                     for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT))  # fmt: skip
    weight = [asked.number_of[Kind.BACKWARD_WEIGHT, stage] for stage in (0, 1)]
    seconds, best = [round(each) for each in asked.seconds], math.inf
    for waits in itertools.product(range(period), repeat=5):
        at = [0] * 6
        at[forward[1]] = seconds[forward[0]] + waits[0]
        at[back[1]] = at[forward[1]] + seconds[forward[1]] + waits[1]
        at[back[0]] = at[back[1]] + seconds[back[1]] + waits[2]
        for stage in (0, 1):
            at[weight[stage]] = at[back[stage]] + seconds[back[stage]] + waits[3 + stage]
        most = 0
        for stage in (0, 1):
            busy = [(at[each] + tick) % period for each in (forward[stage], back[stage], weight[stage])
                    for tick in range(seconds[each])]  # fmt: skip
            if len(set(busy)) < len(busy):
                break
            end = at[weight[stage]] + seconds[weight[stage]]
            most = max(most, math.ceil((end - at[forward[stage]]) / period))
        else:
            best = min(best, most)
    return best


@pytest.mark.parametrize("times", [(1, 1, 1, 1, 1, 1), (2, 1, 1, 1, 2, 1), (1, 2, 1, 2, 1, 2), (2, 1, 3, 1, 1, 1)])
def test_nothing_holds_less_than_the_bound_and_the_search_finds_the_least(times):
    """Over all patterns of two stages with times in whole seconds."""
    costs = Costs(forward=times[:2], backward_input=times[2:4], backward_weight=times[4:], backward=1.0)
    asked = Problem(rank_of_stage=(0, 1), num_microbatches=6, costs=costs)
    period = max(round(asked.work(rank) / 6) for rank in (0, 1))
    least, found = least_by_trying(asked, period), synthesize_steady(asked, rounds=2)
    assert found.period == period
    assert max(found.least_held) <= least == max(found.held)


SHORTEST = Costs(forward=5e-324, backward=0.0, backward_input=0.0, backward_weight=0.0)
"""The least time above zero, a hundredth more of which is no more."""


@pytest.mark.full
@given(problems())
@example(Problem(rank_of_stage=(0,), num_microbatches=1, costs=SHORTEST, limits=1.0, splits=False))
@settings(max_examples=25, deadline=None)
def test_made_up_costs_never_crash_it(asked):
    """There is a program, proved, within its limits and bounds."""
    assume(any(asked.seconds))
    found = synthesize_steady(asked, rounds=1)
    assert found.seconds >= found.bound * (1 - 1e-9)
    for rank, (held, least) in enumerate(zip(found.held, found.least_held, strict=True)):
        assert least * (1 - 1e-6) <= held <= asked.limit_of(rank) * (1 + 1e-6)


@pytest.mark.full
def test_receives_stand_as_far_ahead_as_a_slow_link_needs():
    """A link that takes longer than a computation is waited for where a batch begins, and nowhere else."""
    costs = Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, backward=2.0, latency=[2.5, 0.1, 0.1])
    asked = Problem(rank_of_stage=(0, 1, 2, 3), num_microbatches=12, costs=costs)
    found = synthesize_steady(asked, rounds=2)
    assert found.receives_ahead > 1 and found.seconds <= 36.0 + 2.5 + 1e-9
    schedule = read_schedule("a.csv", text=found.csv)
    assert schedule.program == found.program
    late = read_schedule("b.csv", text=re.sub("# receives_ahead.*\n", "", found.csv))
    assert simulate(late.program, costs).steady_time_per_batch() > 1.1 * found.seconds
