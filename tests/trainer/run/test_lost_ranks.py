"""Runs that go on without lost ranks: real jobs whose processes die, stop or fail, and nothing of the training is lost."""

import pytest

from tests.trainer.run.lost_rank_jobs import assert_nothing_lost, run, undisturbed, values
from tests.trainer.run.run_case import train

def test_three_are_lost_one_after_another_and_one_fails(tmp_path):
    """Flush: one is killed in a forward, one stops in the chain, one is killed during that recovery, one has an error
    of its own, which the launcher names. Six ranks become two, and the log's writer and rank 0 are among the lost."""
    losses = [
        [1, "forward", 2, "SIGKILL"],
        [5, "chain", 4, "SIGSTOP"],
        [0, "new groups", 2, "SIGKILL"],
        [4, "backward", 6, "error"],
    ]
    flags = "--global-batch-size 6 --train-iters 8"
    job = run(tmp_path, 6, f"{flags} --pipeline-model-parallel-size 2 --pipeline-schedule flush", losses)
    assert_nothing_lost(job, f"{flags} --pipeline-schedule flush")
    assert sorted(moment.rank for moment in job.moments if moment.is_loss) == [0, 1, 4, 5], job.outcome.output
    assert "2 ranks of 6 go on from iteration" in job.outcome.output
    errors = [line for line in job.outcome.output.splitlines() if line.startswith("launch: rank 4 ")]
    assert len(errors) == 1 and "planted in backward" in errors[0] and "the job goes on" in errors[0]


def test_evaluations_and_checkpoints_go_on(tmp_path):
    """2bw: one rank has no sums of a batch with which others have stepped, and one of those is killed; then rank 0 is
    killed in a save. A run of all ranks resumes from the checkpoint that the two others save instead."""
    losses = [
        [0, "without sums", 3, "broken"],
        [3, "stepped", 3, "SIGKILL"],
        [0, "save", 1, "SIGKILL"],
    ]
    flags = "--global-batch-size 4 --train-iters 9 --pipeline-schedule 2bw --eval-interval 3 --eval-iters 2"
    saving = f"--pipeline-model-parallel-size 2 --save {tmp_path}/saved --save-interval 6"
    job = run(tmp_path, 4, f"{flags} {saving}", losses)
    assert_nothing_lost(job, flags)
    assert [moment.rank for moment in job.moments if moment.is_loss] == [3, 0], job.outcome.output
    assert sorted(path.name for path in (tmp_path / "saved").glob("iter_*")) == ["iter_0000006", "iter_0000009"]
    assert not list((tmp_path / "saved").glob("*staging*"))
    resumed = train(4, f"{flags} --pipeline-model-parallel-size 2 --load {tmp_path}/saved --ckpt-step 6")
    later = {iteration: loss for iteration, loss in values(undisturbed(flags), "lm_loss").items() if iteration > 6}
    assert resumed[-1]["losses"] == pytest.approx(later, rel=2e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("", "every replica has lost rank 1, so nobody holds the weights of stage 1; restart from the last checkpoint"),
        ("--minimum-speed 0.9", "less than --minimum-speed 0.9; restart it with all ranks from its last checkpoint"),
    ],
    ids=["all replicas", "speed"],
)
def test_a_job_that_cannot_go_on_ends(tmp_path, flags, sentence):
    """Both ranks of a stage are lost, or what is left is too slow: the job ends, and says why."""
    losses = [[2, "forward", 2, "SIGKILL"], [3, "forward", 2, "SIGKILL"]][: 1 if flags else 2]
    shape = "--global-batch-size 4 --train-iters 1000 --pipeline-model-parallel-size 2"
    job = run(tmp_path, 4, f"{shape} {flags}", losses)
    job.outcome.assert_failed_clearly(sentence)
