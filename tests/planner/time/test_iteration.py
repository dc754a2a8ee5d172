"""The closed form of an iteration against the simulation of its program, and against the known bubble."""

import random

import pytest

from megatron.pipeline.simulate.costs import Costs
from megatron.planner import Configuration
from megatron.planner.time.iteration import closed_form, priced, simulated


def configuration(schedule: str, p: int, m: int, v: int = 1, data: int = 1) -> Configuration:
    return Configuration(
        pipeline=p, virtual=v, data=data, micro_batch_size=1, global_batch_size=m * data, schedule=schedule
    )


def both(costs: Costs, configuration: Configuration) -> tuple[float, float]:
    schedule = configuration.pipeline_schedule(tied_embeddings=False)
    return closed_form(costs, configuration).seconds, simulated(costs, configuration, schedule).seconds


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v", "bubble"),
    [
        ("flush", 4, 8, 1, 3 / 8),
        ("gpipe", 4, 8, 1, 3 / 8),
        ("bpipe", 8, 32, 1, 7 / 32),
        ("interleaved", 4, 8, 2, 3 / 16),
        ("interleaved", 8, 32, 4, 7 / 128),
        ("flush", 1, 5, 1, 0),
        ("2bw", 4, 8, 1, 0),
    ],
)
def test_bubble_is_the_known_one(schedule, p, m, v, bubble):
    """(p - 1) / (v m) of the ideal time (Narayanan et al. 2021, section 2.2)."""
    costs = Costs(forward=1 / v, backward=2 / v)
    for seconds in both(costs, configuration(schedule, p, m, v)):
        assert seconds == pytest.approx(3 * m * (1 + bubble), rel=1e-9)


@pytest.mark.parametrize("schedule", ["flush", "bpipe", "2bw", "gpipe", "interleaved"])
def test_agrees_with_simulation_for_unequal_stages(schedule):
    """Stages that differ by up to 40% (chunks by 20%), transfers of up to half a forward, steps and reductions: within
    0.2% in the mean, and 2% at most, in batches that hardly fill the pipeline. GPipe's formula is exact."""
    generator, errors = random.Random(schedule), []
    for _ in range(24):
        p, v = generator.choice([(2, 1), (3, 1), (4, 1), (8, 1)] if schedule != "interleaved" else [(2, 2), (4, 3)])
        m = generator.randint(1, 4) * p if v > 1 else generator.randint(p, 4 * p)
        most = 1.4 if v == 1 else 1.2
        forward, backward = ([generator.uniform(1, most) for _ in range(p * v)] for _ in range(2))
        costs = Costs(
            forward=forward, backward=[2 * each for each in backward], step=generator.uniform(0, 1),
            reduce_grad=generator.uniform(0, 3), reduce_norm=generator.uniform(0, 0.2), bandwidth=1.0,
            forward_bytes=generator.uniform(0, 0.5) if v == 1 else 0.0,
        )  # fmt: skip
        asked = configuration(schedule, p, m, v, data=2)
        of_asked = costs, asked, asked.pipeline_schedule(tied_embeddings=False)
        errors.append(abs(priced(*of_asked).seconds / simulated(*of_asked).seconds - 1))
    assert max(errors) < (1e-9 if schedule == "gpipe" else 0.02)
    assert sum(errors) / len(errors) < 0.002


def test_pipedream_takes_a_microbatch_at_the_rate_of_the_slowest_stage():
    costs = Costs(forward=[1.0, 1.0, 1.5, 1.0], backward=2.0)
    closed, exact = both(costs, configuration("pipedream", 4, 1))
    assert closed == pytest.approx(3.5) and exact == pytest.approx(3.5, rel=0.02)


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("reduce", [0.5, 3.0, 8.0])
def test_pipedream_waits_for_the_reductions_of_every_microbatch(p, reduce):
    costs = Costs(step=0.5, reduce_grad=reduce)
    for seconds in both(costs, configuration("pipedream", p, 1, data=2)):
        assert seconds == pytest.approx(3 + reduce + 0.5)


