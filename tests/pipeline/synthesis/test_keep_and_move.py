"""Recomputes and moves in one program: what is held, the bound for any choice, and the search."""

import json
import math
import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check
from megatron.pipeline.program.extent import Kept
from megatron.pipeline.program.instruction import MOVES, SWAPS, Instruction, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import read_schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem, synthesize, synthesize_keeping
from megatron.pipeline.synthesis.bound import bound_of_any_recompute, lower_bound
from megatron.pipeline.synthesis.keep import kept_microbatches
from megatron.pipeline.synthesis.moved_rows import Lead, Mover, held_by, most_held
from megatron.pipeline.synthesis.moves import HOST, PAIR, Way
from megatron.pipeline.synthesis.moves_bound import bound_of_any_choice, bound_with_moves
from megatron.pipeline.synthesis.seeds import named_words
from megatron.pipeline.synthesis.several_problems import synthesize_fastest
from tests.draws import draws
from tests.pipeline.synthesis.made_up import all_words, moved_anywhere, problems, timer, two_ranks, with_ends

FOUR = Problem(
    rank_of_stage=(0, 1, 2, 3), num_microbatches=12, costs=Costs(forward=1.0, backward=2.0, swap_out=0.5, evict=0.5),
    limits=2.5, stage_input=0.1, recomputed=frozenset(range(4)),
)  # fmt: skip
PLAIN = replace(FOUR, recomputed=frozenset())


# --- what is held


def _programs(problem: Problem, way: Way) -> list[tuple[Problem, Program]]:
    """Registered orders with a part of what has no room recomputed, and a part moved."""
    found = []
    for (_, words), part, at_once in product(named_words(problem), (0.25, 0.5, 0.75), (0, 3)):
        if (kept := kept_microbatches(problem, words, moved=part, ahead=2)) is not None:
            chosen = replace(problem, kept=kept)
            if (made := Mover(chosen, way).moved(words, Lead(4, 4, at_once), "")) is not None:
                found.append((chosen, made.program))
    return [each for each in found if each[0].num_recomputed and _moves(each[1])]


def _moves(program: Program) -> list[int]:
    return [at for at, row in enumerate(program.rows) for each in row if each.kind in MOVES | SWAPS]


@pytest.mark.parametrize("way", [HOST, PAIR])
def test_the_count_is_that_of_the_checker(way):
    """Where an input counts as much as all that is saved, rows hold as many microbatches as the checker finds."""
    problem = replace(FOUR, limits=3.0, stage_input=0.5)
    programs = _programs(problem, way)
    assert len(programs) > 3
    for chosen, program in programs:
        alike = replace(chosen, stage_input=1.0, limits=math.inf)
        assert check(program).peak_saved_on_rank == most_held(alike, program)


def _held_in(problem: Problem, program: Program, costs: Costs) -> list[float]:
    """The most that each rank holds in a simulation, by the times of its words."""
    timeline, peaks = simulate(program, costs), []
    for row, starts, ends in zip(timeline.rows, timeline.starts, timeline.ends, strict=True):
        events = []
        for each, start, end in zip(row, starts, ends, strict=True):
            is_kept = problem.keeps(each.stage, each.microbatch) if each.microbatch is not None else False
            whole, part = problem.saved_sizes[each.stage], problem.input_sizes[each.stage]
            take, give = {
                Kind.FORWARD: (whole if is_kept else part, 0.0), Kind.RECOMPUTE: (whole - part, 0.0),
                Kind.BACKWARD: (0.0, whole), Kind.BACKWARD_INPUT: (0.0, 0.0), Kind.BACKWARD_WEIGHT: (0.0, whole),
                Kind.SWAP_OUT: (0.0, whole), Kind.SWAP_IN: (whole, 0.0),
            }.get(each.kind, (0.0, 0.0))  # fmt: skip
            events += [(start, 1, take), (end, 0, -give)]
        held = peak = 0.0
        for *_, change in sorted(events):
            held += change
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


@given(st.integers(0, 2**20), st.sampled_from([0.1, 0.5]), st.booleans())
@draws(15)
def test_no_timing_holds_more_than_is_counted(seed, stage_input, splits):
    """At whatever speed stages and copies are."""
    chance, problem = random.Random(seed), replace(FOUR, stage_input=stage_input, splits=splits)
    chosen, program = chance.choice(_programs(problem, HOST))
    count = most_held(chosen, program)
    assert all(held <= 2.5 * (1 + 1e-9) for held in count)
    for _ in range(5):
        each = [[chance.choice((0.1, 1.0, 5.0)) for _ in range(4)] for _ in range(3)]
        costs = Costs(forward=each[0], backward=each[1], swap_out=each[2], swap_in=chance.choice((0.0, 0.3, 9.0)))
        assert all(map(lambda held, most: held <= most + 1e-9, _held_in(chosen, program, costs), count))


