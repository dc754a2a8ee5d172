"""No price falls when anything takes longer, and none grows by more."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from megatron.pipeline.simulate.costs import Costs
from megatron.planner import Configuration
from megatron.planner.time import priced
from megatron.planner.time.closed_forms import StageTimes
from tests.planner.time.random_configurations import KINDS, random_costs

FACTORS = (1.001, 1.01, 1.1, 1.5, 3.0)
WHOLE = ("step", "predict", "hold", "evict", "reduce_grad", "reduce_embed", "reduce_norm", "latency", "forward_bytes")


def longer(draw: Random, asked: Configuration, costs: Costs) -> Iterator[tuple[str, float, Costs]]:
    """Each of the costs so many times as high, of all stages or of one."""
    for name in ("forward", "backward", *WHOLE):
        value, factor = getattr(costs, name), draw.choice(FACTORS)
        if isinstance(value, list):
            yield name, factor, replace(costs, **{name: [factor * each for each in value]})
            if value:
                one = list(value)
                one[draw.randrange(len(one))] *= factor
                yield f"one {name}", factor, replace(costs, **{name: one})
        elif value:
            yield name, factor, replace(costs, **{name: factor * value})


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
def test_no_price_falls(kind):
    """But by the percent that closed forms of batches that drain leave out, where a stage becomes so slow that they
    hold: here of one in some thousand."""
    draw = Random(f"monotone {kind}")
    for _ in range(12):
        asked, schedule, costs = random_costs(draw, kind)
        seconds = priced(costs, asked, schedule).seconds
        for name, factor, other in longer(draw, asked, costs):
            found = priced(other, asked, schedule).seconds
            assert seconds * (1 - 1e-9) <= found <= factor * seconds * (1 + 0.01), (asked, name, factor)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["2bw", "2bw stage", "2bw uniform", "2bw+balance"])
def test_no_batch_gets_shorter_as_it_has_more_microbatches(kind):
    """Also where a longer one is no longer looked at as a whole."""
    draw = Random(f"longer {kind}")
    for _ in range(6):
        asked, schedule, costs = random_costs(draw, kind)
        while schedule.num_stages < 8:
            asked, schedule, costs = random_costs(draw, kind)
        before, least = 0.0, max(schedule.num_ranks, asked.provisional_microbatches or 0) + schedule.num_ranks
        for m in range(least, 200, 23):
            size = replace(asked, global_batch_size=m * asked.data)
            found = priced(costs, size, schedule).seconds
            assert found >= before * (1 - 1e-9), (size, m)
            assert found >= m * max(StageTimes(costs, schedule).work)
            before = found
