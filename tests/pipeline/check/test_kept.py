"""Stages that recompute some microbatches of each batch and keep the others."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError, check, check_periodic
from megatron.pipeline.program.extent import Kept
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import read_schedule
from megatron.pipeline.simulate import Costs, simulate
from megatron.planner.memory.demand import Moment
from megatron.planner.memory.schedule_demand import demand_of
from tests.draws import draws
from tests.pipeline.brought_programs import KEPT, KEPT_AND_EVICTIONS
from tests.pipeline.check.examples import written
from tests.pipeline.check.moves_oracle import most_held
from tests.pipeline.check.mutations import assert_judged
from tests.pipeline.check.oracle import verdict

FIRST = "0F0 0F1 0F2 0B0 0R1 0B1 0B2"
LAST = "1F0 1B0 1F1 1B1 1F2 1B2"
FACTS = {"recompute": True, "not_recomputed": (1,), "kept": (Kept(0, 0), Kept(0, 2)), "batches": (3,)}


def test_the_smallest_program():
    """A kept microbatch needs no recompute; the numbers say what is held whole."""
    program = written(FIRST, LAST, **FACTS)
    report = check(program)
    assert (report.peak_saved_microbatches, report.peak_recomputed_microbatches) == ((3, 1), (1, 0))
    demand = demand_of(program, report)
    assert demand.recomputed_microbatches == (1, 0)
    assert demand.moments == ((Moment((2,), (0,), (1,), (1,)), Moment((3,), (0,), (0,), (2,))), (Moment((1,), (0,)),))
    assert simulate(program, Costs(forward=1.0, backward=2.0, recompute=5.0)).busy(0) == 3 * (1 + 2) + 5
    assert Program.from_csv(program.to_csv()) == program


@pytest.mark.parametrize(
    ("first", "position", "reason"),
    [
        (FIRST.replace("0R1 ", ""), 4, "its activations have not been recomputed"),
        (FIRST.replace("0B0", "0R0 0B0"), 3, "the program keeps this microbatch"),
        (FIRST.replace("0R1", "0R1 0R1"), 5, "it was recomputed already"),
        (FIRST.replace("0B2", "0R2 0B2"), 6, "the program keeps this microbatch"),
    ],
)
def test_reasons(first: str, position: int, reason: str):
    """Each rule is named at the instruction that breaks it."""
    with pytest.raises(ProgramError, match=reason) as caught:
        check(written(first, LAST, **FACTS))
    assert (caught.value.rank, caught.value.position) == (0, position)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("# kept: 0.4", "0.4 is no microbatch of a stage that recomputes"),
        ("# kept: 1.0", "1.0 is no microbatch of a stage that recomputes"),
        ("# kept: 2.0", "2.0 is no microbatch of a stage that recomputes"),
        ("# kept: 3", "no stage and position in a batch, such as 0.3"),
    ],
)
def test_a_file_names_microbatches_that_are_there(line: str, reason: str):
    """Stage 1 recomputes nothing, and a batch has four microbatches."""
    with pytest.raises(ValueError, match=reason):
        read_schedule("file", text=KEPT.replace("# kept: 0.0 0.2", line))


MOVES = "0F0 0F1 0F2 0SWAP_OUT2 0B0 0R1 0B1 0SWAP_IN2 0B2"


def test_what_is_kept_may_move():
    """Where some are recomputed, what moves has one size: that of what is kept. The report counts microbatches."""
    program = written(MOVES, LAST, **FACTS)
    report = check(program)
    assert (report.swapped_microbatches, report.peak_on_host, report.peak_saved_microbatches[0]) == ((1, 0), (1, 0), 3)
    assert Program.from_csv(program.to_csv()) == program
    demand = demand_of(program, report)
    assert demand.recomputed_microbatches == (1, 0)
    assert max(moment.saved[0] for moment in demand.moments[0]) == 3
    assert max(moment.kept[0] for moment in demand.moments[0]) == 2


@pytest.mark.parametrize(
    ("first", "position", "reason"),
    [
        (MOVES.replace("0SWAP_OUT2", "0SWAP_OUT1"), 3, "only those may move"),
        (MOVES.replace("0F2 0SWAP_OUT2", "0SWAP_OUT0 0F2"), 2, "nothing can leave a stage before its second forward"),
    ],
)
def test_reasons_of_moves(first: str, position: int, reason: str):
    """One that is recomputed stays, and tells nothing of what the others share."""
    with pytest.raises(ProgramError, match=reason) as caught:
        check(written(first, LAST, **FACTS))
    assert (caught.value.rank, caught.value.position) == (0, position)


def test_every_timing_of_a_pair_holds_what_the_checker_says():
    """Some are recomputed, and some wait on the last rank."""
    program = Program.from_csv(KEPT_AND_EVICTIONS)
    report = check(program)
    assert report.evicted_microbatches == (2, 0)
    assert most_held(program, 0) == report.peak_saved_on_rank


def test_with_weights_on_the_host_a_stage_recomputes_all_or_none():
    """Its inputs wait there."""
    text = "# weights: flush\n" + KEPT.replace("0F0,", "0FETCH@0,0F0,", 1)
    with pytest.raises(ValueError, match="or keep weights on the device"):
        read_schedule("file", text=text)


def test_a_file_holds_for_any_number_of_batches():
    """The positions count in each batch, not in the run."""
    schedule = read_schedule("file", text=KEPT)
    program = schedule.build((4, 4, 4))
    recomputed = [each.microbatch for each in program.rows[0] if each.kind is Kind.RECOMPUTE]
    assert recomputed == [1, 3, 5, 7, 9, 11]
    check_periodic(schedule.build_periodic(4))
    assert schedule.keeps(0) == {0, 2} and not schedule.keeps(1)


CHOICES = st.frozensets(st.sampled_from([Kept(stage, at) for stage in range(2) for at in range(4)]))


@given(CHOICES, CHOICES, st.booleans())
@draws(40)
def test_any_choice_is_judged_as_the_oracle_judges_it(kept: frozenset[Kept], other: frozenset[Kept], says_other: bool):
    """The rows of one choice are right under this choice, and under another one wrong."""
    said = " ".join(map(str, sorted(kept)))
    text = KEPT.replace("# not_recomputed: 1\n", "").replace("0.0 0.2", said)
    program = read_schedule("file", text=text).build((4, 4))
    if says_other:
        program = replace(program, kept=tuple(other))
    wrong = verdict(program, [4, 4])
    assert bool(wrong) == (says_other and other != kept)
    assert_judged(program, [4, 4], wrong, "")
