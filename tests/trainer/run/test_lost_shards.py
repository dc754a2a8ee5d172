"""Runs that go on without lost ranks where replicas share out the optimizer: lost shards come from copies, or the run
goes back to its last checkpoint."""

import pytest

from tests.trainer.run import lost_rank_jobs, test_experts
from tests.trainer.run.lost_rank_jobs import (
    MODEL,
    TIMEOUT,
    assert_nothing_lost,
    changes_recorded,
    lose_at_random,
    run,
    undisturbed,
    values,
)
from tests.trainer.run.run_case import BASE, train

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
    assert sorted(lost(job)) == [0, 3], job.outcome.output
    resumed = train(4, f"{flags} --pipeline-model-parallel-size 2 --load {tmp_path}/saved --ckpt-step 7", base=MODEL)
    later = {iteration: loss for iteration, loss in values(undisturbed(flags), "lm_loss").items() if iteration > 7}
    assert resumed[-1]["losses"] == pytest.approx(later, rel=2e-6)


def test_without_copies_the_run_goes_back_to_its_checkpoint(tmp_path):
    """The ranks that are left load it and repeat what was done behind it."""
    flags = "--global-batch-size 4 --train-iters 8"
    saving = f"--pipeline-model-parallel-size 1 {SHARED} --save {tmp_path}/saved --save-interval 2"
    job = run(tmp_path, 2, f"{flags} {saving}", [[1, "forward", 6, "SIGKILL"]])
    assert_nothing_lost(job, flags)
    assert "go on from iteration 4" in job.outcome.output
    assert f"have loaded the checkpoint in {tmp_path}/saved, and repeat 1 iteration" in job.outcome.output


@pytest.mark.full
def test_the_checkpoint_of_another_job_is_not_gone_back_to(tmp_path):
    """It lies in the directory of --save, from a job that this one does not continue."""
    flags = f"--global-batch-size 4 --pipeline-model-parallel-size 1 {SHARED} --save {tmp_path}/saved --train-iters 12"
    train(2, f"{flags} --exit-interval 8 --save-interval 8", base=MODEL)
    job = run(tmp_path, 2, f"{flags} --save-interval 100", [[1, "forward", 3, "SIGKILL"]])
    job.outcome.assert_failed_clearly("of the optimizer's state, and there is no checkpoint to go back to")
    job = run(tmp_path, 2, f"{flags} --save-interval 3 --exit-interval 5", [[1, "forward", 5, "SIGKILL"]])
    assert "go on from iteration 3" in job.outcome.output, job.outcome.output


@pytest.mark.full
def test_biases_of_experts_go_on(tmp_path):
    """2bw: a rank is lost and comes back, and another is lost, each with biases of two versions."""
    losses = [[1, "forward", 3, "SIGKILL"], [0, "forward", 6, "newcomer"], [0, "forward", 9, "SIGKILL"]]
    experts = f"--num-experts 4 --moe-aux-loss-coeff 1e-2 {test_experts.SMOOTH} {test_experts.BIASED}"
    flags = f"--global-batch-size 4 --train-iters 11 --pipeline-schedule 2bw {experts}"
    job = run(tmp_path, 2, f"{flags} --pipeline-model-parallel-size 1 {COPIES}", losses, max_restarts=1)
    assert_nothing_lost(job, flags)
    assert lost(job) == [1, 0] and "rank 1 is back" in job.outcome.output, job.outcome.output


