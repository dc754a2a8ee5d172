"""The checker against an oracle that tries every timing of a pair: the same peaks, one verdict on each mutation."""

from collections.abc import Iterator

import pytest

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import MOVES, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from tests.pipeline.check.examples import moved, moved_later
from tests.pipeline.check.moves_oracle import Wrong, most_held
from tests.pipeline.check.mutations import assert_each_is_judged
from tests.pipeline.check.oracle import verdict

SMALL = {
    "flush": (Schedule.preset("bpipe", num_stages=4), (5,)),
    "2bw": (Schedule.preset("2bw", num_stages=4, balance=True), (4, 4)),
    "recompute": (Schedule.preset("bpipe", num_stages=4, recompute=True), (6,)),
    "interleaved": (Schedule.preset("interleaved", num_stages=6, num_virtual_stages=2, balance=True), (6,)),
}
LARGER = {
    "6 stages": (Schedule.preset("bpipe", num_stages=6), (8,)),
    "4 ranks": (Schedule.preset("interleaved", num_stages=8, num_virtual_stages=2, balance=True), (8,)),
    "extra warm-up": (Schedule.preset("flush", num_stages=3, balance=True, extra_warmup=True), (7,)),
}


@pytest.mark.parametrize("name", [*SMALL, *LARGER])
def test_peaks_are_those_of_the_worst_timing(name: str):
    """No timing deadlocks, loads too late or holds more than the checker says, and one holds as much."""
    schedule, batches = (SMALL | LARGER)[name]
    program = schedule.build(batches)
    assert any(program.num_evictions)
    peaks = check(program).peak_saved_on_rank
    for rank in range(schedule.num_ranks // 2):
        assert most_held(program, rank) == (peaks[rank], peaks[-1 - rank])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "flush" else pytest.mark.full) for name in SMALL]
)
def test_every_exchange_is_judged_as_every_timing_judges_it(name: str):
    """Each move put at each place of its row, and each two neighbours exchanged: one verdict, and both occur."""
    schedule, batches = SMALL[name]
    bounds = schedule.max_saved_on_rank(batches)
    mutants = exchanges(schedule.build(batches))
    assert_each_is_judged(mutants, lambda mutant: wrong(mutant, bounds), max_saved_on_rank=bounds)


# Four stages behind a frozen one: on ranks of their own, or the first two on one.
FROZEN = {"apart": (0, 1, 2, 3, 4), "together": (0, 0, 1, 2, 3)}


@pytest.mark.parametrize("name", FROZEN)
def test_behind_a_frozen_stage_every_timing_agrees(name: str):
    """The worst timing of the pairs behind it holds what the checker says."""
    schedule, first = _behind_a_frozen_stage(name)
    program = schedule.build((5,))
    assert any(program.num_evictions)
    peaks = check(program).peak_saved_on_rank
    for place in range(2):
        assert most_held(program, first + place) == (peaks[first + place], peaks[-1 - place])


@pytest.mark.full
@pytest.mark.parametrize("name", FROZEN)
def test_behind_a_frozen_stage_every_move_is_judged_as_every_timing_judges_it(name: str):
    """Each move put at each place of its row."""
    schedule, first = _behind_a_frozen_stage(name)
    bounds = schedule.max_saved_on_rank((5,))
    mutants = moved_elsewhere(schedule.build((5,)))
    pairs = range(first, first + 2)
    assert_each_is_judged(mutants, lambda mutant: exceeded(mutant, bounds, pairs), max_saved_on_rank=bounds)


def _behind_a_frozen_stage(name: str) -> tuple[Schedule, int]:
    """And its first rank that trains."""
    return Schedule.preset("bpipe", num_stages=5, num_frozen=1, rank_of_stage=FROZEN[name]), FROZEN[name][1]


def exchanges(program: Program) -> Iterator[tuple[Program, str]]:
    yield from moved_elsewhere(program)
    yield from moved_later(program, reach=1, kinds=set(Kind) - MOVES)


def moved_elsewhere(program: Program) -> Iterator[tuple[Program, str]]:
    for rank, row in enumerate(program.rows):
        for position, each in enumerate(row):
            for place in range(len(row)) if each.kind in MOVES else ():
                if place != position:
                    yield moved(program, rank, position, place)


def wrong(program: Program, bounds: tuple[int, ...]) -> str:
    """What the two oracles say against a program; '' if it is right."""
    without_moves = [tuple(each for each in row if each.kind not in MOVES) for row in program.rows]
    reason = verdict(program.with_rows(tuple(without_moves)), [program.num_microbatches] * program.num_stages)
    return reason or exceeded(program, bounds, range(program.num_ranks // 2))


def exceeded(program: Program, bounds: tuple[int, ...], ranks: range) -> str:
    """Which pair, of the ranks that train from both ends, may hold more than its bounds or goes wrong; '': none."""
    for place, rank in enumerate(ranks):
        try:
            most = most_held(program, rank)
        except Wrong as error:
            return str(error)
        if most[0] > bounds[rank] or most[1] > bounds[-1 - place]:
            return f"ranks {rank} and {program.num_ranks - 1 - place} hold {most}"
    return ""
