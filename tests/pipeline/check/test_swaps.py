"""Activations that wait on the host: what is wrong is rejected, and what is held holds at any speed and for any run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError, check, check_periodic
from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.program import PeriodicProgram, Program
from megatron.pipeline.schedules.program_schedule import ProgramSchedule
from megatron.pipeline.simulate import Costs, simulate
from tests.draws import draws
from tests.pipeline.check.examples import written

FIRST = "0F0 0F1 0SWAP_OUT0 0F2 0B1 0SWAP_IN0 0B2 0B0"
LAST = "1F0 1F1 1F2 1B1 1B2 1B0"


def rejected(first: str, last: str = LAST, **fields: object) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        check(written(first, last, batches=(3,), **fields))
    return caught.value


def test_the_smallest_program():
    """The report says what leaves, and what the host holds. The forward behind the copy does not wait for it yet."""
    report = check(written(FIRST, LAST, batches=(3,)))
    assert (report.swapped_microbatches, report.peak_on_host) == ((1, 0), (1, 0))
    assert report.peak_saved_microbatches == (3, 3)
    free = check(written(FIRST.replace("0F2 0B1", "0B1 0F2"), "1F0 1F1 1B1 1F2 1B2 1B0", batches=(3,)))
    assert free.peak_saved_microbatches == (2, 2), "F2 waits for the copy before B1"
    assert check(written("0F0 0B0", "1F0 1B0")).peak_on_host == (0, 0)
    assert Program.from_csv(written(FIRST, LAST, batches=(3,)).to_csv()).rows[0][2] == Instruction.parse("0SWAP_OUT0")


@pytest.mark.parametrize(
    ("first", "position", "reason"),
    [
        (FIRST.replace("0F1 0SWAP_OUT0", "0SWAP_OUT0 0F1"), 1, "nothing can leave a stage before its second forward"),
        (FIRST.replace("0SWAP_OUT0", "0SWAP_OUT2"), 2, "its activations are not here"),
        (FIRST.replace("0SWAP_IN0 ", ""), 6, "on the host, and no SWAP_IN stands before it"),
        (FIRST.replace("0SWAP_OUT0 ", ""), 4, "its activations are here and have never left"),
        (FIRST.replace("0SWAP_OUT0", "0SWAP_OUT0 0SWAP_OUT0"), 3, "its activations are on the host"),
        (FIRST.replace("0SWAP_IN0", "0SWAP_IN0 0SWAP_IN0"), 6, "left and come back already"),
        (FIRST + " 0SWAP_OUT1", 8, "have been used already"),
        (FIRST.replace("0SWAP_OUT0", "0SWAP_OUT5"), 2, "there is no microbatch 5"),
        (FIRST.replace("0SWAP_OUT0", "0SWAP_OUT0 0EVICT1"), 2, "to the host or to a pair stage, and this program does"),
    ],
)
def test_reasons(first: str, position: int, reason: str):
    """Each rule is named at the instruction that breaks it."""
    error = rejected(first, LAST + " 1ACCEPT1 1RETURN1" * ("EVICT" in first))
    assert (error.rank, error.position) == (0, position)
    assert reason in error.reason


def test_where_weights_live_on_the_host_inputs_wait_there():
    """Such programs have words of their own for that."""
    row = "0FETCH@0 0F0@0 0F1@0 0SWAP_OUT0 0B1@0 0SWAP_IN0 0B0@0 0FREE@0 0STORE_GRAD@1 0UPDATE@1 0REDUCE_NORM@1 0STEP@1"
    with pytest.raises(ProgramError, match="OFFLOAD them instead"):
        check(written(row, batches=(2,), residency=Residency(2, "eager")))


def test_halves_and_recomputes_wait_for_what_comes_back():
    """I and R read what a microbatch saves, so both wait for its copy; W does not."""
    halves = FIRST.replace("0B0", "0I0 0W0")
    recomputed = " ".join(each.replace("B", "R") + " " + each if "B" in each else each for each in FIRST.split())
    last = " ".join(each.replace("B", "R") + " " + each if "B" in each else each for each in LAST.split())
    for first, other, kind in ((halves, LAST, "I"), (recomputed, last, "R"), (FIRST, LAST, "B")):
        program = written(first, other, batches=(3,), recompute=kind == "R")
        check(program)
        timeline = simulate(program, Costs(swap_out=5, swap_in=50))
        row = list(zip(timeline.rows[0], timeline.starts[0], timeline.ends[0], strict=True))
        at = {str(each): (start, end) for each, start, end in row}
        assert at["0SWAP_OUT0"] == (2, 7), "behind its request, beside the computations"
        assert at["0SWAP_IN0"][1] - at["0SWAP_IN0"][0] == 50
        assert at[f"0{kind}0"][0] == at["0SWAP_IN0"][1]
        early = program.with_rows(
            (tuple(each for each in program.rows[0] if each.kind.value != "SWAP_IN"), *program.rows[1:])
        )
        with pytest.raises(ProgramError, match="no SWAP_IN stands before it") as caught:
            check(early)
        assert str(caught.value.instruction) == f"0{kind}0"


@draws(40)
@given(st.data())
def test_what_is_held_holds_at_any_speed(data):
    """Under any costs no more is saved at once than the report says, and with slow copies that much is."""
    m = data.draw(st.integers(3, 7))
    row, held, away = ["0F0", "0F1"], {0, 1}, set()
    forwards, backwards = list(range(2, m)), set(range(m))
    while backwards:
        choices = [f"0F{forwards[0]}"] if forwards else []
        choices += [f"0B{each}" for each in held] + [f"0SWAP_IN{each}" for each in away]
        choices += [f"0SWAP_OUT{each}" for each in held if f"0SWAP_OUT{each}" not in row]
        word = data.draw(st.sampled_from(sorted(choices)))
        row.append(word)
        each = Instruction.parse(word)
        {"F": held.add, "B": held.discard, "SWAP_IN": held.add, "SWAP_OUT": held.discard}[each.kind.value](
            each.microbatch
        )
        {"SWAP_IN": away.discard, "SWAP_OUT": away.add}.get(each.kind.value, lambda _: None)(each.microbatch)
        if each.kind.value == "F":
            forwards.pop(0)
        elif each.kind.value == "B":
            backwards.discard(each.microbatch)
    program = written(" ".join(row), batches=(m,))
    (most,) = check(program).peak_saved_microbatches
    for out, back in ((0, 0), (0.5, 0.5), (3, 3), (100, 0), (100, 0.5), (0.5, 100)):
        assert simulate(program, Costs(swap_out=out, swap_in=back)).peak_saved_microbatches(0) <= most


TWO_BW = """# weights: 2bw
# batches: 2 2 2 2
0F0,0F1,0B0,0SWAP_OUT1,0F2,0SWAP_IN1,0B1,0F3,0B2,0SWAP_OUT3,0F4,0SWAP_IN3,0B3,0F5,0B4,0SWAP_OUT5,0F6,0SWAP_IN5,0B5,\
0F7,0B6,0B7
1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,1F4,1B4,1F5,1B5,1F6,1B6,1F7,1B7
"""


def test_a_file_runs_for_any_number_of_batches():
    """Fill and period are found, and every number of batches holds as much."""
    schedule = ProgramSchedule.of(Program.from_csv(TWO_BW))
    assert schedule.swaps and (schedule.repetition.num_fill, schedule.repetition.num_period) == (1, 1)
    assert schedule.max_saved_microbatches((2, 2)) == (2, 1)
    for num_batches in (3, 5, 8):
        report = check(
            schedule.build((2,) * num_batches), max_saved=schedule.max_saved_microbatches((2,) * num_batches)
        )
        assert report.swapped_microbatches == (num_batches - 1, 0)


def test_a_drained_end_is_like_the_start():
    """Also where no forward has waited for the last copies to the host."""
    text = "# weights: flush\n# batches: 2\n0F0,0F1,0SWAP_OUT0,0B1,0SWAP_IN0,0B0\n1F0,1F1,1B1,1B0\n"
    assert ProgramSchedule.of(Program.from_csv(text)).max_saved_microbatches((2,)) == (2, 2)


@pytest.mark.parametrize(
    ("period", "drain", "reason"),
    [
        ("0SWAP_IN0 0B0 0F2 0SWAP_OUT2", "0B0 0SWAP_IN1 0B1", "what waits on the host"),
        ("0SWAP_IN0 0B0 0F2 0SWAP_OUT1 0SWAP_IN1", "0B0 0B1", "how many microbatches stage 0 has in flight"),
        ("0SWAP_IN0 0B0 0SWAP_OUT1 0F2", "0SWAP_IN0 0B0 0B1", "which copies to and from the host are still awaited"),
    ],
)
def test_a_period_that_ends_otherwise_is_rejected(period: str, drain: str, reason: str):
    """With another microbatch away, with none, or with a copy of which the next forward knows less."""
    rows = [written(row, batches=(2,)).rows for row in ("0F0 0F1 0SWAP_OUT0", period, drain)]
    extent = written("", batches=(2,))
    periodic = PeriodicProgram(extent=extent, fill=rows[0], period=rows[1], drain=rows[2], num_microbatches=1)
    check(periodic.unroll(1))
    with pytest.raises(ProgramError, match=reason):
        check_periodic(periodic)
