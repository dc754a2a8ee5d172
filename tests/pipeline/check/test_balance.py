"""Moves of saved activations: what is accepted, what is rejected with which words, and what the bound means."""

import dataclasses

import pytest

from megatron.pipeline.check import ProgramError, check, check_periodic
from megatron.pipeline.program.instruction import MOVES, Instruction
from megatron.pipeline.program.program import PeriodicProgram, Program
from megatron.pipeline.schedules import Schedule
from tests.pipeline.check.examples import with_row, written

# Two stages, three microbatches, computations and moves alone: the smallest program in which an eviction makes room.
EVICTOR = "0F0 0F1 0EVICT1 0F2 0B0 0LOAD1 0B1 0B2"
ACCEPTOR = "1ACCEPT1 1RETURN1 1F0 1B0 1F1 1B1 1F2 1B2"


def rejected(first: str, second: str, **options: object) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        check(written(first, second, batches=(3,)), **options)
    return caught.value


def test_the_smallest_program():
    """The report says what moves. While it moves, a microbatch counts at both ends."""
    report = check(written(EVICTOR, ACCEPTOR, batches=(3,)), max_saved=[3, 2])
    assert report.evicted_microbatches == (1, 0)
    assert report.peak_saved_microbatches == (3, 2)
    assert not report.communicates
    assert check(written("0F0 0B0", "1F0 1B0")).evicted_microbatches == (0, 0)


@pytest.mark.parametrize(
    ("first", "second", "rank", "position", "reason"),
    [
        (EVICTOR.replace("0F1 0EVICT1", "0EVICT1 0F1"), ACCEPTOR, 0, 1, "its activations are not here"),
        (EVICTOR.replace("0LOAD1 ", ""), ACCEPTOR, 0, 5, "at the pair stage, and no LOAD stands before it"),
        (EVICTOR.replace("0LOAD1 0B1", "0B1 0LOAD1"), ACCEPTOR, 0, 5, "at the pair stage, and no LOAD"),
        (EVICTOR.replace("0EVICT1 ", ""), ACCEPTOR, 0, 4, "its activations are here and have never left"),
        (EVICTOR.replace("0EVICT1", "0EVICT1 0EVICT1"), ACCEPTOR, 0, 3, "its activations are at the pair stage"),
        (EVICTOR.replace("0LOAD1", "0LOAD1 0LOAD1"), ACCEPTOR, 0, 6, "left and come back already"),
        (EVICTOR.replace("0B1", "0EVICT1 0LOAD1 0B1"), ACCEPTOR, 0, 6, "left and come back already"),
        (EVICTOR + " 0EVICT2", ACCEPTOR, 0, 8, "have been used already"),
        (EVICTOR, "1ACCEPT1 " + ACCEPTOR, 1, 1, "were accepted already"),
        (EVICTOR, ACCEPTOR.replace("1ACCEPT1 ", ""), 1, 0, "its activations are not here"),
        (EVICTOR, ACCEPTOR + " 1RETURN1", 1, 8, "were returned already"),
        (EVICTOR, ACCEPTOR.replace("1RETURN1 ", ""), 0, 5, "the row of rank 1 has no 1RETURN1 to meet it"),
        (EVICTOR, ACCEPTOR + " 1ACCEPT2", 1, 8, "the row of rank 0 has no 0EVICT2 to meet it"),
        (EVICTOR, ACCEPTOR.replace("1ACCEPT1 1RETURN1", "1ACCEPT2 1RETURN2"), 0, 2, "rank 1 is 1ACCEPT2, whose other"),
        (EVICTOR, ACCEPTOR.replace("CEPT1", "CEPT3"), 1, 0, "there is no microbatch 3"),
    ],
)  # fmt: skip
def test_reasons(first: str, second: str, rank: int, position: int, reason: str):
    """Each rule is named at the instruction that breaks it."""
    error = rejected(first, second)
    assert (error.rank, error.position) == (rank, position)
    assert reason in error.reason


def test_moves_meet_in_order():
    """Two microbatches whose other ends stand in another order would be mixed up."""
    first = "0F0 0F1 0F2 0EVICT1 0EVICT2 0B0 0LOAD1 0B1 0LOAD2 0B2"
    rest = " 1RETURN1 1RETURN2 1F0 1B0 1F1 1B1 1F2 1B2"
    check(written(first, "1ACCEPT1 1ACCEPT2" + rest, batches=(3,)))
    error = rejected(first, "1ACCEPT2 1ACCEPT1" + rest)
    assert (error.rank, error.position) == (0, 3)
    assert error.reason == "move 0 of rank 1 is 1ACCEPT2, whose other end is 0EVICT2"


def test_the_recompute_needs_the_activations_first():
    """With recompute it is the stored input that moves, and R needs it."""
    first, second = "0F0 0EVICT0 0LOAD0 0R0 0B0", "1ACCEPT0 1RETURN0 1F0 1R0 1B0"
    check(written(first, second, recompute=True))
    for wrong in ("0F0 0EVICT0 0R0 0LOAD0 0B0", "0F0 0R0 0EVICT0 0LOAD0 0B0"):
        with pytest.raises(ProgramError, match=r"no LOAD stands before it|have been used already"):
            check(written(wrong, second, recompute=True))