def test_what_a_pair_rank_accepts_has_the_size_of_the_other_stage():
    """Choices share their rows. A row that accepts holds another size where the other stage keeps nothing."""
    problem = replace(FOUR, rank_of_stage=(0, 1), recomputed=frozenset({0, 1}), limits=2.0)
    all_again, first = Mover(problem, PAIR), replace(problem, kept=(Kept(0, 1), Kept(0, 2)))
    row = tuple(map(Instruction.parse, ["1ACCEPT2", "1RETURN2", "1F0"]))
    assert [held_by(each.problem, row) for each in (all_again, all_again.keeping(first))] == pytest.approx([0.2, 1.1])
    found = synthesize_keeping(replace(FOUR, limits=[3.0, 3.0, 4.0, 4.0]), moves="pair", rounds=1)
    check(found.program)
    assert found.held == most_held(found.problem, found.program)
    assert all(map(lambda held, limit: held <= limit * (1 + 1e-9), found.held, (3.0, 3.0, 4.0, 4.0)))


# --- the bound


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", [HOST, PAIR])
def test_the_bound_lies_below_those_of_one_of_the_two(way):
    """With copies that take for ever it is that of any recompute, and not below what nothing limits."""
    for placement, limit, slow in product(((0, 1, 2, 3), (0, 1, 2, 3, 4, 5)), (1.5, 2.0, 3.0), (0.0, 0.5, 2.0, 1e9)):
        costs = Costs(forward=1.0, backward=2.0, swap_out=slow, evict=slow)
        stages = frozenset(range(len(placement)))
        problem = replace(FOUR, rank_of_stage=placement, limits=limit, costs=costs, recomputed=stages)
        plain = replace(problem, recomputed=frozenset())
        (found, _), (recompute, _) = bound_of_any_choice(problem, (way,)), bound_of_any_recompute(problem)
        assert found <= min(recompute, bound_with_moves(plain, (way,))[0]) * (1 + 1e-9)
        assert found >= lower_bound(replace(plain, limits=math.inf))[0] * (1 - 1e-9)
        if slow == 1e9:
            assert found >= 0.99 * recompute
        assert bound_with_moves(replace(problem, kept=(Kept(0, 0),)), (way,))[0] == found


def _tight(seed: int) -> Problem:
    """Two ranks with limits of one to two microbatches, long recomputes and slow copies."""
    chance, problem = random.Random(seed), two_ranks(seed, (4, 3))
    seconds = float(chance.choice((0, 2, 8)))
    costs = replace(
        problem.costs, recompute=[float(chance.choice((1, 4, 9))) for _ in range(2)], swap_out=seconds, evict=seconds,
        latency=float(chance.choice((1, 4, 8))),
    )  # fmt: skip
    limits = [chance.choice((1.0, 1.25, 2.0)) for _ in range(2)]
    stage_input = chance.choice((0.0, 0.25, 0.5, 0.75))
    return replace(problem, costs=costs, limits=limits, recomputed=frozenset({0, 1}), stage_input=stage_input)


def _trial(problem: Problem, way: Way, chance: random.Random) -> list[float]:
    """The times of programs of one choice of kept microbatches within the limits: its fastest words, with moves."""
    items = [Kept(*each) for each in product(range(2), range(problem.num_microbatches))]
    kept = tuple(each for each in items if chance.random() < 0.6)
    chosen, more = replace(problem, kept=kept), chance.choice((0.0, 0.5, 1.0, math.inf))
    free = replace(chosen, limits=[each + more for each in problem.limits])  # what may lie elsewhere at once
    orders = [list(all_words(free, rank)) for rank in range(2)]
    drawn = [tuple(map(chance.choice, orders)) for _ in range(60)]
    found, seconds_of = [], timer(free)
    for seconds, words in sorted((seconds_of(words), words) for words in drawn)[:8]:
        if seconds == math.inf:
            continue
        program = chosen.program(list(map(list, words)))
        aheads = [Lead(*each) for each in ((1, 1), (3, 3), (1, 2, 2))]
        moved = [Mover(chosen, way).moved(list(map(list, words)), ahead, "") for ahead in aheads]
        made = [each.program.rows for each in moved if each is not None]
        for _ in range(4):
            anywhere = [_of_one_size(program, row, chosen, way, chance) for row in program.rows]
            if way is PAIR:
                anywhere = with_ends(problem, program.rows, anywhere, chance.randrange(2))
            if all(held_by(chosen, row) <= problem.limit_of(rank) + 1e-9 for rank, row in enumerate(anywhere)):
                made.append(tuple(anywhere))
        found += [simulate(program.with_rows(rows), problem.costs).makespan for rows in made]
    return found


