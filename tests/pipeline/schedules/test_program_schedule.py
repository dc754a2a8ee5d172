"""Programs that somebody brings run for any number of batches, with their own rows, or are refused."""

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.program_schedule import ProgramSchedule
from tests.pipeline.made_up_programs import made_up

SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}


def made(program: Program) -> ProgramSchedule | None:
    """The schedule, or None where no fill and period were found."""
    try:
        return ProgramSchedule.of(program)
    except ProgramError as error:
        assert "does not repeat" in str(error), error
        return None


def run(schedule: ProgramSchedule, stretches: list[int]) -> tuple[list[list], ProgramSchedule]:
    stream = schedule.stream()
    rows: list[list] = [[] for _ in range(schedule.num_ranks)]
    for num_batches in stretches:
        for rows_of_segment in [
            *(stream.start_batch(schedule.num_microbatches) for _ in range(num_batches)),
            stream.drain(),
        ]:
            for row, more in zip(rows, rows_of_segment, strict=True):
                row += more
    return rows, stream


@settings(max_examples=60, **SLOW)
@given(made_up(), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_any_order_runs_any_number_of_batches(program: Program, stretches: list[int]):
    """What a stream gives, drains included, is one proved program after another; the file's own rows among them."""
    schedule = made(program)
    assume(schedule)
    rows, _ = run(schedule, stretches)
    expected: list[list] = [[] for _ in rows]
    batch = 0
    for num_batches in stretches:
        whole = schedule.build(
            (schedule.num_microbatches,) * num_batches,
            first_batch=batch,
            first_microbatch=batch * schedule.num_microbatches,
        )
        check(whole)
        for row, more in zip(expected, whole.rows, strict=True):
            row += more
        batch += num_batches
    assert rows == expected


@settings(max_examples=60, **SLOW)
@given(made_up())
def test_flush(program: Program):
    again = made(program)
    if program.weights.drains:
        assert again
