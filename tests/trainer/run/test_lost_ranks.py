"""Runs that go on without lost ranks: processes of real jobs die, stop or fail, and nothing of the training is lost."""

import pytest

from tests.trainer.run.lost_rank_jobs import (
    MODEL,
    assert_drawn,
    assert_nothing_lost,
    changes_recorded,
    lose_at_random,
    run,
    undisturbed,
    values,
)
from tests.trainer.run.run_case import train


def test_three_are_lost_one_after_another_and_one_fails(tmp_path):
    """Flush: one is killed in a forward, one stops in the chain, one is killed during that recovery, one has an error
    of its own, which the launcher names. Six ranks become two, and the log's writer and rank 0 are among the lost. The
    program without one rank was proved before the run began."""
    losses = [
        [1, "forward", 2, "SIGKILL"],
        [5, "chain", 4, "SIGSTOP"],
        [0, "new groups", 2, "SIGKILL"],
        [4, "backward", 6, "error"],
    ]
    flags = "--global-batch-size 6 --train-iters 8"
    shape = "--pipeline-model-parallel-size 2 --pipeline-schedule flush"
    job = run(tmp_path, 6, f"{flags} {shape} --pipeline-timeline timeline", losses)
    assert_nothing_lost(job, f"{flags} --pipeline-schedule flush")
    assert sorted(moment.rank for moment in job.moments if moment.is_loss) == [0, 1, 4, 5], job.outcome.output
    made = {line.split(": ")[1].split(" ")[0]: line.rsplit(", made ")[1]
            for line in job.outcome.output.splitlines() if " of 6 go on from iteration " in line}  # fmt: skip
    assert (made["5"], made["2"]) == ("before the run began", "now"), job.outcome.output
    errors = [line for line in job.outcome.output.splitlines() if line.startswith("launch: rank 4 ")]
    assert len(errors) == 1 and "planted in backward" in errors[0] and "the job goes on" in errors[0]
    changes = changes_recorded(job, world_size=6)
    assert changes[-1]["ranks"] == 2
    assert_drawn(
        tmp_path / "timeline", first=changes[-1]["iteration"], last=8, size=6, lanes=["rank 2 (2.0)", "rank 3 (0.1)"]
    )


def test_evaluations_and_checkpoints_go_on(tmp_path):
    """2bw: one rank has no sums of a batch with which others have stepped, and one of those is killed; then rank 0 is
    killed in a save. A run of all ranks resumes from the checkpoint that the two others save instead. What ranks hold
    is reported over all losses by rank of the pipeline. At the end one is killed before the other has its part of the
    picture, which is left out."""
    losses = [
        [0, "without sums", 3, "broken"],
        [3, "stepped", 3, "SIGKILL"],
        [0, "save", 1, "SIGKILL"],
        [2, "timeline", 1, "SIGKILL"],
    ]
    flags = "--global-batch-size 4 --train-iters 9 --pipeline-schedule 2bw --eval-interval 3 --eval-iters 2"
    saving = f"--pipeline-model-parallel-size 2 --save {tmp_path}/saved --save-interval 6"
    more = "--log-saved-activations --log-interval 4 --pipeline-timeline timeline"
    job = run(tmp_path, 4, f"{flags} {saving} {more}", losses)
    assert_nothing_lost(job, flags)
    assert [moment.rank for moment in job.moments if moment.is_loss] == [3, 0, 2], job.outcome.output
    assert "--pipeline-timeline timeline cannot be written" in job.outcome.output, job.outcome.output
    assert sorted(path.name for path in (tmp_path / "saved").glob("iter_*")) == ["iter_0000006", "iter_0000009"]
    assert not list((tmp_path / "saved").glob("*staging*"))
    held = {
        each["iteration"]: each["saved_activation_bytes"] for each in job.records if "saved_activation_bytes" in each
    }
    assert {1, 7, 8, 9} <= held.keys() and all(len(each) == 2 and min(each) > 0 for each in held.values())
    resumed = train(4, f"{flags} --pipeline-model-parallel-size 2 --load {tmp_path}/saved --ckpt-step 6", base=MODEL)
    later = {iteration: loss for iteration, loss in values(undisturbed(flags), "lm_loss").items() if iteration > 6}
    assert resumed[-1]["losses"] == pytest.approx(later, rel=2e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "replicas, lost, flags, sentence",
    [
        (2, [2, 3], "",
         "every replica has lost rank 1, so nobody holds the weights of stage 1; restart from the last checkpoint"),
        (3, [0, 1], "--minimum-speed 0.5",
         "less than --minimum-speed 0.5; restart it with all ranks from its last checkpoint"),
        (2, [], "--minimum-speed 0.9",
         "--minimum-speed 0.9: without a rank the job has at most 60% of its speed, as simulated, so the loss of any "
         "rank would end it; give at most 0.6, or leave --go-on-without-lost-ranks out"),
    ],
    ids=["all replicas", "speed", "speed without any rank"],
)  # fmt: skip
def test_a_job_that_cannot_go_on_ends(tmp_path, replicas, lost, flags, sentence):
    """Both ranks of a stage are lost, or what is left is too slow: the job ends, and says why. Where it would be too
    slow without any rank, it does not begin."""
    losses = [[rank, "forward", 2, "SIGKILL"] for rank in lost]
    shape = f"--global-batch-size {2 * replicas} --train-iters 1000 --pipeline-model-parallel-size 2"
    job = run(tmp_path, 2 * replicas, f"{shape} {flags}", losses, forks=bool(lost))
    job.outcome.assert_failed_clearly(sentence)


