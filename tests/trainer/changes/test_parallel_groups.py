"""Process groups of old and new degrees: set aside, taken back, and ended to the last."""

import pytest

from tests import workers
from tests.trainer.run.run_case import data_flags

CASES = "tests.trainer.changes.group_cases:"


def test_either_the_new_groups_hold_or_the_old_ones_are_back():
    """Groups work under the new degrees, under the old ones after a rollback, which leaves everything as it was, and
    under the new ones after a commit."""
    results = workers.run(4, CASES + "roll_back_and_commit", flags=data_flags())
    for rank, (sums, same, left) in enumerate(results):
        alone, halves = [float(rank), 6.0, float(rank)], [[1.0, 5.0][rank // 2], [2.0, 4.0][rank % 2], float(rank)]
        assert sums == [alone, halves, alone, halves]
        assert same and not left


def test_groups_that_others_use_are_left():
    """What is in use, in whatever variable, the job's own group and the control group outlive a record with them, and
    so does the group of verdicts."""
    assert workers.run(2, CASES + "shared_with_new_ones") == [(4.0, 3)] * 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("cycles", [5, 30])
def test_no_group_is_left_behind(cycles):
    """Many changes with chunks, optimizers and weight updates on four ranks: files and threads stay where they were."""
    flags = f"--pipeline-schedule 2bw --use-distributed-optimizer {data_flags()}"
    for looks in workers.run(4, CASES + "change_often", flags=flags, cycles=cycles):
        (files, threads), (last_files, last_threads) = looks[2], looks[-1]
        assert last_files - files <= 10 and last_threads - threads <= 5
