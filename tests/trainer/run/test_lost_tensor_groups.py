"""Runs with tensor parallelism go on without lost ranks: real jobs, in which nothing of the training is lost."""

import pytest

from tests.trainer.run.lost_rank_jobs import (
    MODEL,
    assert_drawn,
    assert_nothing_lost,
    changes_recorded,
    lose_and_return_at_random,
    lose_at_random,
    run,
    undisturbed,
    values,
)
from tests.trainer.run.run_case import train

TENSOR = "--tensor-model-parallel-size 2"
SEQUENCE = f"{TENSOR} --sequence-parallel"
SHAPE = "--pipeline-model-parallel-size 2"
ONE = "--pipeline-model-parallel-size 1"
DECAY = "--lr-decay-style linear --lr-warmup-iters 3 --weight-decay 0.1"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


def lost(job) -> list[int]:
    return [moment.rank for moment in job.moments if moment.is_loss]


def with_them(job) -> set[int]:
    """The ranks that were lost with others of their groups."""
    return {
        int(rank)
        for record in job.records
        for rank, why in record.get("lost_ranks", {}).items()
        if "with which it computes its layers" in why
    }


@pytest.mark.full
@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_group_is_lost_and_comes_back(tmp_path, depth):
    """2bw, sequence parallelism and dropout: rank 0, which owns --save and reads the data of its group, is lost, and
    rank 1 with it. Both come back together. A job of one replica resumes from a checkpoint that the others have saved
    meanwhile."""
    size, shape = 4 * depth, f"--pipeline-model-parallel-size {depth}"
    losses = [[0, "forward", 3, "SIGKILL"], [size - 2, "forward", 6, "newcomer"]]
    flags = f"--global-batch-size 4 --train-iters 9 --pipeline-schedule 2bw {SEQUENCE} {DROPOUT} {DECAY}"
    saving = f"--save {tmp_path}/saved --save-interval 4 --log-saved-activations --pipeline-timeline timeline"
    job = run(tmp_path, size, f"{flags} {shape} {saving}", losses, max_restarts=1)
    assert_nothing_lost(job, f"{flags} {ONE}", num_ranks=2)
    assert lost(job) == [0] and with_them(job) == {1}, job.outcome.output
    gone, back = changes_recorded(job, world_size=size)
    assert (gone["ranks"], back["ranks"], back["joined_ranks"]) == (size - 2, size, [0, 1])
    lanes = ["rank 0 (pipeline rank 0)", "rank 4 (pipeline rank 1)"][:depth]
    assert_drawn(tmp_path / "timeline", first=back["iteration"], last=9, size=2, lanes=lanes, is_whole=True)
    resumed = train(2 * depth, f"{flags} {shape} --load {tmp_path}/saved --ckpt-step 4", base=MODEL)
    later = {
        each: loss for each, loss in values(undisturbed(f"{flags} {ONE}", 2, MODEL), "lm_loss").items() if each > 4
    }
    assert resumed[-1]["losses"] == pytest.approx(later, rel=2e-6)


@pytest.mark.full
def test_groups_are_lost_one_after_another(tmp_path):
    """Flush: one rank stops in the chain, and one of another group is killed during that recovery. The log's writer is
    lost with the first. The picture has a lane for each group."""
    losses = [[6, "chain", 3, "SIGSTOP"], [1, "new groups", 1, "SIGKILL"]]
    flags = f"--global-batch-size 4 --train-iters 7 {TENSOR}"
    job = run(tmp_path, 8, f"{flags} {SHAPE} --pipeline-timeline timeline --log-saved-activations", losses)
    assert_nothing_lost(job, f"{flags} {ONE}", num_ranks=2)
    assert sorted(lost(job)) == [1, 6] and with_them(job) == {0, 7}, job.outcome.output
    changes = changes_recorded(job, world_size=8)
    assert changes[-1]["ranks"] == 4
    lanes = ["rank 2 (1.0)", "rank 4 (0.1)"]
    assert_drawn(tmp_path / "timeline", first=changes[-1]["iteration"], last=7, size=4, lanes=lanes)
    held = {
        each["iteration"]: each["saved_activation_bytes"] for each in job.records if "saved_activation_bytes" in each
    }
    assert all(len(each) == 2 and min(each) > 0 for each in held.values()) and 7 in held


@pytest.mark.full
def test_all_groups_of_a_stage_are_lost(tmp_path):
    """One rank of each is killed: the job ends, and says why."""
    losses = [[4, "forward", 2, "SIGKILL"], [7, "forward", 2, "SIGKILL"]]
    job = run(tmp_path, 8, f"--global-batch-size 4 --train-iters 1000 {TENSOR} {SHAPE}", losses)
    job.outcome.assert_failed_clearly(
        "every replica has lost rank 1, so nobody holds the weights of stage 1; restart from the last checkpoint"
    )


