"""Synthesized programs: proved, within their limits, timed as the simulator says, and behind no registered order."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from megatron.pipeline.check import check
from megatron.pipeline.program.edges import round_robin, v
from megatron.pipeline.program.instruction import COMPUTATIONS, Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem, synthesize
from megatron.pipeline.synthesis.seeds import listed, named_words, one_after_another
from megatron.pipeline.synthesis.several_problems import synthesize_fastest
from megatron.pipeline.synthesis.timing import Clock
from tests.pipeline.synthesis.made_up import problems

HEAD = Costs(forward=[1.0, 1.0, 1.0, 2.4], backward=[2.0, 2.0, 2.0, 4.8])
UNEVEN = Problem(rank_of_stage=(0, 1, 2, 3), num_microbatches=12, costs=HEAD, limits=3.0)


def test_a_large_head_takes_nothing_at_three_quarters_of_the_memory():
    """Where the last stage carries a head of 1.4 stages, 3 of 4 microbatches are room for the bound itself."""
    found = synthesize(UNEVEN, rounds=20)
    assert found.seconds == pytest.approx(found.bound, rel=1e-12)
    assert found.named is None  # no registered order keeps the limit
    assert check(found.program).peak_saved_microbatches == (3, 3, 3, 3)
    zb_h1 = simulate(Schedule.preset("zb-h1", num_stages=4).build([12]), HEAD).makespan
    assert found.seconds <= zb_h1  # which holds 4


def test_what_a_program_was_made_from_is_named():
    """By the order, also where a search over several problems goes on with what it found before."""
    one, two = UNEVEN, replace(UNEVEN, rank_of_stage=v(4, 2), costs=Costs())
    assert synthesize_fastest([one], rounds=2).begun_with == "within limits: zb-h1"
    assert synthesize_fastest([two], rounds=0).begun_with == synthesize(two, rounds=0).begun_with
    known = synthesize(one, rounds=0)
    assert synthesize(one, rounds=0, known=[known.words]).begun_with == "known words"


def test_a_program_is_a_schedule_for_a_run():
    """With the computations that were found, and with the reductions that the run needs."""
    found = synthesize(UNEVEN, rounds=1)
    alone, shared = found.schedule(), found.schedule(tied_embeddings=True, data_parallel=True)
    assert alone.program.rows == found.program.rows and alone.build([12, 12]).num_microbatches == 24
    kinds = {each.kind for row in shared.program.rows for each in row}
    assert kinds - {each.kind for row in alone.program.rows for each in row} == {Kind.REDUCE_GRAD, Kind.REDUCE_EMBED}
    rows = [[each for each in row if each.kind in COMPUTATIONS] for row in shared.program.rows]
    assert rows == [[each for each in row if each.kind in COMPUTATIONS] for row in alone.program.rows]


@pytest.mark.sample(5)
@pytest.mark.parametrize("placement", [v(4, 2), round_robin(4, 2), (0, 1, 2, 3), (0, 1, 1, 0, 2)])
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("recomputes", [True, False])
def test_programs_are_proved_and_keep_their_limits(placement, splits, recomputes):
    """By the checker's count and the simulator's curve, which know nothing of the search."""
    stages, ranks = len(placement), max(placement) + 1
    recomputed = frozenset(range(0, stages, 2)) if recomputes else frozenset()
    problem = Problem(
        rank_of_stage=placement, num_microbatches=8, costs=Costs(latency=0.25), splits=splits, recomputed=recomputed,
        limits=[1.0 + placement.count(rank) for rank in range(ranks)],
    )  # fmt: skip
    found = synthesize(problem, rounds=3)
    check(found.program)
    timeline = simulate(found.program, problem.costs)
    assert timeline.makespan == found.seconds
    for rank in range(ranks):
        assert found.held[rank] <= problem.limit_of(rank)
        if not recomputes:
            assert timeline.peak_saved_on_rank(rank) == found.held[rank]
    assert found.seconds >= found.bound * (1 - 1e-9)
    assert found.program.recompute == recomputes
    assert {each.stage for row in found.program.rows for each in row if each.kind is Kind.RECOMPUTE} == recomputed


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(("placement", "limit"), [((0, 1, 2, 3), 4.0), (v(4, 2), 8.0), (round_robin(4, 2), 20.0)])
def test_no_registered_order_is_faster(placement, limit, splits):
    problem = Problem(
        rank_of_stage=placement, num_microbatches=8, costs=Costs(forward=1.3), splits=splits, limits=limit
    )
    clock = Clock(problem)
    orders = {name: words for name, words in named_words(problem)
              if all(problem.is_in_order(word, rank) for rank, word in enumerate(words))}  # fmt: skip
    assert orders
    fastest = min(clock.times(words).seconds for words in orders.values())
    found = synthesize(problem, rounds=2)
    assert found.named[1] == pytest.approx(fastest)
    assert found.seconds <= fastest * (1 + 1e-12)


@pytest.mark.parametrize(("order", "preset"), [("1f1b", "flush"), ("zb-h1", "zb-h1"), ("gpipe", "gpipe")])
def test_the_clock_agrees_with_the_simulator_on_registered_orders(order, preset):
    """Words of an order take what the simulator says of its preset, with latency and uneven stages."""
    costs = Costs(forward=[1.0, 1.5, 0.5, 2.0], backward=[2.0, 3.5, 1.0, 4.0], latency=[0.25, 1.5, 0.5])
    problem = Problem(rank_of_stage=(0, 1, 2, 3), num_microbatches=6, costs=costs, splits=order == "zb-h1")
    expected = simulate(Schedule.preset(preset, num_stages=4).build([6]), costs).makespan
    assert Clock(problem).times(dict(named_words(problem))[order]).seconds == pytest.approx(expected, rel=1e-12)


def test_times_go_on_from_known_ones():
    """Words with one computation elsewhere, timed from there on, have the times of a whole pass."""
    chance = random.Random(3)
    problem = Problem(rank_of_stage=v(3, 2), num_microbatches=6, costs=Costs(forward=[1, 2, 1, 3, 1, 2], latency=0.5))
    clock, words = Clock(problem), dict(named_words(problem))["zbv"]
    known, compared = clock.times(words), 0
    for _ in range(400):
        rank = chance.randrange(3)
        place, to = (chance.randrange(len(words[rank])) for _ in range(2))
        moved = [list(word) for word in words]
        moved[rank].insert(to, moved[rank].pop(place))
        if problem.is_in_order(moved[rank], rank):
            whole, rest = clock.times(moved), clock.times(moved, known, rank, min(place, to))
            assert (whole is None) == (rest is None)
            if whole is not None:
                assert (rest.seconds, rest.starts, rest.ends) == (whole.seconds, whole.starts, whole.ends)
                compared += moved != words
                words, known = moved, rest
    assert compared > 50


@pytest.mark.full
def test_rounds_decide_and_no_clock():
    """The same rounds, seed and number of processes make the same program; another number of processes is no worse."""
    problem = Problem(rank_of_stage=v(4, 2), num_microbatches=8, costs=Costs(latency=0.3), limits=4.0)
    first, second = (synthesize(problem, rounds=2, seed=5) for _ in range(2))
    assert first.program == second.program and first.rounds == second.rounds == (2,)
    both = synthesize(problem, rounds=2, seed=5, processes=2)
    assert both.seconds <= first.seconds and len(both.rounds) == 2


def test_the_certificate_says_what_the_bound_holds_for():
    certificate = synthesize(UNEVEN, rounds=1).certificate()
    assert json.loads(json.dumps(certificate)) is not None
    claims = certificate["bound_holds_for"]
    assert claims["words"] == ["F", "I", "W"] and claims["limits"] == [3.0] * 4
    assert claims["seconds"]["3F"] == 2.4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"limits": 0.5}, "rank 0 may hold 0.5, and one microbatch at its stages takes 1"),
        ({"limits": [3.0, 3.0]}, "one for each of 4 ranks"),
        ({"num_microbatches": 0}, "a batch cannot have 0 microbatches"),
        ({"deferred": 1.5}, "deferred of stage 0 is 1.5"),
        ({"recomputed": frozenset({4})}, "stages [4] cannot be recomputed"),
        ({"saved": 1e308}, "more than a number can hold; count it in a larger unit"),
        ({"rank_of_stage": (0, 2)}, "rank"),
    ],
)
def test_what_allows_no_program_is_refused(change, text):
    with pytest.raises(ValueError, match=text.replace("[", r"\[").replace("]", r"\]")):
        replace(UNEVEN, **change)


@pytest.mark.parametrize("moves", ["none", "host"])
def test_computations_that_take_no_time(moves):
    """Only transfers take time, so there is no period that a pattern could have."""
    zero = [0.0] * 3
    costs = Costs(forward=zero, backward=zero, backward_input=zero, backward_weight=zero, latency=[0.0, 1.0])
    problem = Problem(rank_of_stage=(0, 0, 1), num_microbatches=2, costs=costs, saved=[1.0] * 3, limits=[2.0, 1.0])
    found = synthesize(problem, moves=moves, rounds=3)
    check(found.program)
    assert found.seconds >= found.bound


@pytest.mark.full
@given(problems())
@settings(max_examples=30, deadline=None)
def test_made_up_costs_never_crash_it(problem):
    """There is a program, proved, and not below the bound."""
    found = synthesize(problem, rounds=2)
    check(found.program)
    assert found.seconds >= found.bound * (1 - 1e-9)
    assert all(problem.is_in_order(word, rank) for rank, word in enumerate(one_after_another(problem)))
    within = listed(problem, one_after_another(problem))
    assert within is None or all(problem.is_in_order(word, rank) for rank, word in enumerate(within))
