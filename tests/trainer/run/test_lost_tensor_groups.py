"""Runs with tensor parallelism go on without lost ranks: real jobs, in which nothing of the training is lost."""

import pytest

from tests.trainer.run.lost_rank_jobs import assert_nothing_lost, changes_recorded, run

TENSOR = "--tensor-model-parallel-size 2"


def test_a_group_is_lost_in_a_forward(tmp_path):
    losses = [[2, "forward", 3, "SIGKILL"]]
    flags = "--global-batch-size 4 --train-iters 6"
    job = run(tmp_path, 8, f"{flags} {TENSOR} --pipeline-model-parallel-size 2", losses)
    assert_nothing_lost(job, flags)
    print(job.outcome.output)
    print(changes_recorded(job, world_size=8))