@pytest.mark.full
def test_a_rank_that_builds_its_part_slowly_is_waited_for(tmp_path):
    """It takes longer than ranks may take to connect, and does so once: nothing is tried again."""
    losses = [[0, "forward", 3, "SIGKILL"], *([3, "build", number, f"sleep {4 * TIMEOUT}"] for number in (2, 3))]
    flags = "--global-batch-size 4 --train-iters 6"
    job = run(tmp_path, 4, f"{flags} --pipeline-model-parallel-size 2 {COPIES}", losses)
    assert_nothing_lost(job, flags)
    assert [moment.what for moment in job.moments if moment.what.startswith("build")] == ["build:sleep"]
    assert len(changes_recorded(job, world_size=4)) == 1, job.outcome.output
    assert "rank 3" not in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (SHARED, "nobody else has a lost rank's shard of the optimizer's state, and there is no checkpoint to go back "
         "to: restart from the beginning, and give --redundant-optimizer, or --save with --save-interval"),
        (COPIES, "a lost rank's shard of the optimizer's state and its copy are both lost, and there is no checkpoint"),
    ],
    ids=["no copies", "both lost"],
)  # fmt: skip
def test_a_job_without_copy_and_checkpoint_ends(tmp_path, flags, sentence):
    """Three replicas of one stage, of which one, or two neighbours, are lost."""
    losses = [[1, "forward", 3, "SIGKILL"], [2, "forward", 3, "SIGKILL"]][: 1 if flags == SHARED else 2]
    shape = "--global-batch-size 3 --train-iters 1000 --pipeline-model-parallel-size 1"
    run(tmp_path, 3, f"{shape} {flags}", losses).outcome.assert_failed_clearly(sentence)


@pytest.mark.full
@pytest.mark.parametrize("flags", ["", COPIES])
def test_a_rank_is_lost_in_the_first_batch(tmp_path, flags):
    shared = "--global-batch-size 4 --train-iters 4 --pipeline-schedule 2bw"
    job = run(tmp_path, 2, f"{shared} --pipeline-model-parallel-size 1 {flags}", [[1, "forward", 1, "SIGKILL"]])
    assert_nothing_lost(job, shared)
    assert lost(job) == [1] and "go on from iteration 0" in job.outcome.output


FP16 = "--fp16 --initial-loss-scale 1024 --loss-scale-window 2"
"""Without overflows, which depend on the number of microbatches of a replica."""
EVALUATING = "--eval-interval 3 --eval-iters 1"


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "flags", "losses"),
    [
        ("flush", "", [
            [0, "copy", 2, "SIGKILL"], [5, "gather", 3, "SIGKILL"], [2, "gathered", 5, "SIGKILL"],
            [6, "copied", 6, "SIGSTOP"],
        ]),
        ("2bw", "", [
            [4, "gather", 2, "SIGKILL"], [1, "copied", 4, "SIGKILL"], [6, "step", 6, "SIGSTOP"],
            [3, "norm", 7, "SIGKILL"],
        ]),
        ("2bw", FP16, [
            [3, "without sums", 3, "broken"], [0, "stepped", 3, "SIGKILL"], [7, "gather", 1, "SIGKILL"],
            [5, "chain", 7, "SIGKILL"],
        ]),
        ("flush", "--bf16", [
            [2, "evaluation", 1, "SIGKILL"], [5, "save", 1, "SIGKILL"], [7, "backward", 8, "SIGKILL"],
        ]),
        ("zb-h1", "", [
            [1, "without sums", 3, "broken"], [4, "without sums", 3, "broken"], [0, "stepped", 3, "SIGKILL"],
            [5, "backward", 5, "error"], [7, "norm", 7, "SIGSTOP"],
        ]),
        ("flush", "", [[0, "forward", 3, "SIGKILL"], [2, "forward", 3, "SIGKILL"], [5, "forward", 3, "SIGKILL"]]),
    ],
    ids=["flush", "2bw", "2bw, fp16", "flush, bf16", "zb-h1", "no neighbours at once"],
)  # fmt: skip
def test_every_place_where_a_shard_can_be_lost(tmp_path, schedule, flags, losses):
    """Two stages of four replicas, which lose ranks one after another: in each part of a batch and between batches."""
    shape = f"--pipeline-model-parallel-size 2 {COPIES} --save saved --save-interval 4"
    common = f"--global-batch-size 8 --train-iters 9 --clip-grad 0.5 {EVALUATING} {flags}"
    job = run(tmp_path, 8, f"{common} --pipeline-schedule {schedule} {shape}", losses, timeout=500)
    assert_nothing_lost(job, f"{common} --pipeline-schedule {'2bw' if schedule == '2bw' else 'flush'}")
    assert sorted(lost(job)) == sorted(rank for rank, _, _, what in losses if what != "broken"), job.outcome.output
    assert "have loaded the checkpoint" not in job.outcome.output