SAVING = "--eval-interval 3 --eval-iters 1 --save saved --save-interval 4"


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "losses"),
    [
        (f"{TENSOR} --pipeline-schedule zb-h1", [[1, "step", 3, "SIGKILL"], [6, "stepped", 5, "SIGKILL"]]),
        (f"{SEQUENCE} --pipeline-schedule flush", [[0, "without sums", 3, "broken"], [5, "stepped", 3, "SIGKILL"]]),
        (f"{SEQUENCE} --pipeline-schedule zb-h1 --clip-grad 0.5", [[3, "norm", 3, "SIGSTOP"]]),
        (f"{TENSOR} --pipeline-schedule 2bw", [[7, "evaluation", 1, "SIGKILL"], [1, "save", 1, "SIGKILL"]]),
        (f"{TENSOR} --pipeline-schedule 2bw", [[2, "without sums", 3, "broken"], [6, "stepped", 4, "SIGKILL"],
                                               [0, "new program", 1, "SIGKILL"]]),
        (f"{TENSOR} --pipeline-schedule bpipe", [[2, "backward", 3, "error"]]),
        (f"{TENSOR} --pipeline-schedule interleaved --num-layers-per-virtual-pipeline-stage 1 --num-layers 4",
         [[4, "forward", 3, "SIGKILL"]]),
    ],
)  # fmt: skip
def test_every_place_where_a_group_can_be_lost(tmp_path, flags, losses):
    """In each part of a batch, between batches, and in a recovery."""
    shared = f"--global-batch-size 8 --train-iters 8 {flags}"
    job = run(tmp_path, 8, f"{shared} {SHAPE} {SAVING}", losses, timeout=500)
    words = shared.split()
    at = words.index("--pipeline-schedule")
    weights = words[at + 1] if words[at + 1] == "2bw" else "flush"
    plain = " ".join([*words[:at], "--pipeline-schedule", weights, *words[at + 2 :]])
    plain = plain.replace("--num-layers-per-virtual-pipeline-stage 1 ", "")
    assert_nothing_lost(job, f"{plain} {ONE} --eval-interval 3 --eval-iters 1", num_ranks=2)
    expected = sorted(rank for rank, _, _, what in losses if what != "broken")
    assert sorted(lost(job)) == expected, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        f"{TENSOR} --pipeline-schedule zb-h1",
        f"{SEQUENCE} --pipeline-schedule bpipe",
        f"{SEQUENCE} --fp16 --initial-loss-scale 1024 --loss-scale-window 2",
        f"{TENSOR} {DROPOUT} --calculate-per-token-loss --num-workers 2 --clip-grad 0.5",
        f"{SEQUENCE} --pipeline-recompute --bf16",
    ],
)
def test_what_a_new_group_takes_over(tmp_path, flags):
    """A rank of the last stage and one of the first are lost at once, and come back with their groups."""
    losses = [[1, "forward", 3, "SIGKILL"], [6, "forward", 3, "SIGKILL"]]
    losses += [[2, "forward", iteration, "newcomer"] for iteration in (6, 9)]
    shared = f"--global-batch-size 8 --train-iters 12 {flags}"
    job = run(tmp_path, 8, f"{shared} {SHAPE}", losses, max_restarts=1)
    for schedule in ("zb-h1", "bpipe"):
        shared = shared.replace(f"--pipeline-schedule {schedule}", "")
    assert_nothing_lost(job, f"{shared} {ONE}", num_ranks=2)
    assert "8 ranks of 8 go on" in job.outcome.output and with_them(job) == {0, 7}, job.outcome.output


@pytest.mark.full
def test_tied_embeddings(tmp_path):
    """Each tensor rank adds up the gradients of its part of the embedding with the same one of the other stage."""
    losses = [[5, "forward", 3, "SIGKILL"], [0, "forward", 6, "newcomer"]]
    flags = f"--global-batch-size 4 --train-iters 10 {TENSOR}"
    tied = MODEL.replace(" --untie-embeddings-and-output-weights", "")
    job = run(tmp_path, 8, f"{flags} {SHAPE}", losses, max_restarts=1, model=tied)
    assert_nothing_lost(job, f"{flags} {ONE}", num_ranks=2, model=tied)


@pytest.mark.full
def test_others_are_lost_while_a_group_comes_back(tmp_path):
    """A rank of the new group fails while it takes the state over, a second time both come. Then a rank that has given
    it is killed when the group has it."""
    losses = [
        [1, "forward", 2, "SIGKILL"],
        [4, "forward", 5, "newcomer"],
        [1, "restoring", 1, "error", 1],
        [4, "forward", 9, "newcomer"],
        [1, "new program", 1, "kill 2", 2],
        [4, "forward", 13, "newcomer"],
    ]
    flags = f"--global-batch-size 4 --train-iters 18 {TENSOR} {DECAY}"
    job = run(tmp_path, 8, f"{flags} {SHAPE}", losses, max_restarts=2)
    assert_nothing_lost(job, f"{flags} {ONE}", num_ranks=2)
    assert lost(job) == [1, 1, 2], job.outcome.output
    assert "8 ranks of 8 go on" in job.outcome.output, job.outcome.output


