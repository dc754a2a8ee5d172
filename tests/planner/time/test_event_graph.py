"""The events of rows against the simulation of the program that these become."""

from random import Random

import pytest

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import Costs, simulate
from megatron.planner.time.event_graph import EventGraph, has_event_graph
from tests.planner import made_up
from tests.planner.time.random_configurations import KINDS, random_costs


def ends(schedule: Schedule, batches: tuple[int, ...], costs: Costs) -> tuple[float, float]:
    return EventGraph.of(schedule, batches).seconds(costs), simulate(schedule.build(batches), costs).end


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", [each for each in KINDS if each not in ("pipedream", "l2l")])
def test_rows_end_where_their_program_ends(kind):
    """To the last digit, with moves, predictions and reductions of every kind, in one batch that drains and in three
    that do not."""
    generator = Random(kind)
    for _ in range(8):
        asked, schedule, costs = random_costs(generator, kind)
        batches = (asked.num_microbatches,) * (1 if schedule.weights.drains else 3)
        found, expected = ends(schedule, batches, costs)
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("schedule", "v"), [("zb-h1", 1), ("zbv", 2)])
def test_halves_of_backwards(schedule, v):
    generator = Random(schedule)
    for p, m in ((2, 4), (4, 7), (6, 18)):
        chosen = Schedule.preset(schedule, num_stages=p * v, num_virtual_stages=v, data_parallel=True)
        costs = Costs(
            forward=[generator.uniform(1, 2) for _ in range(p * v)], backward_input=1.2, backward_weight=0.7,
            latency=0.1, bandwidth=1.0, forward_bytes=generator.choice([0.5, 3.0]), reduce_grad=4.0, step=1.0,
        )  # fmt: skip
        found, expected = ends(chosen, (m,), costs)
        assert found == pytest.approx(expected, rel=1e-12)


def test_an_order_that_is_in_no_table():
    with made_up.registered():
        for name, batches in (("pairs", (6, 8)), ("2bw-pairs", (12, 12, 12))):
            costs = Costs(forward=[1.0, 1.5, 1.2], step=0.5, bandwidth=1.0, forward_bytes=0.7, reduce_norm=0.3)
            found, expected = ends(Schedule.preset(name, num_stages=3), batches, costs)
            assert found == pytest.approx(expected, rel=1e-12)


def test_what_is_simulated():
    """Stages that step alone, weights on the host, recomputations in the program, stages that are no chain."""
    for name in ("pipedream", "l2l"):
        assert not has_event_graph(Schedule.preset(name, num_stages=4))
    assert not has_event_graph(Schedule.preset("flush", num_stages=4, recompute=True))
    assert not has_event_graph(Schedule.preset("flush", num_stages=4, num_frozen=1))
    assert has_event_graph(Schedule.preset("flush", num_stages=4))
