"""What a file leaves out is added by the passes, and what it has stays where it is."""

import pytest

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.program.instruction import RECEIVES, SENDS, UPDATES, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule, read_schedule
from megatron.pipeline.schedules.completion import completed
from tests.pipeline.brought_programs import TORCH, WHOLE

FLUSH = Schedule.preset("flush", num_stages=3, data_parallel=True).build((4, 4))
TWO_BW = Schedule.preset("2bw", num_stages=3, tied_embeddings=True).build((4, 4, 4))


def without(program: Program, kinds: frozenset[Kind] = frozenset(), *, versions: bool = False) -> Program:
    """The program without these instructions, or without the versions of its computations."""
    text = program.with_rows(tuple(tuple(each for each in row if each.kind not in kinds) for row in program.rows))
    if not versions:
        return text
    lines = [line if line.startswith("#") else _unversioned(line) for line in text.to_csv().splitlines()]
    return Program.from_csv("\n".join(lines))


def _unversioned(line: str) -> str:
    return ",".join(cell if "STEP" in cell or "REDUCE" in cell else cell.partition("@")[0] for cell in line.split(","))


@pytest.mark.parametrize("program", [FLUSH, TWO_BW])
@pytest.mark.parametrize(("kinds", "versions"), [
    (frozenset(), False), (frozenset(), True), (SENDS | RECEIVES, False), (SENDS | RECEIVES, True),
    (UPDATES, True), (UPDATES, False), (UPDATES | SENDS | RECEIVES, True),
])  # fmt: skip
def test_each_concern_is_added_by_itself(program, kinds, versions):
    """Transfers, updates or versions, whichever are missing: the result is proved, and has all of the file's rows."""
    text = without(program, kinds, versions=versions)
    complete = completed(text)
    check(complete)
    for own, row in zip(text.rows, complete.rows, strict=True):
        words = iter([str(each).partition("@")[0] for each in row])
        assert all(str(each).partition("@")[0] in words for each in own)
    counts = [sum(each.kind in UPDATES for each in row) for row in program.rows]
    assert [sum(each.kind in UPDATES for each in row) for row in complete.rows] == counts


def test_a_complete_program_is_left_alone():
    """Not one instruction moves."""
    program = Program.from_csv(WHOLE)
    assert completed(program) == program


def test_receives_stand_ahead_as_the_head_of_a_file_says():
    """Earlier than by default, in a schedule that is proved; not where the rows have transfers of their own."""
    text = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"
    near, far = (read_schedule("a.csv", text=head + text).program for head in ("", "# receives_ahead: 3\n"))
    place = [[str(each) for each in program.rows[1]].index("1RECV_F2") for program in (near, far)]
    assert place[1] < place[0] and sorted(map(str, near.rows[1])) == sorted(map(str, far.rows[1]))
    with pytest.raises(ValueError, match="the rows have receives, so receives_ahead: 3 has no effect"):
        read_schedule("a.csv", text="# receives_ahead: 3\n" + near.to_csv())


def test_halves_of_backwards_are_carried_through():
    """I and W: the gradient leaves behind I, and the batch ends with its last W."""
    complete = completed(Program.from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"))
    words = [str(each).partition("@")[0] for each in complete.rows[1]]
    assert words.index("1SEND_B0") == words.index("1I0") + 1
    assert words[-3:] == ["1W1", "1REDUCE_NORM", "1STEP"]


@pytest.mark.parametrize("num_read", [None, 1])
def test_predictions_stand_where_the_next_batch_begins(num_read):
    """A file that says what predictions read is completed as the preset's computations are."""
    preset = Schedule.preset(
        "2bw", num_stages=2, predict=True, provisional_microbatches=num_read, reduce_partial=True, data_parallel=True
    )
    whole = preset.build((3, 3, 3, 3))
    complete = completed(without(whole, UPDATES | SENDS | RECEIVES, versions=True))
    words = (Kind.HOLD, Kind.REDUCE_PARTIAL, Kind.PREDICT, Kind.STEP, Kind.FORWARD, Kind.BACKWARD)
    for row, own in zip(complete.rows, whole.rows, strict=True):
        assert [each for each in row if each.kind in words] == [each for each in own if each.kind in words]


@pytest.mark.parametrize(("text", "reason"), [
    ("0F0,0F1\n", "forwards alone"),
    ("# global_norm: no\n0F0,0B0\n", "no REDUCE_NORM"),
    ("# weights: 2bw-provisional\n# batches: 1 1 1\n0F0,0B0,0F1,0B1,0F2,0B2\n",
     "are predicted, and nothing says from which microbatches; add `# unread:` with a number for each stage"),
    ("# weights: 2bw-provisional\n# batches: 1\n# unread: 1\n0F0,0B0\n1F0,1B0\n", "or unread for each of 2 stages"),
    ("# weights: 2bw-provisional\n# batches: 2\n# unread: 3 0\n0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
     "reads -1 of 2 microbatches at stage 0; give 0 to 2"),
    ("# weights: 2bw-provisional\n# batches: 1\n# unread: 0 0\n# edges: 0>1\n0F0,1F0,1B0,0B0\n",
     "predicts for one stage on each rank"),
    ("# weights: 2bw-provisional\n# batches: 2\n# unread: 2 0\n# reduce_partial: yes\n0F0,0F1,0B0,0B1\n"
     "1F0,1B0,1F1,1B1\n", "reads no microbatch at stage 0, so nothing is reduced; leave out reduce_partial"),
    (TORCH.replace(",1F3", ""), "1B3: "),
    (TORCH.replace("0B2,0B3", "0B3,0B2").replace("1F3,1B3", "1B3,1F3"), "rank 1, position 6, 1B3"),
    ("# batches: 1 1\n0F0,0F1,0B0,0B1\n", "0STEP@1: batch 0, whose gradients it takes, has backwards to come"),
    ("0F0,0B0\n1B0,1F0\n", "1B0"),
    ("# weights: flush\n# batches: 1 1\n0F0@0,0B0@0,0F1@0,0B1@0\n",
     "0F1@1: the rows say version 0, and flush gives it 1"),
])  # fmt: skip
def test_what_cannot_be_completed_is_refused(text, reason):
    """With the place in the rows, where there is one."""
    with pytest.raises((ProgramError, ValueError), match=reason):
        completed(Program.from_csv(text))