@pytest.mark.parametrize(("schedule", "v"), [("flush", 1), ("bpipe", 1), ("2bw", 1), ("gpipe", 1), ("interleaved", 2)])
def test_large_batches_are_extrapolated(monkeypatch, schedule, v):
    """A program of 96 microbatches takes what programs of 12 and 6 say."""
    from megatron.planner.time import iteration

    costs = Costs(forward=[1.0, 1.2, 1.1] * v, backward=[2.0, 2.2, 2.4] * v, step=0.5, bandwidth=1.0, forward_bytes=0.1)
    asked = configuration(schedule, 3, 96, v)
    whole = simulated(costs, asked, asked.pipeline_schedule(tied_embeddings=False))
    monkeypatch.setattr(iteration, "_MOST_SIMULATED", 1)
    part = simulated(costs, asked, asked.pipeline_schedule(tied_embeddings=False))
    assert part.seconds == pytest.approx(whole.seconds, rel=5e-3)
    assert part.bubble == pytest.approx(whole.bubble, abs=1e-3)


@pytest.mark.sample(6)
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"provisional": "stage"}, *({"provisional": "uniform", "provisional_microbatches": each} for each in (1, 40, 94))],
)
def test_large_batches_with_predictions_are_extrapolated(monkeypatch, options, tied, data):
    """They are extrapolated from smaller batches, whose predictions read fewer microbatches; with and without a closed
    form."""
    from megatron.planner.time import iteration

    options = options | {"provisional_reduce": data > 1, "schedule": "2bw"}
    asked = Configuration(pipeline=3, data=data, micro_batch_size=1, global_batch_size=96 * data, **options)
    schedule = asked.pipeline_schedule(tied_embeddings=tied)
    costs = Costs(
        step=0.5, predict=1.25, hold=0.25, reduce_grad=4.0 * (data - 1), reduce_embed=1.5 * tied, forward_bytes=0.1,
        bandwidth=1.0,
    )  # fmt: skip
    whole = simulated(costs, asked, schedule)
    sizes = []
    original = iteration._simulate
    monkeypatch.setattr(iteration, "_simulate", lambda *asked: sizes.append(asked[2]) or original(*asked))
    part = simulated(costs, asked, schedule, most=1)
    assert max(sizes) < 96 and part.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert part.bubble == pytest.approx(whole.bubble, abs=1e-3)


@pytest.mark.parametrize(("m", "reduce"), [(96, 30.0), (96, 200.0), (96, 400.0), (14, 60.0)])
def test_large_batches_hide_reductions_that_small_ones_show(monkeypatch, m, reduce):
    """2bw, of which a small batch shows 15 seconds of 30 that a large one hides."""
    from megatron.planner.time import iteration

    costs, asked = Costs(step=0.5, reduce_grad=reduce), configuration("2bw", 4, m, data=2)
    whole = simulated(costs, asked, asked.pipeline_schedule(tied_embeddings=False))
    monkeypatch.setattr(iteration, "_MOST_SIMULATED", 1)
    part = simulated(costs, asked, asked.pipeline_schedule(tied_embeddings=False))
    assert part.seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert part.bubble == pytest.approx(whole.bubble, abs=1e-9) and part.bubble >= 0


def test_no_bubble_is_zero(monkeypatch):
    """And not what floating point leaves of it, where a rank never waits."""
    from megatron.planner.time import iteration

    monkeypatch.setattr(iteration, "_simulate", lambda *arguments: (1.0, 1.0 + 2**-52))
    asked = configuration("flush", 1, 7)
    assert simulated(Costs(), asked, asked.pipeline_schedule(tied_embeddings=False)).bubble == 0


@pytest.mark.parametrize("schedule", ["flush", "2bw", "gpipe"])
def test_bubble_is_of_one_rank(schedule):
    """Of the one that computes most with its update, also where another one has the longest update."""
    costs, asked = Costs(forward=[1.0, 3.0], backward=[2.0, 4.0], step=[9.0, 1.0]), configuration(schedule, 2, 4)
    of_asked = costs, asked, asked.pipeline_schedule(tied_embeddings=False)
    for each in (priced(*of_asked), simulated(*of_asked)):
        assert each.busy == pytest.approx(4 * 7 + 1)
