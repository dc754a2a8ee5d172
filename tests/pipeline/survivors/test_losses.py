"""The table of losses: which ones differ, and what is said of one that ends the job."""

import pytest

from megatron.pipeline.survivors import ReplicaRank
from megatron.pipeline.survivors.losses import COLUMNS, double_losses, losses_of, single_losses
from tests.pipeline.survivors.jobs import schedule_of


def test_losses_that_differ():
    """Of 3 ranks: 3 of one rank; of two ranks 3 in a replica and 6 in two replicas."""
    assert [str(each) for (each,) in single_losses(3)] == ["0.0", "0.1", "0.2"]
    pairs = [" ".join(map(str, each)) for each in double_losses(3)]
    assert pairs[:3] == ["0.0 0.1", "0.0 0.2", "0.1 0.2"] and len({*pairs}) == 9
    assert pairs[3:] == ["0.0 1.0", "0.0 1.1", "0.0 1.2", "0.1 1.1", "0.1 1.2", "0.2 1.2"]


def test_a_loss_that_ends_the_job_is_told_with_the_others():
    """Of two replicas, both ranks 0, or both ranks 1, are too many."""
    found = losses_of(schedule_of("flush", 2), 2, num_replicas=2, lost=double_losses(2))
    ends = {each.row()[0]: each.refusal for each in found if each.survivors is None}
    assert ends.keys() == {"0.0 1.0", "0.1 1.1"} and "every replica has lost rank 0" in ends["0.0 1.0"]
    assert [each.row()[1] for each in found].count("ends") == 2 and all(
        len(each.row()) == len(COLUMNS) for each in found
    )
    assert found[-1].to_dict() == {"lost": ["0.1", "1.1"], "refusal": ends["0.1 1.1"]}


def test_the_row_is_what_was_found():
    [loss] = losses_of(schedule_of("flush", 2), 2, num_replicas=2, lost=[[ReplicaRank(0, 1)]])
    assert loss.row() == ("0.1", "15", "66.7%", "15", "66.7%", "2 1", "1 1")
    found = loss.to_dict()
    assert found["seconds"] / found["undisturbed"] == found["slowdown"]


def test_where_no_loss_is_outlived_the_reason_is_an_error():
    with pytest.raises(ValueError, match="every replica has lost rank 0"):
        losses_of(schedule_of("flush", 2), 2, num_replicas=1, lost=single_losses(2))
