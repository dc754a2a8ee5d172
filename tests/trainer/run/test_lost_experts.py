"""Runs whose replicas share out experts go on without lost ranks: real jobs, and nothing of the training is lost."""

import pytest

from tests.trainer.run import test_what_loses_ranks
from tests.trainer.run.lost_rank_jobs import (
    MODEL,
    SUMS_IN_FP32,
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
from tests.trainer.run.test_experts import BIASED
from tests.trainer.run.test_lost_tensor_groups import DROPOUT, lost, with_them
from tests.trainer.run.test_what_loses_ranks import (
    ALLTOALL,
    CONTEXT,
    CUT,
    EXPERTS,
    MUON,
    SEQUENCES,
    SHARED_EXPERT,
)

ONE, DEEP = "--pipeline-model-parallel-size 1", "--pipeline-model-parallel-size 2"
VIRTUAL = f"--pipeline-schedule interleaved --num-layers-per-virtual-pipeline-stage 1 {DEEP}"
SHARED, WHOLE = "--expert-model-parallel-size 2", "--expert-tensor-parallel-size 1"
DECAY = f"--lr 1e-3 {test_what_loses_ranks.DECAY}"
"""With larger steps norms have peaks, in which the order of sums shows."""
SAVING = "--save saved --save-interval 3"
SHARDS = "--use-distributed-optimizer"
COPIES = f"{SHARDS} --redundant-optimizer"
NARROW = f"{SHARDS} --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16"
EVALUATED = "--eval-interval 3 --eval-iters 1"
FP16 = f"--fp16 --initial-loss-scale 65536 --loss-scale-window 200 {SUMS_IN_FP32}"
"""Without the rest a router would send single tokens elsewhere: those of undisturbed jobs with other numbers of
replicas do, too."""


def plain(flags: str) -> str:
    """Flags of a run of one pipeline rank that computes the same."""
    left_out = ["--pipeline-schedule", "zb-h1", "bpipe", "flush", "2bw", "--redundant-optimizer"]
    left_out += [] if NARROW in flags else [SHARDS]
    words = [each for each in flags.split() if each not in left_out]
    return " ".join(words) + f" {ONE}" + " --pipeline-schedule 2bw" * (" 2bw" in flags)


def test_replicas_that_share_experts_are_lost_and_come_back(tmp_path):
    """Of two copies of each expert one is lost with rank 0, which owns --save, and rank 1. Both come back together. A
    job of one copy resumes from a checkpoint that the others have saved meanwhile. Weights are predicted: with half of
    the microbatches, of which a copy has all after the loss. Replicas share out the optimizer, and keep copies."""
    losses = [[0, "forward", 3, "SIGKILL"], [2, "forward", 6, "newcomer"]]
    flags = f"--global-batch-size 8 --train-iters 9 {EXPERTS} {BIASED} {ALLTOALL} {SHARED} {DECAY}"
    flags += " --pipeline-schedule 2bw --2bw-provisional uniform --2bw-provisional-reduce"
    one, two = (f"{flags} --2bw-provisional-microbatches {num_read} {ONE}" for num_read in (1, 2))
    saving = f"--save {tmp_path}/saved --save-interval 4 --pipeline-timeline timeline"
    job = run(tmp_path, 4, f"{one} {COPIES} {saving}", losses, max_restarts=1)
    assert_nothing_lost(job, two, num_ranks=2)
    assert "have loaded the checkpoint" not in job.outcome.output
    assert lost(job) == [0] and with_them(job) == {1}, job.outcome.output
    gone, back = changes_recorded(job, world_size=4)
    assert (gone["ranks"], back["ranks"], back["joined_ranks"]) == (2, 4, [0, 1])
    lanes = ["rank 0 (pipeline rank 0)"]
    assert_drawn(tmp_path / "timeline", first=back["iteration"], last=9, size=2, lanes=lanes, is_whole=True)
    resumed = train(2, f"{two} --load {tmp_path}/saved --ckpt-step 4", base=MODEL)
    whole = values(undisturbed(two, 2), "lm_loss")
    assert resumed[-1]["losses"] == pytest.approx({each: whole[each] for each in range(5, 10)}, rel=2e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "losses"),
    [
        (f"{BIASED} --pipeline-schedule 2bw", [[3, "backward", 3, "SIGKILL"], [4, "stepped", 5, "SIGKILL"]]),
        (f"{ALLTOALL} --pipeline-schedule zb-h1", [[6, "chain", 3, "SIGSTOP"], [1, "new groups", 1, "SIGKILL"]]),
        (f"{SEQUENCES} --pipeline-schedule 2bw", [[0, "without sums", 3, "broken"], [7, "stepped", 3, "SIGKILL"]]),
        (f"{ALLTOALL} {SHARED_EXPERT}", [[1, "step", 3, "SIGKILL"], [6, "norm", 6, "SIGKILL"]]),
        (f"{BIASED} --pipeline-schedule 2bw", [[7, "evaluation", 1, "SIGKILL"], [1, "save", 2, "SIGKILL"]]),
        (f"{BIASED} {ALLTOALL} --pipeline-schedule zb-h1", [[2, "backward", 4, "error"]]),
        (f"{COPIES} {BIASED} --pipeline-schedule 2bw", [[3, "copy", 3, "SIGKILL"], [4, "gather", 5, "SIGKILL"]]),
        (f"{COPIES} {ALLTOALL} --pipeline-schedule zb-h1", [
            [6, "copied", 3, "SIGSTOP"], [1, "handed over", 1, "SIGKILL"],
        ]),
        (f"{COPIES} {CONTEXT} --pipeline-schedule 2bw", [
            [0, "without sums", 3, "broken"], [7, "stepped", 3, "SIGKILL"],
        ]),
        (f"{COPIES} --bf16", [[1, "gathered", 4, "SIGKILL"], [6, "save", 2, "SIGKILL"]]),
    ],
)  # fmt: skip
def test_every_place_where_an_expert_group_can_be_lost(tmp_path, flags, losses):
    """In each part of a batch, between batches, and in a recovery."""
    shared = f"--global-batch-size 8 --train-iters 8 {EVALUATED} {EXPERTS} {SHARED} {flags} {DECAY}"
    job = run(tmp_path, 8, f"{shared} {DEEP} {SAVING}", losses, timeout=500)
    assert_nothing_lost(job, plain(shared), num_ranks=2)
    expected = sorted(rank for rank, _, _, what in losses if what != "broken")
    assert sorted(lost(job)) == expected, job.outcome.output
    assert with_them(job) == {rank ^ 1 for rank in expected}, job.outcome.output
    assert "have loaded the checkpoint" not in job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "num_ranks", "together"),
    [
        (f"{SHARED} {BIASED} --pipeline-schedule 2bw {DEEP}", 2, 2),
        (f"{SHARED} {CONTEXT} {ALLTOALL} {DEEP}", 2, 2),  # which share sequences and experts
        (f"--expert-model-parallel-size 4 {CONTEXT} {ALLTOALL} {ONE}", 4, 4),
        (f"{SHARED} {CUT} {ALLTOALL} {BIASED} {ONE}", 4, 4),  # each expert is cut over two ranks
        (f"{SHARED} {WHOLE} {CUT} {DEEP}", 2, 2),  # tensor ranks share out experts
        (f"--expert-model-parallel-size 4 {WHOLE} {CUT} {SEQUENCES} {ONE} --calculate-per-token-loss", 4, 4),
        (f"{SHARED} {DROPOUT} --bf16 {DEEP} --clip-grad 0.5", 2, 2),
        (f"{SHARED} --moe-expert-capacity-factor 1.0 --pipeline-recompute --pipeline-schedule zb-h1 {DEEP}", 2, 2),
        (f"{SHARED} {MUON} --pipeline-schedule 2bw {DEEP}", 2, 2),
        (f"{SHARED} {FP16} {BIASED} {ALLTOALL} --pipeline-schedule 2bw {DEEP}", 2, 2),
        (f"{SHARED} {BIASED} --pipeline-schedule 2bw {DEEP} {COPIES}", 2, 2),
        (f"{SHARED} {CONTEXT} {ALLTOALL} {DEEP} {COPIES} --bf16", 2, 2),
        (f"--expert-model-parallel-size 4 {CONTEXT} {ALLTOALL} {ONE} {COPIES} --clip-grad 0.5", 4, 4),
        (f"{SHARED} {CUT} {ALLTOALL} {BIASED} {ONE} {COPIES} --pipeline-schedule 2bw", 4, 4),
        (f"--expert-model-parallel-size 4 {WHOLE} {CUT} {SEQUENCES} {ONE} --calculate-per-token-loss {COPIES}", 4, 4),
        (f"{SHARED} {DEEP} {COPIES} --moe-layer-freq [0,0,1,1]", 2, 2),  # the first stage has no experts
        (f"{SHARED} {FP16} {DEEP} {COPIES} --pipeline-schedule 2bw", 2, 2),
        (f"{SHARED} {VIRTUAL} {COPIES} {BIASED}", 2, 2),
        (f"{SHARED} {DEEP} {SHARDS} --pipeline-schedule 2bw {BIASED}", 2, 2),
        (f"{SHARED} {MUON} {DEEP} {SHARDS}", 2, 2),
        (f"{SHARED} {MUON} {DEEP} {SHARDS} --pipeline-schedule 2bw --2bw-error-feedback", 2, 2),
        (f"{SHARED} {DEEP} {NARROW}", 2, 2),
    ],
)  # fmt: skip
def test_what_a_new_group_takes_over(tmp_path, flags, num_ranks, together):
    """A rank of the last place is lost, comes back with its group, and one of the first place is lost behind that."""
    losses = [[7, "forward", 4, "SIGKILL"], [0, "forward", 6, "newcomer"], [1, "stepped", 9, "SIGKILL"]]
    shared = f"--global-batch-size 8 --train-iters 11 {EVALUATED} {EXPERTS} {flags} {DECAY}"
    job = run(tmp_path, 8, f"{shared} {SAVING}", losses, max_restarts=1, timeout=500)
    assert_nothing_lost(job, plain(shared.replace(VIRTUAL, "").replace(DEEP, "")), num_ranks=num_ranks)
    first, last = range(together), range(8 - together, 8)
    assert lost(job) == [7, 1] and with_them(job) == {*first, *last} - {1, 7}, job.outcome.output
    assert "8 ranks of 8 go on" in job.outcome.output, job.outcome.output
    loads = 2 if SHARDS in flags and COPIES not in flags else 0
    assert job.outcome.output.count("have loaded the checkpoint") == loads, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("at_once", [True, False])
