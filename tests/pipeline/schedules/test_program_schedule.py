"""Programs that somebody brings run for any number of batches, with their own rows, or are refused."""

import pickle

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError, check, check_periodic
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import PipelineSchedule, ProgramSchedule, Schedule
from tests.draws import draws
from tests.pipeline.brought_programs import FOLDED, RHYTHM, TORCH, WHOLE, hurried
from tests.pipeline.check.examples import with_row
from tests.pipeline.check.mutations import replacements
from tests.pipeline.made_up_programs import made_up

TEXTS = {"torch": TORCH, "whole": WHOLE, "rhythm": RHYTHM, "folded": FOLDED}


def streamed(schedule: PipelineSchedule, stretches: list[int], size: int) -> tuple[tuple[Instruction, ...], ...]:
    """The rows that a run executes which drains behind each of these numbers of batches."""
    stream = schedule.stream()
    rows: list[list[Instruction]] = [[] for _ in range(schedule.num_ranks)]
    for num_batches in stretches:
        for segment in [*(stream.start_batch(size) for _ in range(num_batches)), stream.drain()]:
            for row, more in zip(rows, segment, strict=True):
                row += more
    return tuple(map(tuple, rows))


def is_right(program: Program) -> bool:
    try:
        check(program)
    except ProgramError:
        return False
    return True


def computations(program: Program) -> list[list[str]]:
    return [[f"{each.stage}{each.kind.value}{each.microbatch}" for each in row if each.kind.is_computation
             and each.kind is not Kind.RECOMPUTE] for row in program.rows]  # fmt: skip


def built(schedule: PipelineSchedule, stretches: list[int], size: int) -> tuple[tuple[Instruction, ...], ...]:
    """The same, of programs of which each is proved by itself."""
    rows: list[list[Instruction]] = [[] for _ in range(schedule.num_ranks)]
    batch = 0
    for num_batches in stretches:
        program = schedule.build((size,) * num_batches, first_batch=batch, first_microbatch=batch * size)
        check(program)
        for row, more in zip(rows, program.rows, strict=True):
            row += more
        batch += num_batches
    return tuple(map(tuple, rows))


