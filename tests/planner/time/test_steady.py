"""1F1B without a drain by its slowest cycle, against closed forms, simulations and what is known."""

from dataclasses import replace
from itertools import product

import pytest

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs
from megatron.planner.time import closed_form, priced, simulated
from megatron.planner.time.event_graph import EventGraph
from megatron.planner.time.steady import has_cycles, steady_seconds
from tests.planner import made_up
from tests.planner.time.test_iteration import configuration


def two_bw(p: int, **options: object) -> Schedule:
    return Schedule.preset("2bw", num_stages=p, data_parallel=True, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("m", [32, 64, 96, 128])
def test_stages_that_differ_wait_for_the_chains_of_others(m):
    """16 of them, whose reductions take as long as 80 microbatches: the same as simulated, in batches that are looked
    at as a whole and in those that are longer. Each stage's chain alone would be 3% shorter."""
    work = [1.0, *[1.25] * 14, 1.05]
    costs = Costs(
        forward=work, backward=[2.2 * each for each in work], step=0.7, reduce_grad=[320.0, *[305.0] * 14, 318.0],
        reduce_embed=7.0,
    )  # fmt: skip
    schedule, asked = two_bw(16, tied_embeddings=True), configuration("2bw", 16, m, data=2)
    assert closed_form(costs, asked) is None or m == 128
    expected = simulated(costs, asked, schedule).seconds
    assert priced(costs, asked, schedule).seconds == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("delay", ["double-buffered", "triple", "quadruple"])
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 3), (3, 2), (4, 6), (8, 160)])
def test_weights_of_any_delay(delay, p, m):
    """As their closed form with equal stages, reductions at all of them or at one. Longer than a run says whose first
    batches, which have no step, fall behind with their reductions and catch up slowly: where these are longer than the
    computations of a batch, and shorter than these with the step."""
    with made_up.registered():
        asked = configuration(delay, p, m, data=2)
        schedule = asked.pipeline_schedule(tied_embeddings=False)
        for part, where in product((0.0, 0.7, 1.05, 2.0, 3.3), (range(p), (0,), (p - 1,))):
            reduce = [part * 3.0 * m * (stage in where) for stage in range(p)]
            costs = Costs(step=2.0, reduce_grad=reduce, reduce_norm=0.5)
            expected = closed_form(costs, asked).seconds
            assert steady_seconds(costs, schedule, m) == pytest.approx(expected, rel=1e-12)
        late = Costs(step=2.0, reduce_grad=13.0, reduce_norm=0.5)
        if (delay, p, m) == ("triple", 1, 4):
            assert steady_seconds(late, schedule, m) == 14.0 > simulated(late, asked, schedule).seconds


def test_of_which_schedules_cycles_are_found():
    assert has_cycles(two_bw(4)) and has_cycles(Schedule.preset("2bw", num_stages=4, predict=True))
    assert not has_cycles(replace(two_bw(4), extra_warmup=True))
    for name in ("flush", "gpipe", "pipedream", "interleaved"):
        virtual = 2 if name == "interleaved" else 1
        assert not has_cycles(Schedule.preset(name, num_stages=4 * virtual, num_virtual_stages=virtual))


def test_when_the_norm_comes_again():
    """One rank of 2 microbatches of 3 seconds, steps of 1, reductions of 5: behind a norm come its STEP and a batch,
    and the reduction that these two delay is the one after the next, beside whose batch the next one's runs."""
    schedule = two_bw(1)
    graph = EventGraph.of(schedule, (2,) * 6)
    norms = [graph.shared[Kind.REDUCE_NORM, version] for version in (2, 3, 4)]
    found = graph.returns(Costs(step=1.0, reduce_grad=5.0), norms[0], norms[1:])
    assert found == [5.0, 1.0 + 6.0 + 5.0]
