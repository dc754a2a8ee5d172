"""How rows go on is found where it can be, as the file means it, and else refused with rank, position and reason."""

import re

import pytest

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import ProgramSchedule, Schedule
from megatron.pipeline.schedules.continuation import Repetition
from tests.pipeline.brought_programs import FOLDED, RHYTHM, TORCH

TWO_BW = "# weights: 2bw\n"
AB = "0F{0},0F{1},0B{0},0B{1},"
BA = "0F{0},0B{0},0F{1},0B{1},"


def repetition(text: str, **given: int) -> Repetition:
    return ProgramSchedule.of(Program.from_csv(text), **given).repetition


def batches(*orders: str) -> str:
    """One rank, batches of two, each in one of these orders, drained behind each."""
    row = "".join(order.format(2 * index, 2 * index + 1) for index, order in enumerate(orders))
    return f"# batches: {'2 ' * len(orders)}\n{row}\n"


@pytest.mark.parametrize(("text", "found"), [
    (TORCH, (0, 1)),
    (FOLDED, (1, 1)),
    (RHYTHM, (1, 2)),
    (batches(AB), (0, 1)),
    (batches(AB, AB), (0, 1)),
    (batches(AB, BA), (0, 2)),
    (batches(AB, BA, AB), (0, 2)),
    (batches(AB, BA, BA), (1, 1)),
    (batches(AB, BA, AB, BA, AB), (0, 2)),
    (batches(AB, AB, BA, AB, AB, BA), (0, 3)),
])  # fmt: skip
def test_the_shortest_that_leads_to_the_end_is_found(text, found):
    """Parts that alternate are a period of two and not of one, whatever could repeat besides."""
    assert repetition(text) == Repetition(*found)


def test_what_is_given_counts():
    """A file may mean less than its rows show; what it says is proved like what is found."""
    text = batches(AB, BA, AB, BA)
    assert repetition(text, fill=1, period=1) == Repetition(1, 1)
    assert repetition(text, period=4) == Repetition(0, 4)
    schedule = ProgramSchedule.of(Program.from_csv(text), fill=1, period=1)
    assert [each.kind.value for each in schedule.build((2,) * 3).rows[0] if each.kind.is_computation] == list(
        "FFBBFBFBFBFB"
    )


@pytest.mark.parametrize(("given", "reason"), [
    ({"fill": 0, "period": 1}, "with a fill of 0 and a period of 1 batches, as given, the period does not repeat"),
    ({"fill": 2, "period": 4}, "a fill of 2 and a period of 4 batches are more than the 5 of the rows"),
])  # fmt: skip
def test_what_is_given_and_does_not_repeat_is_refused(given, reason):
    """With rank, position and instruction where it is the rows that do not."""
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        ProgramSchedule.of(Program.from_csv(FOLDED), **given)
    if given["fill"] == 0:
        error = caught.value
        assert isinstance(error, ProgramError) and f"rank {error.rank}, position {error.position}" in str(error)


def test_a_program_without_a_steady_state_drains():
    """Two batches of 2bw show none: they run as they are, two and two, and the schedule says so."""
    program = Schedule.preset("2bw", num_stages=2).build((4, 4))
    schedule = ProgramSchedule.of(program)
    assert schedule.repetition == Repetition(0, 2) and schedule.drains_between_periods
    assert not ProgramSchedule.of(Program.from_csv(FOLDED)).drains_between_periods
    assert not ProgramSchedule.of(Program.from_csv(batches(AB, BA))).drains_between_periods
    whole = schedule.build((4,) * 6)
    check(whole)
    assert schedule.build((4, 4)).rows == program.rows


def test_predictions_that_do_not_begin_alike_are_refused():
    """Where a prediction for the batch that follows stands in the drain, two programs do not join: that is said."""
    program = Schedule.preset("2bw", num_stages=2, predict=True).build((4,) * 4)
    cut = Program.of(program, tuple(
        tuple(each for each in row if not (each.kind is Kind.PREDICT and each.version == 2)) for row in program.rows
    ))  # fmt: skip
    with pytest.raises(ProgramError, match="PREDICT@2"):
        ProgramSchedule.of(cut)


def test_batches_that_differ_are_refused():
    """Rows of batches of several sizes say nothing of a run of any number of them."""
    program = Schedule.preset("flush", num_stages=2).build((4, 6))
    with pytest.raises(ProgramError, match="batches of 4 6 microbatches differ in size") as caught:
        ProgramSchedule.of(program)
    assert str(caught.value.instruction) == "0F4@1"


def test_the_files_own_end():
    """A run that stops where the file does ends with the file's rows, other than any before; one that stops within the
    fill, with what is left.
    """
    row = "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0F4,0F5,0B3,0B4,0B5\n"  # would go on with F4 B3 F5 B4
    schedule = ProgramSchedule.of(Program.from_csv(f"{TWO_BW}# batches: 2 2 2\n{row}"))
    assert schedule.repetition == Repetition(1, 1)
    ways = [
        "".join(each.kind.value for each in schedule.build((2,) * count).rows[0] if each.kind.is_computation)
        for count in (1, 2, 3, 4)
    ]
    assert ways == ["FFBB", "FFBFFBBB", "FFBFBFBFFBBB", "FFBFBFBFBFBFFBBB"]
    stream = schedule.stream()
    assert [each.kind.value for each in stream.start_batch(2)[0] if each.kind.is_computation] == list("FFB")
    kinds = [each.kind.value for each in stream.start_batch(2)[0] if each.kind.is_computation]
    assert kinds == ["F"], "behind F2 a run that goes on differs from one that ends"
