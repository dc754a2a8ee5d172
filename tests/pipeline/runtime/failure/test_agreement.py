"""One verdict on all ranks: before a process group forms, and where blocks lie in each other, or others do not come."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from megatron.pipeline.runtime.failure.errors import OnThisRank, SameEverywhere
from tests import workers

CASES = "tests.pipeline.runtime.failure.agreement_cases:"


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


def verdicts(*problems: str | None, absent: int = 0) -> list[Exception | None]:
    """What `agree_to_start` says on each rank; `absent` more ranks never come."""
    from torch.distributed import HashStore

    from megatron.pipeline.runtime.failure.agreement import agree_to_start

    store = HashStore()

    def rank(index: int) -> Exception | None:
        try:
            return agree_to_start(
                store, rank=index, world_size=len(problems) + absent, problem=problems[index],
                timeout=timedelta(seconds=1 if absent else 30),
            )  # fmt: skip
        except (SameEverywhere, OnThisRank) as error:
            return error

    with ThreadPoolExecutor(len(problems)) as threads:
        return list(threads.map(rank, range(len(problems))))


def test_ranks_agree_before_they_form_a_group():
    """One rank's problem is known to all with its rank; the same problem of all is told without ranks."""
    assert verdicts(None, None, None) == [None] * 3
    single = verdicts(None, "no file", None)
    assert [str(error) for error in single] == ["rank 1: no file"] * 3
    assert all(isinstance(error, SameEverywhere) for error in single)
    assert [str(error) for error in verdicts("no file", "no file")] == ["no file"] * 2
    assert [str(error) for error in verdicts("a", None, "b")] == ["rank 0: a; rank 2: b"] * 3


def test_rank_that_does_not_start_is_named():
    """The others do not wait for ever, and say who is missing; a rank with a problem of its own tells that."""
    one, two = verdicts(None, "no file", absent=1)
    assert isinstance(one, OnThisRank) and "rank 2 did not start within" in str(one)
    assert str(two) == "no file"