@pytest.mark.full
@draws(25)
@given(made_up(delays=(0, 1, 2)), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_any_order_runs_for_any_number_of_batches(program: Program, stretches: list[int]):
    """Whatever can run once can run on, drains included, and does in so many batches what it says."""
    schedule, size = ProgramSchedule.of(program), program.batches[0]
    assert streamed(schedule, stretches, size) == built(schedule, stretches, size)
    again = schedule.build(program.batches)
    assert computations(again) == computations(program)
    assert max(schedule.max_saved_on_rank(())) >= max(check(again).peak_saved_on_rank)


@draws(25)
@given(made_up(), st.integers(0, 5), st.integers(1, 7))
def test_complete_rows_are_executed_as_they_are(program: Program, places: int, num_batches: int):
    """Transfers, reductions and steps stay where the rows have them, receives for a batch to come among them."""
    complete = ProgramSchedule.of(program).build(program.batches)
    moved = hurried(complete, places)
    assume(is_right(moved))  # a STEP may wait for what another rank does later
    schedule, size = ProgramSchedule.of(moved), program.batches[0]
    assert schedule.build(program.batches).rows == moved.rows
    assert streamed(schedule, [num_batches, 2], size) == built(schedule, [num_batches, 2], size)


@pytest.mark.parametrize("name", TEXTS)
def test_a_run_behind_any_drain(name):
    """From a drained state at any batch on, rows differ from those at the beginning in their numbers alone."""
    schedule = ProgramSchedule.of(Program.from_csv(TEXTS[name]))
    for num_batches in range(1, 8):
        late = schedule.build((4,) * num_batches, first_batch=9, first_microbatch=50)
        check(late)
        assert computations(late) == [
            [word[:2] + str(int(word[2:]) + 50) for word in row]
            for row in computations(schedule.build((4,) * num_batches))
        ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["torch", "whole", "rhythm", pytest.param("folded", marks=pytest.mark.full)])
def test_every_single_mutation_that_breaks_a_program_is_refused(name):
    """Each instruction is dropped, doubled, re-versioned and exchanged with the next one. What the checker refuses is
    refused here with rank, position and reason; what it lets pass is another program, and goes on for ever.
    """
    complete = ProgramSchedule.of(Program.from_csv(TEXTS[name]))
    few = complete.program if len(complete.program.batches) < 4 else complete.build((4,) * 4)
    refused = passed = 0
    for rank, row in enumerate(few.rows):
        for at, each in enumerate(row[:-1]):
            changes = [*replacements(each), [row[at + 1], each]]
            for change in changes:
                width = 2 if len(change) == 2 and change[0] == row[at + 1] and change[1] == each else 1
                mutant = with_row(few, rank, [*row[:at], *change, *row[at + width :]])
                try:
                    check(mutant)
                except ProgramError:
                    with pytest.raises(ProgramError, match=r"rank [0-9], position [0-9]+"):
                        ProgramSchedule.of(mutant)
                    refused += 1
                    continue
                if passed % 5 == 0:
                    schedule = ProgramSchedule.of(mutant)
                    assert schedule.build(mutant.batches).rows == mutant.rows
                    assert streamed(schedule, [6], 4) == built(schedule, [6], 4)
                passed += 1
    assert refused > 100 and passed > 10


@pytest.mark.parametrize(("name", "size", "options"), [
    ("flush", 4, {"num_stages": 3}), ("gpipe", 3, {"num_stages": 2}), ("2bw", 4, {"num_stages": 3}),
    ("2bw", 8, {"num_stages": 4, "data_parallel": True, "tied_embeddings": True, "recompute": True}),
    ("interleaved", 4, {"num_stages": 4, "num_virtual_stages": 2}), ("bpipe", 8, {"num_stages": 4}),
    ("pipedream", 1, {"num_stages": 3}), ("2bw", 4, {"num_stages": 2, "predict": True}),
])  # fmt: skip
def test_the_tools_files_run_as_the_schedule_that_wrote_them(name, size, options):
    """A program of a preset is a program like others: in runs of any length each rank does the same."""
    schedule = Schedule.preset(name, **options)
    num_batches = 1 if schedule.weights.drains else 9 if name == "pipedream" else 4
    brought = ProgramSchedule.of(Program.from_csv(schedule.build((size,) * num_batches).to_csv()))
    first = num_batches - 1 if name == "pipedream" else 2  # of fewer, receives may stand elsewhere
    for count in range(first, 12):
        assert brought.build((size,) * count).rows == schedule.build((size,) * count).rows
    assert brought.report_lag <= schedule.report_lag
    assert brought.balance == schedule.balance and brought.recompute == schedule.recompute


@pytest.mark.parametrize("name", TEXTS)
def test_reports(name):
    """By the end of a segment every rank has stepped, and posted the norm of, each batch up to `report_lag` before."""
    schedule = ProgramSchedule.of(Program.from_csv(TEXTS[name]))
    for first_batch in (0, 5):
        stream, done = schedule.stream(first_batch=first_batch), [[first_batch, first_batch] for _ in range(2)]
        for batch in range(first_batch, first_batch + 12):
            for rank, row in enumerate(stream.start_batch(4)):
                for each in row:
                    if each.kind in (Kind.STEP, Kind.REDUCE_NORM):
                        done[rank][each.kind is Kind.STEP] = each.version
            if batch - schedule.report_lag >= first_batch:
                assert min(map(min, done)) > batch - schedule.report_lag


def test_periods_of_several_batches():
    """The induction takes them as they are; a period with an instruction elsewhere is found out."""
    schedule = ProgramSchedule.of(Program.from_csv(RHYTHM))
    periodic = schedule.build_periodic(4)
    assert periodic.num_batches == 2
    check_periodic(periodic)
    assert periodic.unroll(3).rows == schedule.build((4,) * len(periodic.unroll(3).batches)).rows


def test_what_it_answers():
    """What the runtime, the planner and the trainer ask, read off the program."""
    schedule = ProgramSchedule.of(Program.from_csv(FOLDED), name="folded.csv")
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_virtual_stages) == (2, 4, 2)
    assert schedule.stages_of(0) == (1, 2) and schedule.evicting_ranks((4,)) == () and not schedule.balance
    assert schedule.accepts(4) and not schedule.accepts(5)
    with pytest.raises(ValueError, match=r"folded\.csv has batches of 4 microbatches, not 8"):
        schedule.validate(8)
    evaluation = schedule.build_evaluation(6, version=3)
    check(evaluation)
    assert {each.kind for row in evaluation.rows for each in row} == {Kind.FORWARD, Kind.SEND_F, Kind.RECV_F}


def test_both_kinds_answer_all_that_is_asked():
    """Whoever asks a schedule need not know what made it."""
    names = {**vars(PipelineSchedule), **PipelineSchedule.__annotations__}
    asked = {name for name in names if not name.startswith("_")}
    assert len(asked) > 30
    for schedule in (Schedule.preset("flush", num_stages=2), ProgramSchedule.of(Program.from_csv(TORCH))):
        assert not [name for name in asked if not hasattr(schedule, name)]


def test_it_goes_to_other_processes():
    """Also after it was used."""
    schedule = ProgramSchedule.of(Program.from_csv(RHYTHM), name="rhythm.csv")
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule and again.name == "rhythm.csv"
    assert again.build((4,) * 5).rows == schedule.build((4,) * 5).rows


def test_equal_programs_are_equal_schedules():
    """Whatever text or numbers they were written with; the hash is of what runs."""
    schedule = ProgramSchedule.of(Program.from_csv(TORCH))
    late = schedule.build((4,), first_batch=7, first_microbatch=30)
    again = ProgramSchedule.of(Program.from_csv(late.to_csv()))
    assert again == schedule and hash(again) == hash(schedule) and again.short_hash == schedule.sha256[:12]
    assert ProgramSchedule.of(Program.from_csv(schedule.program.to_csv().replace("0SEND_F0,", "0SEND_F0>1,"))) == again
    other = ProgramSchedule.of(Program.from_csv(WHOLE))
    assert other != schedule and "program=" not in repr(other)
