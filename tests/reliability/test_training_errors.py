"""Errors that a run meets at its start or in its middle, as jobs: told once, with the rank where it is one rank's."""

import socket
import sys

import pytest

from tests.reliability import launch


@pytest.mark.full  # in one process: test_ranks_agree_before_they_form_a_group in tests/trainer/run/test_entry.py
def test_problem_of_one_rank_at_the_start_is_told_with_its_rank(tmp_path, saving):
    """Rank 1 does not see the checkpoint, as on a node without the shared disk: both ranks end at once, and rank 0
    says whose problem it is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = ["--load", "checkpoints", "--use-checkpoint-args", "--pipeline-model-parallel-size", 2, "--train-iters", 20]
    command = [sys.executable, str(launch.REPOSITORY / "pretrain_gpt.py"), *launch.TINY, *launch.SYNTHETIC]
    command += map(str, flags)
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with (
        launch.Job(command, directory=saving, RANK="0", LOCAL_RANK="0", **where) as first,
        launch.Job(command, directory=tmp_path, RANK="1", LOCAL_RANK="1", **where) as second,
    ):
        outcomes = [first.wait(), second.wait()]
    assert [outcome.status for outcome in outcomes] == [2, 2], [outcome.output for outcome in outcomes]
    outcomes[0].assert_failed_clearly("error: rank 1: --use-checkpoint-args needs a checkpoint")
    assert "Traceback" not in outcomes[0].output + outcomes[1].output
