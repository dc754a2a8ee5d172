"""What users read: lines of rank 0, and one sentence where a job cannot go on."""

import pytest

from megatron.pipeline.dropin.sentences import errors_end_the_job, say
from megatron.pipeline.runtime.failure import errors


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(errors, "ERROR_PATIENCE", 0.0)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)


@pytest.mark.parametrize(("rank", "said"), [("0", "megatron.pipeline.dropin: a line\n"), ("3", "")])
def test_lines_are_of_rank_0(monkeypatch, capsys, rank, said):
    """Other ranks write none."""
    monkeypatch.setenv("RANK", rank)
    say("a line")
    assert capsys.readouterr() == (said, "")


@pytest.mark.parametrize(("rank", "said"), [("0", "megatron.pipeline.dropin: error: x is 3; take 2\n"), ("3", "")])
def test_error_of_the_users_ends_every_rank(monkeypatch, capsys, rank, said):
    """Each with status 2; rank 0 says the sentence, and no traceback."""
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as end, errors_end_the_job():
        raise ValueError("x is 3; take 2")
    assert end.value.code == 2 and capsys.readouterr() == ("", said)


def test_other_errors_pass():
    """They are nobody's to mend by reading a sentence."""
    with pytest.raises(RuntimeError, match="a fault"), errors_end_the_job():
        raise RuntimeError("a fault")
