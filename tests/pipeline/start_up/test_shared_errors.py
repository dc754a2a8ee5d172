"""Errors that ranks tell each other: the same sentences on all, before a process group forms."""

import threading
from datetime import timedelta

from megatron.pipeline.start_up.shared_errors import OnThisRank, SameEverywhere, agree_to_start


def verdicts(*problems: str | None, absent: int = 0) -> list[Exception | None]:
    """What `agree_to_start` says on each rank; `absent` more ranks never come."""
    from torch.distributed import HashStore

    store, found = HashStore(), [None] * len(problems)

    def rank(index: int) -> None:
        try:
            agree_to_start(
                store, rank=index, world_size=len(problems) + absent, problem=problems[index],
                timeout=timedelta(seconds=1 if absent else 30),
            )  # fmt: skip
        except (SameEverywhere, OnThisRank) as error:
            found[index] = error

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


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
