"""Programs with moves: within the true limits, proved, never slower than without, and not below their bound."""

import json
import math
import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.check import check
from megatron.pipeline.program.edges import round_robin, v
from megatron.pipeline.program.instruction import MOVES, SWAPS
from megatron.pipeline.schedules import read_schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem, synthesize
from megatron.pipeline.synthesis.bound import lower_bound
from megatron.pipeline.synthesis.moved_rows import Lead, Mover, held_by, most_held
from megatron.pipeline.synthesis.moves import HOST, PAIR
from megatron.pipeline.synthesis.moves_bound import bound_with_moves
from megatron.pipeline.synthesis.seeds import named_words
from tests.pipeline.synthesis.made_up import all_words, moved_anywhere, problems, timer, two_ranks, with_ends

FOUR = Problem(
    rank_of_stage=(0, 1, 2, 3), num_microbatches=10, costs=Costs(swap_out=0.5, evict=0.5), limits=3.0
)  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("moves", ["host", "pair", "best"])
def test_what_moves_leaves_room_for_a_faster_program(moves, splits):
    """Three quarters of 1F1B's memory: the checker counts no more on any rank, at any timing."""
    problem = replace(FOUR, splits=splits)
    plain, found = synthesize(problem, rounds=1), synthesize(problem, moves=moves, rounds=1)
    assert plain.seconds / found.seconds > 1.05 and found.seconds >= found.bound * (1 - 1e-9)
    assert moves in (found.way.name, "best")
    if not splits:
        assert found.seconds == found.bound
    report = check(found.program, max_saved_on_rank=[3] * 4)
    assert report.peak_saved_on_rank == found.held
    assert simulate(found.program, problem.costs).makespan == found.seconds
    counts = report.swapped_microbatches if found.way is HOST else report.evicted_microbatches
    assert {at: len(each) for at, each in found.moved.items()} == {at: each for at, each in enumerate(counts) if each}


@pytest.mark.sample(1)
@pytest.mark.parametrize("moves", ["host", "pair"])
def test_a_file_keeps_its_moves(moves):
    """What is written is what was found, continued for any number of batches; the certificate names what moves."""
    found = synthesize(FOUR, moves=moves, rounds=1)
    schedule = read_schedule("mine", text=found.csv)
    assert schedule.program.rows == found.program.rows
    assert schedule.build([10, 10]).num_microbatches == 20
    certificate = json.loads(json.dumps(found.certificate()))
    assert certificate["moves"]["to"] == moves
    assert certificate["moves"]["microbatches_of_stage"] == {str(at): list(each) for at, each in found.moved.items()}
    assert certificate["bound_holds_for"]["seconds_of_moves_to"] == {moves: {"out": [0.5] * 4, "back": [0.5] * 4}}


@pytest.mark.full
def test_where_moves_do_not_help_the_program_has_none():
    """Copies as long as a batch: the result is that of the search without them."""
    slow = replace(FOUR, costs=Costs(swap_out=1000.0, evict=1000.0))
    plain = synthesize(slow, rounds=1)
    for moves in ("host", "pair", "best"):
        found = synthesize(slow, moves=moves, rounds=1)
        assert found.seconds <= plain.seconds and (found.way, found.moved) == (None, {})


@pytest.mark.full
def test_sizes_of_stages_that_differ_are_counted_in_their_unit():
    """A stage of twice the size holds half as many; what the pass counts is what the rows hold."""
    sizes = [2.0, 1.0, 1.0, 0.5]
    problem = Problem(
        rank_of_stage=(0, 1, 2, 3), num_microbatches=8, costs=Costs(latency=1.0, swap_out=0.5, evict=0.5), saved=sizes,
        deferred=[each / 4 for each in sizes], limits=[6.0, 3.0, 3.0, 4.0],
    )  # fmt: skip
    plain = synthesize(problem, rounds=1)
    for moves in ("host", "pair"):
        found = synthesize(problem, moves=moves, rounds=1)
        assert found.seconds <= plain.seconds and found.held == most_held(problem, found.program)
        assert all(held <= problem.limit_of(rank) for rank, held in enumerate(found.held))
    assert synthesize(problem, moves="best", rounds=1).way is HOST


def test_the_count_is_that_of_the_checker():
    """Where each microbatch counts one, rows of registered orders with moves hold what the checker finds."""
    compared = 0
    for placement, way, limit in product(((0, 1, 2, 3), round_robin(4, 2), v(4, 2)), (HOST, PAIR), (3.0, 4.0, 6.0)):
        problem = Problem(rank_of_stage=placement, num_microbatches=8, costs=Costs(), limits=limit)
        mover = Mover(problem, way)
        for _, words in named_words(problem):
            if (made := mover.moved(words, Lead(1, 1), "")) is not None:
                assert check(made.program).peak_saved_on_rank == most_held(problem, made.program)
                compared += any(each.kind in MOVES | SWAPS for row in made.program.rows for each in row)
    assert compared > 5


