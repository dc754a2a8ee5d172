"""Programs whose stages are copies run for any number of batches, drain and evaluate, or are refused."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError, check, check_periodic
from megatron.pipeline.check.hardware_queues import prove_hardware_queues
from megatron.pipeline.placement.traffic import count_transfers
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import ProgramSchedule, read_schedule
from tests.draws import draws
from tests.pipeline.check.copied import bare_programs, bounds_of
from tests.pipeline.check.copies_oracle import Model
from tests.pipeline.check.oracle import verdict
from tests.pipeline.schedules.test_program_schedule import built, computations, streamed

LOST = """\
# weights: 2bw
# batches: 4 4 4 4
# copies: 0:0,2 0:1,3 1:0-3
0F0,0F2,0B0,0F4,0B2,0F6,0B4,0F8,0B6,0F10,0B8,0F12,0B10,0F14,0B12,0B14
1F1,1F3,1B1,1F5,1B3,1F7,1B5,1F9,1B7,1F11,1B9,1F13,1B11,1F15,1B13,1B15
2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3,2F4,2B4,2F5,2B5,2F6,2B6,2F7,2B7,2F8,2B8,2F9,2B9,2F10,2B10,2F11,2B11,2F12,2B12,\
2F13,2B13,2F14,2B14,2F15,2B15
"""
"""Two replicas of two stages under 2bw; the second rank of one replica is lost, and batches overlap."""


def test_batches_that_overlap_go_on_for_ever():
    """Behind a batch of fill each is alike, and no number of batches, nor any drain, makes another model."""
    schedule = ProgramSchedule.of(Program.from_csv(LOST))
    assert (schedule.repetition.num_fill, schedule.repetition.num_period) == (1, 1)
    assert not schedule.drains_between_periods
    for first_batch in (0, 7):
        for num_batches in range(1, 7):
            program = schedule.build((4,) * num_batches, first_batch=first_batch, first_microbatch=4 * first_batch)
            assert verdict(program, bounds_of(program)) == ""
    assert streamed(schedule, [5, 1, 3], 4) == built(schedule, [5, 1, 3], 4)
    check_periodic(schedule.build_periodic(4), max_saved=schedule.max_saved_microbatches((4,) * 6))


def test_a_period_that_another_copy_computes_is_refused():
    """Rows that are right for their batches, where the copies take another order in the third one."""
    text = LOST.replace("1F9,1B7,1F11,1B9,1F13,1B11,1F15", "1B7,1F9,1F11,1B9,1B11,1F13,1F15")
    program = Program.from_csv(text)
    check(program)
    with pytest.raises(ProgramError, match="the period does not repeat"):
        ProgramSchedule.of(program, fill=1, period=1)


@pytest.mark.full
@draws(40)
@given(bare_programs(equal=True), st.lists(st.integers(1, 4), min_size=1, max_size=2))
def test_any_order_runs_for_any_number_of_batches(program: Program, stretches: list[int]):
    """Whatever can run once can run on, drains included, and computes what one process computes."""
    schedule, size = ProgramSchedule.of(program), program.batches[0]
    assert streamed(schedule, stretches, size) == built(schedule, stretches, size)
    again = schedule.build(program.batches)
    renumbered = schedule.build(
        program.batches, first_batch=program.first_batch, first_microbatch=program.first_microbatch
    )
    assert computations(renumbered) == computations(program)
    assert verdict(again, bounds_of(again)) == ""
    assert ProgramSchedule.of(Program.from_csv(schedule.program.to_csv())) == schedule


@draws(60)
@given(bare_programs(most_batches=1), st.integers(1, 15), st.integers(0, 30))
def test_an_evaluation_of_any_size_goes_through_the_copies_that_take_it(program: Program, size: int, first: int):
    """Each microbatch once through each stage of the model, as positions say; a copy may have nothing to do."""
    schedule = ProgramSchedule.of(program)
    evaluation = schedule.build_evaluation(size, version=5, first_microbatch=first)
    assert check(evaluation).num_microbatches == size
    model, found = Model(evaluation), Counter()
    for each in (each for row in evaluation.rows for each in row if each.kind is Kind.FORWARD):
        assert model.holder(model.stage_of[each.stage], each.microbatch) == each.stage and each.version == 5
        found[model.stage_of[each.stage], each.microbatch] += 1
    assert found == {(stage, first + at): 1 for stage in range(model.num_stages) for at in range(size)}
    assert Program.from_csv(evaluation.to_csv()) == evaluation


def test_batches_that_differ_are_refused():
    """The error names the first microbatch of the other size on the rank that takes it."""
    text = "# batches: 2 3\n# copies: 0:1 0:0\n0F1,0B1,0F3,0B3\n1F0,1B0,1F2,1B2,1F4,1B4\n"
    with pytest.raises(ProgramError, match="batches of 2 3 microbatches differ in size") as caught:
        ProgramSchedule.of(Program.from_csv(text))
    assert str(caught.value.instruction) == "1F2@1"


def test_what_is_for_one_replica_refuses_copies(tmp_path):
    """A file for a run, launches on hardware queues, and traffic between neighbours."""
    path = tmp_path / "lost.csv"
    path.write_text(LOST)
    with pytest.raises(ValueError, match=r"lost.csv: its stages are copies \(# copies: ...\), and a file is for one"):
        read_schedule(path)
    schedule = ProgramSchedule.of(Program.from_csv(LOST))
    with pytest.raises(ValueError, match="the stages of this program are copies; prove the program of one replica"):
        prove_hardware_queues(schedule.program, num_queues=8)
    with pytest.raises(ValueError, match="place the schedule of one replica"):
        count_transfers(schedule, 4)


@pytest.mark.parametrize("weights", ["flush", "2bw"])
def test_tied_embeddings_are_shared_by_all_copies(weights):
    """Of the first and the last stage of the model, on all ranks that hold one; by no rank that holds both."""
    text = LOST.replace("# weights: 2bw", f"# weights: {weights}\n# tied_embeddings: yes")
    if weights == "flush":
        text = "# copies: 0:0,2 0:1,3 1:0-3\n# tied_embeddings: yes\n0F0,0F2,0B0,0B2\n1F1,1F3,1B1,1B3\n" + ",".join(
            f"2F{each},2B{each}" for each in range(4)
        )
    schedule = ProgramSchedule.of(Program.from_csv(text))
    assert schedule.tied_stages == (0, 1, 2) and schedule.ties_ranks
    posted = [sum(each.kind is Kind.REDUCE_EMBED for each in row) for row in schedule.program.rows]
    assert posted == [len(schedule.program.batches)] * 3
    folded = (
        "# copies: 0:0 0:1 1:0 1:1\n# rank_of_stage: 0 1 0 1\n# tied_embeddings: yes\n0F0,2F0,2B0,0B0\n1F1,3F1,3B1,1B1"
    )
    both = ProgramSchedule.of(Program.from_csv(folded))
    assert not both.ties_ranks
    assert not any(each.kind is Kind.REDUCE_EMBED for row in both.program.rows for each in row)


def test_copies_of_a_frozen_stage_have_forwards_alone():
    """Two copies of a frozen stage in front: no backwards, no reduction, and any number of batches behind it."""
    text = """\
# edges: 0>2:F 1>2:F 2>3 2>4
# copies: 0:0,2 0:1,3 1:0-3 2:0,1 2:2,3
0F0,0F2
1F1,1F3
2F0,2F1,2B0,2F2,2B1,2F3,2B2,2B3
3F0,3B0,3F1,3B1
4F2,4B2,4F3,4B3
"""
    schedule = ProgramSchedule.of(Program.from_csv(text))
    assert schedule.num_frozen == 2
    reduced = [any(each.kind is Kind.REDUCE_GRAD for each in row) for row in schedule.program.rows]
    assert reduced == [False, False, True, True, True]
    assert streamed(schedule, [3, 1], 4) == built(schedule, [3, 1], 4)
    check(schedule.build_evaluation(7, version=1))
