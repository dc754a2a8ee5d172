"""Runs that go on without lost ranks where replicas share out the optimizer: lost shards come from copies, or the run
goes back to its last checkpoint."""

import pytest

from tests.trainer.run.lost_rank_jobs import MODEL, assert_nothing_lost, run, undisturbed, values
from tests.trainer.run.run_case import train

SHARED = "--use-distributed-optimizer"
COPIES = f"{SHARED} --redundant-optimizer"


def lost(job) -> list[int]:
    return [moment.rank for moment in job.moments if moment.is_loss]


def test_a_lost_shard_comes_from_its_copy(tmp_path):
    """2bw, two replicas: one rank dies before the gather of weights to which others have stepped, then one of the other
    stage before it sends its gradients on. The checkpoint behind is a usual one."""
    losses = [[0, "gather", 3, "SIGKILL"], [3, "copy", 6, "SIGKILL"]]
    flags = "--global-batch-size 4 --train-iters 8 --pipeline-schedule 2bw --clip-grad 0.5"
    saving = f"--pipeline-model-parallel-size 2 {COPIES} --save {tmp_path}/saved --save-interval 7"
    job = run(tmp_path, 4, f"{flags} {saving}", losses)
    assert_nothing_lost(job, flags)
    assert lost(job) == [0, 3], job.outcome.output
    resumed = train(4, f"{flags} --pipeline-model-parallel-size 2 --load {tmp_path}/saved --ckpt-step 7", base=MODEL)
    later = {iteration: loss for iteration, loss in values(undisturbed(flags), "lm_loss").items() if iteration > 7}
    assert resumed[-1]["losses"] == pytest.approx(later, rel=2e-6)


def test_without_copies_the_run_goes_back_to_its_checkpoint(tmp_path):
    """The ranks that are left load it and repeat what was done behind it."""
    flags = "--global-batch-size 4 --train-iters 8"
    saving = f"--pipeline-model-parallel-size 2 {SHARED} --save {tmp_path}/saved --save-interval 2"
    job = run(tmp_path, 4, f"{flags} {saving}", [[1, "forward", 6, "SIGKILL"]])
    assert_nothing_lost(job, flags)
    assert "go on from iteration 4" in job.outcome.output
    assert f"have loaded the checkpoint in {tmp_path}/saved, and repeat 1 iteration" in job.outcome.output