@pytest.mark.full
def test_a_rank_is_two_steps_behind(tmp_path):
    """2bw: the last rank of a replica has reduced batch 4 and not stepped with batch 3 when another replica has stepped
    with batch 4, and loses a rank."""
    losses = [[3, "step", 3, "alarm"], [0, "stepped", 4, "kill 2"]]
    flags = "--global-batch-size 4 --train-iters 7 --pipeline-schedule 2bw"
    job = run(tmp_path, 4, f"{flags} --pipeline-model-parallel-size 2", losses)
    assert_nothing_lost(job, flags)
    assert [moment.rank for moment in job.moments if moment.is_loss] == [2], job.outcome.output
    assert "3 ranks of 4 go on from iteration 4" in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    "flags, losses, lost",
    [
        ("bpipe", [
            [0, "move", 2, "kill 2"], [1, "move", 4, "SIGSTOP"], [6, "move", 6, "SIGKILL"],
        ], [2, 1, 6]),
        ("2bw --balance-activations", [[0, "move", 2, "SIGSTOP"], [7, "move", 5, "SIGKILL"]], [0, 7]),
        ("flush --pipeline-offload-activations 3", [
            [0, "backward", 2, "SIGKILL"], [1, "forward", 4, "kill 4"], [3, "chain", 6, "SIGSTOP"],
        ], [0, 4, 3]),
    ],
    ids=["bpipe", "2bw, balanced", "host"],
)  # fmt: skip
def test_activations_move_without_a_rank(tmp_path, flags, losses, lost):
    """Ranks are lost in the middle of a move, with all ranks and without one: the programs of those that are left move
    activations to the pairs that are left, or to the host. Threads that move end with the engine that is given up."""
    batches = "--global-batch-size 16 --train-iters 8"
    shape = f"--pipeline-model-parallel-size 4 --pipeline-schedule {flags}"
    job = run(tmp_path, 8, f"{batches} {shape} --eval-interval 3 --eval-iters 1", losses, timeout=500)
    weights = "2bw" if "2bw" in flags else "flush"
    assert_nothing_lost(job, f"{batches} --pipeline-schedule {weights} --eval-interval 3 --eval-iters 1")
    assert [moment.rank for moment in job.moments if moment.is_loss] == lost, job.outcome.output


SAVING = "--eval-interval 3 --eval-iters 1 --save saved --save-interval 4"


@pytest.mark.full
@pytest.mark.parametrize(
    "flags, losses",
    [
        ("--pipeline-schedule 2bw", [
            [0, "forward", 2, "SIGKILL"], [1, "backward", 3, "SIGSTOP"], [4, "norm", 4, "SIGKILL"],
            [2, "chain", 5, "SIGKILL"], [5, "step", 6, "SIGSTOP"], [6, "stepped", 8, "SIGKILL"],
        ]),
        ("--pipeline-schedule flush", [
            [7, "evaluation", 1, "SIGKILL"], [0, "save", 1, "SIGSTOP"], [4, "new program", 2, "SIGKILL"],
            [1, "forward", 6, "SIGKILL"], [5, "forward", 6, "SIGKILL"], [2, "stepped", 8, "SIGKILL"],
        ]),
        ("--pipeline-schedule zb-h1", [
            [1, "without sums", 3, "broken"], [4, "without sums", 3, "broken"], [0, "stepped", 3, "SIGKILL"],
            [5, "backward", 5, "error"], [2, "new groups", 2, "error"], [7, "norm", 7, "SIGSTOP"],
        ]),
    ],
    ids=["2bw", "flush", "zb-h1"],
)  # fmt: skip
def test_every_place_where_a_rank_can_be_lost(tmp_path, flags, losses):
    """Eight ranks, evaluations and checkpoints: in each part of a batch, between batches, and in a recovery."""
    shape = "--pipeline-model-parallel-size 2 --global-batch-size 8 --train-iters 9"
    job = run(tmp_path, 8, f"{shape} {flags} {SAVING}", losses, timeout=500)
    weights = "2bw" if "2bw" in flags else "flush"
    assert_nothing_lost(
        job, f"--global-batch-size 8 --train-iters 9 --pipeline-schedule {weights} --eval-interval 3 --eval-iters 1"
    )
    expected = sorted(rank for rank, _, _, what in losses if what != "broken")
    assert sorted(moment.rank for moment in job.moments if moment.is_loss) == expected, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("depth, replicas", [(2, 2), (2, 4), (4, 2), (4, 4)])
@pytest.mark.parametrize("schedule", ["flush", "2bw", "zb-h1", "bpipe"])
def test_ranks_are_lost_at_random_moments(tmp_path, schedule, depth, replicas, seed):
    """Ranks are killed or stopped until each stage has one left: 192 losses over all cases, some of them at once."""
    size = depth * replicas
    flags = f"--global-batch-size {size} --train-iters 60 --eval-interval 5 --eval-iters 1"
    shape = f"--pipeline-model-parallel-size {depth} --pipeline-schedule {schedule} --save saved --save-interval 7"
    job, lost = lose_at_random(tmp_path, depth, replicas, f"{flags} {shape}", seed=seed)
    assert len(lost) == depth * (replicas - 1), lost
    assert_nothing_lost(job, f"{flags} --pipeline-schedule {'2bw' if schedule == '2bw' else 'flush'}")
