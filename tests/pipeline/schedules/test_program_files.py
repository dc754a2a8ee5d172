"""Files with programs: what they leave to the run, what they say of it, and errors that name them."""

import pytest

from megatron.pipeline.check import ProgramError
from megatron.pipeline.program.csv_text import names_stated, read_notes
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import OtherRun, Schedule, read_schedule
from tests.pipeline.brought_programs import FOLDED, TORCH, WHOLE, written


def kinds(path, **asked) -> set[Kind]:
    return {each.kind for row in read_schedule(path, **asked).program.rows for each in row}


def test_the_run_says_what_the_file_leaves_open(tmp_path):
    """Rows without updates get those that the run needs."""
    path = written(tmp_path, TORCH)
    assert not {Kind.RECOMPUTE, Kind.REDUCE_GRAD, Kind.REDUCE_EMBED} & kinds(path)
    asked = {"recompute": True, "tied_embeddings": True, "data_parallel": True}
    assert {Kind.RECOMPUTE, Kind.REDUCE_GRAD, Kind.REDUCE_EMBED} <= kinds(path, **asked)
    with pytest.raises(OtherRun, match="does not reduce gradients over replicas"):
        read_schedule(written(tmp_path, WHOLE), data_parallel=True)


def test_tied_embeddings_on_one_rank_need_no_word(tmp_path):
    """Where a rank has both ends, rows that are complete serve tied embeddings and others alike."""
    complete = read_schedule(written(tmp_path, FOLDED)).program.to_csv()
    schedule = read_schedule(written(tmp_path, complete), tied_embeddings=True)
    assert schedule.tied_embeddings and Kind.REDUCE_EMBED not in {each.kind for each in schedule.program.rows[1]}


def test_notes(tmp_path):
    """Fill, period and the degrees of the job are read, heeded, and no part of the program."""
    text = f"# fill: 0\n# period: 1\n# tensor: 2\n# data: 1\n{TORCH}"
    assert read_notes(text) == {"fill": 0, "period": 1, "tensor": 2, "data": 1} and not names_stated(text)
    assert Program.from_csv(text) == Program.from_csv(TORCH)
    path = written(tmp_path, text)
    assert read_schedule(path) == read_schedule(path, tensor=2, data=1)
    with pytest.raises(OtherRun, match="tensor parallel degree 2") as caught:
        read_schedule(path, tensor=4)
    assert (caught.value.fact, caught.value.is_asked) == ("tensor", 4)
    with pytest.raises(ValueError, match="line 1: period: '0' is not a number of 1 and more"):
        read_schedule(written(tmp_path, f"# period: 0\n{TORCH}"))


def test_errors_name_the_file(tmp_path):
    """And keep rank, position and the picture of the row."""
    path = written(tmp_path, TORCH.replace("1B1,", ""))
    with pytest.raises(ProgramError) as caught:
        read_schedule(path)
    assert str(caught.value).startswith(f"{path}: rank 1, position ") and str(caught.value).endswith("^")
    with pytest.raises(ValueError, match=r"none\.csv cannot be read"):
        read_schedule(tmp_path / "none.csv")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is no text"):
        read_schedule(tmp_path / "bytes")


def test_updates_of_each_stage_by_itself_have_no_norm(tmp_path):
    """As where a preset asks for them."""
    text = Schedule.preset("pipedream", num_stages=2).build((1,) * 6).to_csv()
    assert read_schedule(written(tmp_path, text)).weights.name == "stash"
    with pytest.raises(ValueError, match="under weights stash every stage steps before the norm"):
        read_schedule(written(tmp_path, text), norm_decides=True)