def test_two_of_three_places_are_lost(tmp_path, at_once):
    """The second one has the copies of the first one's shards. If both are lost at once, the last checkpoint is loaded;
    if one after the other, there are new copies."""
    losses = [[1, "forward", 6, "SIGKILL"], [2, "forward", 6 if at_once else 8, "SIGKILL"]]
    flags = f"--global-batch-size 12 --train-iters 10 {EXPERTS} {BIASED} {SHARED} {DECAY} --pipeline-schedule 2bw"
    job = run(tmp_path, 6, f"{flags} {ONE} {COPIES} --save saved --save-interval 2", losses)
    assert_nothing_lost(job, f"{flags} {ONE}", num_ranks=2)
    assert lost(job) == [1, 2] and with_them(job) == {0, 3}, job.outcome.output
    assert ("have loaded the checkpoint" in job.outcome.output) is at_once, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("copies", ["", COPIES])
def test_tied_embeddings(tmp_path, copies):
    """The gradients of an embedding are summed over all ranks of both stages that are left. Its shards are quarters on
    the one stage then, and halves on the other."""
    losses = [[5, "forward", 3, "SIGKILL"], [0, "forward", 6, "newcomer"]]
    flags = f"--global-batch-size 8 --train-iters 9 {SHARED} {EXPERTS} {DECAY}"
    flags = flags.replace("--untie-embeddings-and-output-weights", "")
    tied = MODEL.replace(" --untie-embeddings-and-output-weights", "")
    job = run(tmp_path, 8, f"{flags} {DEEP} {copies}", losses, max_restarts=1, model=tied)
    assert_nothing_lost(job, f"{flags} {ONE}", num_ranks=2, model=tied)
    assert "8 ranks of 8 go on" in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(("seed", "copies"), [(0, ""), (1, ""), (2, COPIES), (3, COPIES)])