SHARDS = "--use-distributed-optimizer"


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "copies"),
    [
        (f"{SEQUENCE} --pipeline-schedule 2bw --clip-grad 0.5", "--redundant-optimizer"),
        (f"{TENSOR} --bf16", "--redundant-optimizer"),
        (f"{TENSOR}", ""),
    ],
)
def test_shards_of_the_optimizer(tmp_path, flags, copies):
    """Each tensor rank's shards are those of its part of the model: they are rebuilt from copies, or all ranks go back
    to a checkpoint. A group that comes back has them from memory, and another is lost behind that."""
    losses = [[2, "stepped", 4, "SIGKILL"], [4, "forward", 8, "newcomer"], [1, "step", 11, "SIGKILL"]]
    shared = f"--global-batch-size 4 --train-iters 13 {DECAY} {flags}"
    saving = f"--save {tmp_path}/saved --save-interval 3"
    job = run(tmp_path, 8, f"{shared} {SHAPE} {SHARDS} {copies} {saving}", losses, max_restarts=1, timeout=500)
    assert_nothing_lost(job, f"{shared} {ONE}", num_ranks=2)
    assert lost(job) == [2, 1] and with_them(job) == {0, 3}, job.outcome.output
    assert "8 ranks of 8 go on" in job.outcome.output, job.outcome.output
    assert ("have loaded the checkpoint" in job.outcome.output) is not bool(copies)


CONTEXT = "--context-parallel-size 2"


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "tensor"),
    [
        (f"{CONTEXT} --pipeline-schedule 2bw", 1),
        (f"{CONTEXT} --pipeline-schedule zb-h1 --calculate-per-token-loss", 1),
        (f"{CONTEXT} {SHARDS} --redundant-optimizer", 1),
        (f"{CONTEXT} --cp-comm-type a2a --bf16", 1),
        (f"{CONTEXT} {SEQUENCE} --clip-grad 0.5", 2),
    ],
)
def test_ranks_that_share_sequences(tmp_path, flags, tensor):
    """Context parallelism: these are lost together, and come back together, those of a tensor parallel group with
    them."""
    shape = SHAPE if tensor == 1 else ONE
    losses = [[3, "backward", 3, "SIGKILL"], [4, "forward", 6, "newcomer"]]
    shared = f"--global-batch-size 4 --train-iters 9 {DECAY} {flags}"
    job = run(tmp_path, 8, f"{shared} {shape}", losses, max_restarts=1, timeout=500)
    plain = shared.replace("--pipeline-schedule zb-h1", "").replace(f"{SHARDS} --redundant-optimizer", "")
    assert_nothing_lost(job, f"{plain} {ONE}", num_ranks=2 * tensor)
    assert lost(job) == [3] and with_them(job) == ({2} if tensor == 1 else {0, 1, 2}), job.outcome.output
    assert "8 ranks of 8 go on" in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("flags", ["", f"{SHARDS} --redundant-optimizer"])
def test_tied_embeddings_of_ranks_that_share_sequences(tmp_path, flags):
    """A stage lacks a place that the other one has, so their shards of the embedding are unlike."""
    losses = [[1, "forward", 3, "SIGKILL"], [4, "forward", 6, "newcomer"]]
    shared = f"--global-batch-size 4 --train-iters 9 {CONTEXT} {DECAY}"
    tied = MODEL.replace(" --untie-embeddings-and-output-weights", "")
    job = run(tmp_path, 8, f"{shared} {SHAPE} {flags}", losses, max_restarts=1, model=tied, timeout=500)
    assert_nothing_lost(job, f"{shared} {ONE}", num_ranks=2, model=tied)
    assert "8 ranks of 8 go on" in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("flags", [f"{TENSOR} --pipeline-schedule zb-h1", f"{SEQUENCE} --pipeline-schedule 2bw"])
def test_groups_are_lost_at_random_moments(tmp_path, flags, seed):
    """Ranks are killed or stopped until each stage has a group left."""
    shared = "--global-batch-size 4 --train-iters 60 --eval-interval 5 --eval-iters 1"
    shape = f"{SHAPE} {flags} --save saved --save-interval 7"
    job, gone = lose_at_random(tmp_path, 2, 2, f"{shared} {shape}", seed=seed, together=2)
    assert len(gone) == 2, gone
    assert_nothing_lost(job, f"{shared} {ONE} {flags.replace('zb-h1', 'flush')}", num_ranks=2)


@pytest.mark.full
def test_groups_come_back_at_random_moments(tmp_path):
    """Four losses, of groups that have come back, too."""
    shared = "--global-batch-size 4 --train-iters 20000 --eval-interval 50 --eval-iters 1 --lr 1e-4"
    shape = f"{SHAPE} {SEQUENCE} --pipeline-schedule 2bw --save saved --save-interval 80"
    job, gone = lose_and_return_at_random(tmp_path, 2, 2, f"{shared} {shape}", num_losses=4, seed=0, together=2)
    assert len(gone) == 4, gone
    last = max(record["iteration"] for record in job.records)
    plain = f"{shared} {SEQUENCE} {ONE} --pipeline-schedule 2bw --exit-interval {last}"
    assert_nothing_lost(job, plain, num_ranks=2, is_stopped=True)
