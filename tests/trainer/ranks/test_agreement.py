"""One verdict on all ranks, also where blocks lie in each other, and where the others do not come."""

import pytest

from tests import workers

CASES = "tests.trainer.checkpoint.agreement_cases:"


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("no such file"), "no such file"), (OSError("disk"), "OSError: disk"), (ValueError(), "ValueError: ")],
)
def test_a_rank_that_fails_between_two_blocks_ends_the_next_one_of_the_others(error, said):
    """All hear the same, nobody goes on behind that block, and the next verdict is one of all again."""
    found = workers.run(3, CASES + "fails_between_inner_blocks", error=error)
    assert [verdict for verdict, *_ in found] == [said] * 3
    assert [reached for _, reached, _ in found] == [["first", "second"], ["first"], ["first", "second"]]
    assert [after for *_, after in found] == [None] * 3


def test_patience():
    """A rank that has failed, and hears nothing of the others, raises its own error."""
    assert workers.run(3, CASES + "fails_alone", patience=0.5) == [None, "no files", None]