def test_expert_groups_are_lost_at_random_moments(tmp_path, seed, copies):
    """Ranks are killed or stopped until each stage has a group left."""
    shared = f"--global-batch-size 8 --train-iters 40 --eval-interval 5 --eval-iters 1 {EXPERTS} {SHARED} {BIASED}"
    shape = f"{DEEP} --pipeline-schedule 2bw --save saved --save-interval 7 {copies}"
    job, gone = lose_at_random(tmp_path, 2, 2, f"{shared} {shape}", seed=seed, together=2)
    assert len(gone) == 2, gone
    assert_nothing_lost(job, f"{shared} {ONE} --pipeline-schedule 2bw", num_ranks=2)


@pytest.mark.full
@pytest.mark.parametrize("copies", ["", COPIES])
def test_expert_groups_come_back_at_random_moments(tmp_path, copies):
    """Four losses, of groups that have come back, too."""
    shared = f"--global-batch-size 8 --train-iters 20000 --eval-interval 50 --eval-iters 1 {EXPERTS} {SHARED} --lr 1e-4"
    shape = f"{DEEP} --save saved --save-interval 80 {copies}"
    job, gone = lose_and_return_at_random(tmp_path, 2, 2, f"{shared} {shape}", num_losses=4, seed=0, together=2)
    assert len(gone) == 4, gone
    last = max(record["iteration"] for record in job.records)
    assert_nothing_lost(job, f"{shared} {ONE} --exit-interval {last}", num_ranks=2, is_stopped=True)