@pytest.mark.parametrize(
    ("placement", "moves", "text"),
    [
        ((0, 1), "disk", "choose none, host, pair, best"),
        (v(2, 2), "pair", "on the rank itself"),
        ((0, 1, 1, 0, 2), "pair", "rank 0 have their pair stages on ranks"),
    ],
)
def test_choices_that_move_nothing_are_refused(placement, moves, text):
    with pytest.raises(ValueError, match=text):
        synthesize(Problem(rank_of_stage=placement, num_microbatches=2, costs=Costs()), moves=moves, rounds=1)


@given(problems(), st.sampled_from(["host", "best"]), st.floats(0.0, 9.0))
@settings(max_examples=20, deadline=None)
def test_made_up_costs_never_crash_it(problem, moves, seconds):
    problem = replace(problem, costs=replace(problem.costs, swap_out=seconds, evict=seconds))
    found = synthesize(problem, moves=moves, rounds=1)
    check(found.program)
    assert found.seconds >= found.bound * (1 - 1e-9)
    assert all(held <= problem.limit_of(rank) * (1 + 1e-6) for rank, held in enumerate(found.held))


# --- the bound


def test_the_bound_lies_between_those_with_and_without_limits():
    """It grows with the time of a copy: from no limits at all to what limits cost where nothing moves."""
    for placement, way in ((tuple(range(8)), HOST), (tuple(range(8)), PAIR), (v(8, 2), HOST)):
        size = 8 / len(placement)
        for limit in (2.0, 3.0, 4.0, 5.0):
            costs = [
                Costs(forward=size, backward=2 * size, swap_out=each, evict=each) for each in (0.0, 0.5, 2, 4, 8, 1e9)
            ]
            found = [
                replace(FOUR, rank_of_stage=placement, num_microbatches=24, saved=size, limits=limit, costs=each)
                for each in costs
            ]
            bounds = [bound_with_moves(each, (way,))[0] for each in found]
            assert bounds == sorted(bounds)
            assert lower_bound(replace(found[0], limits=math.inf))[0] <= bounds[0]
            assert bounds[-1] <= lower_bound(found[0])[0] * (1 + 1e-6)
            assert bounds[-1] >= 0.95 * lower_bound(found[0])[0]
            if way is HOST:
                assert bounds[0] == lower_bound(replace(found[0], limits=math.inf))[0]


@pytest.mark.full
@pytest.mark.parametrize("way", [HOST, PAIR])
def test_nothing_beats_the_bound(way):
    """All words of small problems, the fastest of them with moves of the pass and with moves anywhere in their rows."""
    needed = told = reached = 0
    for seed in range(15):
        problem, chance = two_ranks(seed, (4, 3)), random.Random(seed)
        free, mover, least = replace(problem, limits=math.inf), Mover(problem, way), math.inf
        bound, bound_from = bound_with_moves(problem, (way,))
        orders = [list(all_words(free, rank)) for rank in range(2)]
        seconds_of = timer(free)
        timed = sorted((seconds_of(words), words) for words in product(*orders))
        for seconds, words in timed[:60]:
            if seconds >= least:
                break
            rows = problem.program(words).rows
            moved = [mover.moved(list(map(list, words)), Lead(*ahead), "") for ahead in product((1, 3), (1, 3))]
            made = [each.program.rows for each in moved if each is not None]
            for _ in range(10):
                anywhere = [moved_anywhere(row, problem, way, chance) for row in rows]
                if way is PAIR:  # from one rank to the other
                    anywhere = with_ends(problem, rows, anywhere, chance.randrange(2))
                if all(held_by(problem, row) <= problem.limit_of(rank) + 1e-9 for rank, row in enumerate(anywhere)):
                    made.append(tuple(anywhere))
            for each in made:
                found = simulate(problem.program(words).with_rows(each), problem.costs).makespan
                least = min(least, found)
                assert found >= bound * (1 - 1e-9), (seed, bound, bound_from, found, each)
                needed += any(problem.most_held(*word) > problem.limit_of(word[0]) for word in enumerate(words))
        told += bound > lower_bound(free)[0]
        reached += least <= bound * (1 + 1e-9)
    assert needed > 20 and reached > 5, (needed, told, reached)