def test_pairs():
    """Stage x is paired with p-1-x: not with itself, on another rank, and one rank with one."""
    with pytest.raises(ProgramError, match="its pair stage lives on the same rank"):
        check(written("0F0 0EVICT0 0LOAD0 0B0 0ACCEPT0 0RETURN0"))
    with pytest.raises(ValueError, match="pair stages on ranks 2 and 1, so it has no pair"):
        moves = "0F0 1F0 0EVICT0 0LOAD0 1B0 0B0", "2F0 2B0", "3ACCEPT0 3RETURN0 3F0 3B0"
        check(written(*moves, rank_of_stage=(0, 0, 1, 2)))
    program = written(EVICTOR, ACCEPTOR, batches=(3,))
    row, place = program.rows[0], 2
    for peer in (1, 0):
        named = with_row(program, 0, [*row[:place], dataclasses.replace(row[place], peer=peer), *row[place + 1 :]])
        if peer:
            check(named)
            continue
        with pytest.raises(ProgramError, match="its peer is stage 1, not 0"):
            check(named)


def test_an_evaluation_moves_nothing():
    """It saves nothing that could be moved."""
    program = written("0F0 0EVICT0", "1ACCEPT0 1F0", forward_only=True)
    with pytest.raises(ProgramError, match="a program that evaluates has forwards only"):
        check(program)


def test_deadlocks():
    """A forward waits for an eviction whose other end waits for that forward; the message names the circle."""
    second = "1F0 1B0 1F1 1B1 1F2 1ACCEPT0 1RETURN0 1B2"
    error = rejected("0F0 0EVICT0 0F1 0F2 0LOAD0 0B0 0B1 0B2", second)
    assert error.reason == (
        "deadlock: rank 0 waits at 0F2 for 1ACCEPT0 of rank 1; rank 1 waits at 1F2 for 0F2 of rank 0"
    )
    error = rejected("0F0 0F1 0EVICT1 0LOAD1 0B0 0B1 0F2 0B2", "1ACCEPT1 1F0 1B0 1F1 1B1 1F2 1RETURN1 1B2")
    assert "rank 0 waits at 0B1 for 1RETURN1 of rank 1; rank 1 waits at 1F2" in error.reason


# --- every mutation


def balanced(name: str, num_stages: int = 4) -> tuple[Program, tuple[int, ...]]:
    """A balanced program, and its bounds."""
    schedule = Schedule.preset(name, num_stages=num_stages, balance=True, recompute=name == "2bw")
    batches = (6, 5) if name == "2bw" else (7,)
    return schedule.build(batches), schedule.max_saved_microbatches(batches)


@pytest.mark.parametrize("name", ["flush", "2bw"])
def test_every_move_is_needed_once_where_it_is(name: str):
    """Each move dropped, doubled, or given to another microbatch is rejected."""
    program, bounds = balanced(name)
    for rank, row in enumerate(program.rows):
        for position, each in enumerate(row):
            if each.kind not in MOVES:
                continue
            other = Instruction(each.kind, each.stage, each.microbatch - 1)
            for changed in ([], [each, each], [other]):
                with pytest.raises(ProgramError):
                    check(with_row(program, rank, [*row[:position], *changed, *row[position + 1 :]]), max_saved=bounds)


# --- any number of periods


def test_a_written_period_of_moves_repeats():
    """The smallest one: each microbatch is away while nothing else happens."""
    fill, period = "0F0 0EVICT0", "0LOAD0 0B0 0F1 0EVICT1"
    others = "1ACCEPT0 1F0 1B0", "1RETURN0 1ACCEPT1 1F1 1B1"
    report = check_periodic(pair((fill, others[0]), (period, others[1]), ("0LOAD0 0B0", "1RETURN0")))
    assert report.evicted_microbatches == (2, 0)


def test_a_period_that_evicts_more_than_it_loads_is_rejected():
    """One period drains; a second one would find another state: a microbatch is away that was not before."""
    evicts = pair(("0F0", "1F0 1B0"), ("0F1 0EVICT1 0B0", "1ACCEPT1 1F1 1B1"), ("0LOAD0 0B0", "1RETURN0"))
    check(evicts.unroll(1))
    with pytest.raises(
        ProgramError, match=r"what is away from stage 0 or lent to it is \[\] before it and \[0\] after it"
    ):
        check_periodic(evicts)


def test_a_period_that_ends_with_another_microbatch_away_is_rejected():
    """One period drains; it leaves the later of two microbatches away, and found the earlier one there."""
    fill = "0F0 0F1 0EVICT0", "1ACCEPT0 1F0 1B0 1F1 1B1"
    period = "0LOAD0 0B0 0F2 0EVICT2", "1RETURN0 1ACCEPT2 1F2 1B2"
    other = pair(fill, period, ("0B0 0LOAD1 0B1", "1RETURN1"), batches=(2,))
    check(other.unroll(1))
    with pytest.raises(
        ProgramError, match=r"what is away from stage 0 or lent to it is \[0\] before it and \[1\] after it"
    ):
        check_periodic(other)


def pair(fill: tuple[str, str], period: tuple[str, str], drain: tuple[str, str], *, batches: tuple[int, ...] = (1,)):
    rows = [written(*part, batches=batches).rows for part in (fill, period, drain)]
    extent = written("", "", batches=batches)
    return PeriodicProgram(extent=extent, fill=rows[0], period=rows[1], drain=rows[2], num_microbatches=1)
