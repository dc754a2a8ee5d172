"""Programs as text: a round trip loses nothing, and whatever is not understood is an error with its place."""

import dataclasses
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import FLUSH, POLICIES
from megatron.pipeline.schedules import Schedule
from tests.draws import draws
from tests.pipeline.strategies import DELAYED, Run, runs, text

COMPUTE_ONLY = "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@draws(60)
@given(runs(max_stages=4))
def test_round_trip(run: Run):
    """What is written is read back as an equal program, facts and rows, policies that somebody registered included."""
    program = run.build()
    with mock.patch.dict(POLICIES, {policy.name: policy for policy in DELAYED}):
        assert Program.from_csv(program.to_csv()) == program


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 3))
def test_round_trip_of_an_evaluation(num_stages: int, num_microbatches: int, version: int):
    """Programs that evaluate survive the round trip, too."""
    program = Schedule.preset("2bw", num_stages=num_stages).build_evaluation(num_microbatches, version=version)
    assert Program.from_csv(program.to_csv()) == program


@draws(40)
@given(runs(max_stages=4))
def test_flags_follow_from_the_instructions(run: Run):
    """Without its lines of facts a program is read as the same one, given what its rows cannot say."""
    program = run.build()
    rows = "".join(line + "\n" for line in program.to_csv().splitlines() if not line.startswith("#"))
    given = {"weights": program.weights, "batches": program.batches, "first_batch": program.first_batch}
    if program.weights.predicts:
        given |= {"unread": program.unread, "provisional_microbatches": program.provisional_microbatches}
    if program.residency:  # and where no stage but the last is, nothing shows that the others recompute
        given |= {name: getattr(program, name) for name in ("residency", "recompute", "not_recomputed")}
    read = Program.from_csv(rows, **given)
    if not program.reduces_embeddings(0):  # it ties its embeddings within the rank, and no instruction shows it
        program = dataclasses.replace(program, tied_embeddings=False)
    assert read == program


def test_blank_cells_are_bubbles():
    """Without facts, as in torch's compute-only form: one batch, a stage lives where it stands, blanks are dropped."""
    program = Program.from_csv(COMPUTE_ONLY)
    assert [text(row) for row in program.rows] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert (program.batches, program.rank_of_stage, program.weights) == ((2,), (0, 1), FLUSH)
    check(program)


def test_batches_can_be_given():
    """What the text does not say, the caller may; None says nothing."""
    assert Program.from_csv(COMPUTE_ONLY, batches=(1, 1), weights=None).batches == (1, 1)


def test_comments_line_ends_and_quotes():
    """Other leading # lines are comments; Windows' line ends, blanks, quotes and blank lines at the end load."""
    program = Program.from_csv('# A note: of mine\r\n# batches: 1 1\r\n 0F0 ,"0F1",0B0\t,0B1\r\n\r\n\n')
    assert text(program.rows[0]) == "0F0 0F1 0B0 0B1"
    assert program.batches == (1, 1)


@pytest.mark.parametrize(
    ("csv", "message"),
    [
        ("0F0,0F1garbage\n", r"row 0 \(line 1\), column 2: '0F1garbage' is not an instruction"),
        ("# batches: 2\n0F0\n1F0,,1Z0\n", r"row 1 \(line 3\), column 3: '1Z0' is not an instruction"),
        ("0F0\n(1F0;1B1)OVERLAP_F_B\n", r"row 1 \(line 2\), column 1: .*torch's OVERLAP_F_B overlaps a forward"),
        ("0UNSHARD,0F0\n", r"row 0 \(line 1\), column 1: .*torch's UNSHARD gathers FSDP's parameters"),
        ("0F0,0B0,0REDUCE_NORM\n", r"row 0 \(line 1\), column 3: '0REDUCE_NORM': REDUCE_NORM takes a version"),
        ('0F0,"0B0\n', r"row 0 \(line 1\): unexpected end of data"),
        ("# batchs: 2\n0F0\n", r"line 1: there is no key 'batchs'; the keys are weights, batches"),
        ("# batches: 2\n# batches: 2\n0F0\n", "line 2: batches is stated twice"),
        ("# batches: two\n0F0\n", "line 1: batches: 'two' is not a number"),
        ("# weights: 3bw\n0F0\n", "line 1: weights: '3bw' is not one of flush, 2bw, stash"),
        ("# recompute: true\n0F0\n", "line 1: recompute: 'true' is neither yes nor no"),
        ("# tied_stage: 2\n0F0\n1F0\n", "tied_stage is 2; give the stage, 1 to 1, that shares the first one's"),
        ("# tied_stage: 0\n0F0\n1F0\n", "tied_stage is 0; give the stage, 1 to 1"),
        ("# batches:\n0F0\n", "batches are none; give the number of microbatches of each"),
        ("# batches: 1 0\n0F0\n", "batches are 1 0; give the number of microbatches of each"),
        ("# rank_of_stage: 0 1\n0F0,0B0\n", "has rows for 1 rank, but its stages live on ranks 0 1"),
        ("0F0\n# weights: flush\n", r"row 1 \(line 2\), column 1: '# weights: flush' is not an instruction"),
        ("0F0,0B0\n\n1F0,1B0\n", "has rows for 3 ranks, but its stages live on ranks 0 2"),
        ("0F0@0,0B0@0\n", "name weight versions, so the policy has to be known"),
        ("0STEP@1\n", "name weight versions, so the policy has to be known"),
        ("# weights: flush\n0STEP@1\n", "no instruction concerns a microbatch"),
        ("0F0\n1F0,0B0\n", "row 1, instruction 2, 0B0: its stage stands in row 0, too"),
        ("0F0\n2F0\n", "stage 1 stands in no row, though stage 2 does"),
        ("999999999F0\n", "stage 0 stands in no row, though stage 999999999 does"),
        ("# batches: 1000000000000\n0F0,0B0\n", "batches hold 1000000000000 microbatches, but the rows only 2 instr"),
        ("# first_microbatch: 5\n0F0,0B0\n", "first_microbatch is 5, but the rows have microbatch 0"),
        ("", "holds no instructions"),
        (",,\n", "holds no instructions"),
    ],
)
def test_errors_name_the_place(csv: str, message: str):
    """Every fault of a text is an error that says where and what."""
    with pytest.raises(ValueError, match=message):
        Program.from_csv(csv)


def test_a_contradiction_is_an_error():
    """A fact that is given must not differ from the text's; one that does not exist is a mistake of the caller."""
    with pytest.raises(ValueError, match="batches is given as 2; the text says 1 1"):
        Program.from_csv("# batches: 1 1\n0F0,0F1,0B0,0B1\n", batches=(2,))
    with pytest.raises(TypeError, match="there is no fact 'rows'"):
        Program.from_csv(COMPUTE_ONLY, rows=())