def _of_one_size(program: Program, row, problem: Problem, way: Way, chance: random.Random):
    """The row with moves from anywhere to anywhere, without those of recomputed microbatches where others are kept."""
    moves = {way.out, way.back}
    moved = moved_anywhere(row, problem, way, chance)
    return tuple(
        each for each in moved
        if each.kind not in moves
        or not program.keeps(each.stage) or not program.is_recomputed(each.stage, each.microbatch)
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("way", [HOST, PAIR])
def test_nothing_beats_the_bound(way):
    """Drawn choices of small problems with their fastest drawn words, the pass's moves, and moves anywhere."""
    told = near = 0
    for seed in range(30):
        chance, problem = random.Random(seed), _tight(seed)
        bound, bound_from = bound_of_any_choice(problem, (way,))
        found = [time for _ in range(6) for time in _trial(problem, way, chance)]
        assert min(found, default=math.inf) >= bound * (1 - 1e-9), (seed, bound, bound_from, min(found))
        told += bound > lower_bound(replace(problem, recomputed=frozenset(), limits=math.inf))[0] * (1 + 1e-9)
        near += min(found, default=math.inf) <= bound * 1.25
    assert told > 3 and near > 3, (told, near)


# --- the search


@pytest.mark.full
def test_both_are_faster_than_one_of_the_two():
    """Five eighths of what 1F1B holds on four ranks; the file, its proof and the certificate say what does what."""
    alone = [synthesize_keeping(FOUR, rounds=1), synthesize(PLAIN, moves="host", rounds=1)]
    found = synthesize_keeping(FOUR, moves="host", rounds=1)
    assert found.bound <= found.seconds < min(each.seconds for each in alone)
    assert found.moved and found.recomputed and found.way is HOST
    report = check(found.program)
    assert {at: len(each) for at, each in found.moved.items()} == {
        at: each for at, each in enumerate(report.swapped_microbatches) if each
    }
    assert simulate(found.program, FOUR.costs).makespan == found.seconds
    assert found.held == most_held(found.problem, found.program) and max(found.held) <= 2.5 * (1 + 1e-9)
    schedule = read_schedule("mine", text=found.csv)
    assert schedule.program.rows == found.program.rows
    for stage, again in found.recomputed.items():
        assert not {*found.moved.get(stage, ())} & {*again}
        assert schedule.keeps(stage) == {*range(12)} - {*again}
    certificate = json.loads(json.dumps(found.certificate()))
    assert certificate["moves"]["microbatches_of_stage"] == {str(at): list(each) for at, each in found.moved.items()}
    recomputed = {str(at): list(each) for at, each in found.recomputed.items()}
    assert certificate["recomputed_microbatches_of_stage"] == recomputed
    assert synthesize_fastest([FOUR], recomputes_some=True, moves="host", rounds=1).program == found.program


@pytest.mark.full
@given(problems(), st.sampled_from(["host", "best"]), st.sampled_from([0.0, 0.5, 2.0, 9.0]))
@draws(12)
def test_it_is_never_slower_than_one_of_the_two(problem, moves, seconds):
    """With the same rounds and seed, whatever the costs; within all limits, proved, and not below the bound."""
    costs = replace(problem.costs, swap_out=seconds, evict=seconds)
    plain = replace(problem, costs=costs, recomputed=frozenset(), kept=())
    stages = frozenset(range(problem.num_stages))
    problem = replace(plain, recomputed=stages, stage_input=0.05)
    found = synthesize_keeping(problem, moves=moves, rounds=1)
    check(found.program)
    alone = [synthesize_keeping(problem, rounds=1), synthesize(plain, moves=moves, rounds=1)]
    assert found.bound * (1 - 1e-9) <= found.seconds <= min(each.seconds for each in alone) * (1 + 1e-9)
    assert all(held <= problem.limit_of(rank) * (1 + 1e-6) for rank, held in enumerate(found.held))


def test_a_limit_may_be_too_small_without_recomputes():
    """Two stages of a rank save 2 together, and one of them recomputes."""
    limits = {"limits": 1.2, "rank_of_stage": (0, 1, 1, 0), "saved": 1.0}
    found = synthesize_keeping(replace(FOUR, **limits), moves="host", rounds=1)
    assert max(found.held) <= 1.2 * (1 + 1e-9) and found.seconds >= found.bound * (1 - 1e-9)


@pytest.mark.full
def test_a_choice_that_is_given_may_move():
    """`synthesize` takes the choice as it is; its bound holds for any."""
    kept = tuple(Kept(*each) for each in product(range(4), range(12)) if each[1] % 2)
    problem = replace(FOUR, kept=kept)
    found = synthesize(problem, moves="host", rounds=1)
    check(found.program)
    assert found.recomputed == {stage: tuple(range(0, 12, 2)) for stage in range(4)}
    assert found.bound == bound_of_any_choice(problem, (HOST,))[0] <= found.seconds
    assert all(each % 2 for moved in found.moved.values() for each in moved)