@pytest.mark.full
def test_stages_that_share_an_embedding_have_different_numbers_of_copies(tmp_path, monkeypatch):
    """The embedding lies in thirds on the first stage and in halves on the last, then in whole on the first."""
    monkeypatch.setattr(lost_rank_jobs, "MODEL", BASE)
    flags = "--global-batch-size 6 --train-iters 7 --clip-grad 0.5 --seed 4"
    job = run(tmp_path, 6, f"{flags} --pipeline-model-parallel-size 2 {COPIES} --pipeline-schedule 2bw", [
        [4, "gather", 2, "SIGKILL"], [0, "backward", 4, "SIGKILL"], [1, "stepped", 6, "SIGKILL"]
    ])  # fmt: skip
    assert_nothing_lost(job, f"{flags} --pipeline-schedule 2bw")
    assert sorted(lost(job)) == [0, 1, 4], job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    "second", ["new groups", "published", "hand over", "handed over", "new copies", "shards taken", "new program"]
)
def test_a_rank_is_lost_in_the_recovery_from_another(tmp_path, second):
    """Rank 1's shard is handed over when rank 3 is killed, whose copy rank 0 has: old shards or new ones are whole."""
    losses = [[1, "gather", 3, "SIGKILL"], [3, second, 2 if second == "new copies" else 1, "SIGKILL"]]
    flags = "--global-batch-size 4 --train-iters 6 --pipeline-schedule 2bw"
    job = run(tmp_path, 4, f"{flags} --pipeline-model-parallel-size 1 {COPIES}", losses)
    assert_nothing_lost(job, flags)
    assert sorted(lost(job)) == [1, 3], job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("second", ["forward", "hand over", "new program"])
def test_a_shard_and_its_copy_are_lost(tmp_path, second):
    """Of four replicas two neighbours die, at once or one in the recovery from the other's loss: the last checkpoint is
    loaded, unless the new copies were whole."""
    losses = [[1, "forward", 6, "SIGKILL"], [2, second, 6 if second == "forward" else 1, "SIGKILL"]]
    flags = "--global-batch-size 4 --train-iters 8 --pipeline-schedule flush"
    job = run(tmp_path, 4, f"{flags} --pipeline-model-parallel-size 1 {COPIES} --save saved --save-interval 2", losses)
    assert_nothing_lost(job, flags)
    assert sorted(lost(job)) == [1, 2], job.outcome.output
    assert ("have loaded the checkpoint in saved" in job.outcome.output) is (second != "new program")


@pytest.mark.full
def test_another_rank_is_lost_while_the_checkpoint_is_loaded(tmp_path):
    losses = [[1, "forward", 6, "SIGKILL"], [0, "new groups", 1, "SIGKILL"], [2, "shards taken", 1, "SIGKILL"]]
    flags = "--global-batch-size 4 --train-iters 8 --pipeline-schedule 2bw"
    saving = f"--pipeline-model-parallel-size 1 {SHARED} --save saved --save-interval 4"
    job = run(tmp_path, 4, f"{flags} {saving}", losses)
    assert_nothing_lost(job, flags)
    assert sorted(lost(job)) == [0, 1, 2], job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", ["flush", "2bw", "zb-h1"])
def test_shards_are_lost_at_random_moments(tmp_path, schedule, seed):
    """Two replicas of two stages: one rank of each stage is killed or stopped."""
    flags = "--global-batch-size 4 --train-iters 40 --eval-interval 5 --eval-iters 1"
    shape = f"--pipeline-model-parallel-size 2 --pipeline-schedule {schedule} {COPIES} --save saved --save-interval 7"
    job, ranks = lose_at_random(tmp_path, 2, 2, f"{flags} {shape}", seed=seed)
    assert len(ranks) == 2, ranks
    assert_nothing_lost(job, f"{flags} --pipeline-schedule {'2bw' if schedule == '2bw' else 'flush'}")
