"""Inputs that are stashed on the host: what is built is proved, what is broken is rejected, few are on the device."""

from dataclasses import replace

import pytest
from hypothesis import given

from megatron.pipeline.check import ProgramError, check, check_periodic
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.lane_order import Residency, most_boundaries
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from tests.draws import draws
from tests.pipeline.check.examples import with_row, written
from tests.pipeline.check.hosted import both_verdicts, hosted, hosted_cases


@draws(12)
@given(hosted_cases(max_ranks=4, max_virtual=5, max_microbatches=5, stash="host"))
def test_what_is_built_is_right(case: tuple[Schedule, Program]):
    """By the oracle and by the checker, for every number of batches; each rank has few boundaries on the device."""
    schedule, program = case
    assert not both_verdicts(program, None)
    batches = program.batches
    bounds = {
        "max_saved": schedule.max_saved_microbatches(batches),
        "max_saved_on_rank": schedule.max_saved_on_rank(batches),
    }
    report = check(program, **bounds)
    assert max(report.peak_boundaries_on_rank) <= most_boundaries(max(batches))
    check_periodic(schedule.build_periodic(batches[0]))
    assert Program.from_csv(program.to_csv()) == program


@pytest.mark.parametrize("m", [1, 2, 5])
def test_boundaries_do_not_grow_with_depth(m: int):
    """On one rank m and three, from a few stages on; with a stash on the device all inputs of all stages."""
    for v in (4, 9, 30):
        assert check(hosted(1, v, stash="host").build((m, m))).peak_boundaries_on_rank == (m + 3,)
        assert check(hosted(1, v).build((m, m))).peak_boundaries_on_rank == ((v - 1) * m + 1,)


def test_only_what_has_to_wait_moves():
    """Not tokens, not the inputs of the run that turns around, and nothing that would come back before it has left."""
    assert check(hosted(1, 5, stash="host").build((3,))).offloaded_microbatches == (0, 3, 3, 3, 0)
    assert check(hosted(2, 3, stash="host").build((4,))).offloaded_microbatches == (0, 4, 4, 4, 0, 0)
    assert check(hosted(1, 5, stash="host").build((1,))).offloaded_microbatches == (0, 1, 1, 0, 0)


ROW = (
    "0FETCH@0 1FETCH@0 0F0@0 0F1@0 0FREE@0 2FETCH@0 1F0@0 1OFFLOAD0 1F1@0 1OFFLOAD1 2F0@0 2B0@0 1RELOAD0 2F1@0 "
    "1RELOAD1 2B1@0 2STORE_GRAD@1 2UPDATE@1 2FREE@0 0FETCH@0 1R0@0 1B0@0 1R1@0 1B1@0 1STORE_GRAD@1 1UPDATE@1 1FREE@0 "
    "0R0@0 0B0@0 0R1@0 0B1@0 0STORE_GRAD@1 0UPDATE@1 0REDUCE_NORM@1 0FREE@0 0STEP@1"
)


def one_rank(row: str, *, stash: str = "host") -> Program:
    facts = {"rank_of_stage": (0, 0, 0), "recompute": True, "not_recomputed": (2,), "batches": (2,)}
    return written(row, residency=Residency(2, "eager", stash), **facts)


def test_the_row_is_what_is_built():
    """And right."""
    program = hosted(1, 3, update="eager", stash="host").build((2,))
    assert program.rows == one_rank(ROW).rows
    check(program)


@pytest.mark.parametrize(
    ("old", "new", "word", "reason"),
    [
        (" 1RELOAD0", "", "1R0@0", "its input is on the host, and no RELOAD stands before it"),
        (" 1OFFLOAD0", "", "1RELOAD0", "its input is on the device and has never left"),
        ("1F0@0 1OFFLOAD0", "1OFFLOAD0 1F0@0", "1OFFLOAD0", "its forward has not run, so there is no input"),
        ("1R0@0 1B0@0", "1R0@0 1B0@0 1RELOAD0", "1RELOAD0", "its input has been used already"),
        ("1RELOAD0", "1RELOAD0 1RELOAD0", "1RELOAD0", "its input has left and come back already"),
        ("1OFFLOAD0", "1OFFLOAD0 1OFFLOAD0", "1OFFLOAD0", "its input is on the host, and no RELOAD stands before it"),
        ("1RELOAD0", "1RELOAD1", "1RELOAD1", "its input has left and come back already"),
        ("1RELOAD0", "1RELOAD0 1OFFLOAD0", "1OFFLOAD0", "its input has left and come back already"),
        ("1R0@0 1B0@0", "1R0@0 1OFFLOAD0 1B0@0", "1OFFLOAD0", "its input has been used already"),
        ("1OFFLOAD0", "1OFFLOAD1", "1OFFLOAD1", "its forward has not run, so there is no input"),
        ("1OFFLOAD0", "2OFFLOAD0", "2OFFLOAD0",
         "the stage does not recompute, so the graph of its forward refers to the input"),
        ("0F0@0", "0F0@0 0OFFLOAD0", "0OFFLOAD0", "the input of the first stage is data"),
    ],
)  # fmt: skip
def test_reasons(old: str, new: str, word: str, reason: str):
    """One change to the row, and what is said of it."""
    row = ROW.replace(old, new, 1)
    with pytest.raises(ProgramError) as caught:
        check(one_rank(row))
    assert (str(caught.value.instruction), caught.value.reason) == (word, reason)
    assert row.split()[caught.value.position] == word


def test_words_that_the_program_does_not_speak_of():
    """A stash on the device has none of the words; one program moves activations to a pair, or inputs to the host."""
    with pytest.raises(ProgramError, match="the inputs of this program wait on the device: its residency does not say"):
        check(one_rank(ROW, stash="device"))
    with pytest.raises(ProgramError, match="the weights of this program live on the device: it says no residency"):
        check(written("0F0 0OFFLOAD0 0RELOAD0 0B0"))
    with pytest.raises(ProgramError, match="a program that evaluates has forwards only"):
        check(with_row(evaluation := hosted(1, 3, stash="host").build_evaluation(1, version=0), 0,
                       [*evaluation.rows[0], Instruction.parse("1OFFLOAD0")]))  # fmt: skip
    rows = ["0FETCH@0 0F0@0 0EVICT0 0LOAD0 0R0@0 0B0@0 0STORE_GRAD@1 0UPDATE@1 0REDUCE_NORM@1 0FREE@0 0STEP@1",
            "1ACCEPT0 1FETCH@0 1F0@0 1OFFLOAD0 1RELOAD0 1R0@0 1B0@0 1STORE_GRAD@1 1UPDATE@1 1REDUCE_NORM@1 1FREE@0 "
            "1RETURN0 1STEP@1"]  # fmt: skip
    mixed = written(*rows, recompute=True, residency=Residency(2, "eager", "host"))
    with pytest.raises(ProgramError, match="activations move to the host or to a pair stage, and this program does"):
        check(mixed)


def test_an_input_that_stays_is_one_too_many():
    """Each OFFLOAD that a rank waits longer for than for its last stage is needed for the bound."""
    program = hosted(1, 6, stash="host").build((3,))
    for word in (each for each in program.rows[0] if each.kind is Kind.OFFLOAD and each.stage < 4):
        left = {word, replace(word, kind=Kind.RELOAD)}
        with pytest.raises(
            ProgramError, match="7 tensors between stages may be on the device then, and 6 are the most"
        ):
            check(with_row(program, 0, [each for each in program.rows[0] if each not in left]))
