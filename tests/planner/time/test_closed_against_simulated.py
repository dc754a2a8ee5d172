"""What is priced, by a closed form or by what takes its place, against the simulation of the very program."""

from collections.abc import Iterable, Iterator
from random import Random

import pytest

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs
from megatron.planner import Configuration
from megatron.planner.time import priced, simulated
from tests.planner.time.random_configurations import KINDS, Asked, random_costs, random_estimate

WHOLE = 10**9  # computations: no batch is extrapolated


def of_costs(count: int, seed: str) -> Iterator[Asked]:
    """As many of each kind."""
    for kind in KINDS:
        generator = Random(f"{seed} {kind}")
        for _ in range(count):
            yield random_costs(generator, kind)


def of_models(count: int, seed: str) -> Iterator[Asked]:
    """The same, with the times that the planner finds for a model on a cluster."""
    for kind in KINDS:
        generator = Random(f"{seed} {kind}")
        for _ in range(count):
            planner, asked = random_estimate(generator, kind)
            schedule = asked.pipeline_schedule(tied_embeddings=planner.model.tied_embeddings)
            yield asked, schedule, planner.cost_model.costs(asked, planner.layers(asked))


def error(asked: Configuration, schedule: Schedule, costs: Costs) -> float:
    return abs(priced(costs, asked, schedule).seconds / simulated(costs, asked, schedule, most=WHOLE).seconds - 1)


def require_near(found: Iterable[Asked]) -> None:
    """2% at the 95th percentile, and 5% for each."""
    errors = sorted((error(*each), str(each[0])) for each in found)
    assert errors[int(0.95 * len(errors))][0] <= 0.02
    assert errors[-1][0] <= 0.05, errors[-1]


@pytest.mark.full
def test_prices_of_random_times_are_those_of_the_simulation():
    """48 configurations with stages that differ, slow links, slow steps and reductions."""
    require_near(of_costs(4, "prices"))


@pytest.mark.full
def test_estimates_of_random_models_are_those_of_the_simulation():
    """36 configurations as users ask for them."""
    require_near(of_models(3, "estimates"))


@pytest.mark.full
def test_prices_and_estimates_of_many_more():
    require_near(of_costs(120, "many"))
    require_near(of_models(40, "many"))


def test_an_estimate_is_what_is_priced():
    """And with `simulate` what is simulated: what the tests above compare is what users see."""
    for kind in KINDS:
        planner, asked = random_estimate(Random(kind), kind)
        schedule = asked.pipeline_schedule(tied_embeddings=planner.model.tied_embeddings)
        costs = planner.cost_model.costs(asked, planner.layers(asked))
        assert planner.estimate(asked).seconds == priced(costs, asked, schedule).seconds
        if asked.num_microbatches * asked.num_stages < 200:
            simulation = simulated(costs, asked, schedule)
            assert planner.estimate(asked, simulate=True).seconds == simulation.seconds
