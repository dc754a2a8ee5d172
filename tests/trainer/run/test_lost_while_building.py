"""Ranks are lost while a job proves its programs, reads data, builds the model and loads a checkpoint: real jobs, which
train from the first batch on as if no rank had been lost."""

import pytest

from tests.trainer.arguments import bert_command_line
from tests.trainer.run import test_t5
from tests.trainer.run.lost_rank_jobs import (
    TIMEOUT,
    Trained,
    assert_nothing_lost,
    changes_recorded,
    gpt,
    lose_at_random,
    run,
)
from tests.trainer.run.run_case import BASE, table, train
from tests.trainer.run.test_experts import BIASED
from tests.trainer.run.test_what_loses_ranks import ALLTOALL, EXPERTS, MUON

SHAPE = "--pipeline-model-parallel-size 2"


def lost(job) -> list[int]:
    return [moment.rank for moment in job.moments if moment.is_loss]


def test_what_is_left_of_a_job_loads_the_checkpoint_and_trains(tmp_path):
    """Six ranks with a tied embedding become three: one dies while programs are proved. Rank 0, which owns --save,
    stops when it has read the data. One has an error of its own when it has loaded the checkpoint of another job."""
    losses = [[1, "proofs", 1, "SIGKILL"], [0, "read", 1, "SIGSTOP"], [5, "loaded", 1, "error"]]
    flags = f"--global-batch-size 6 --train-iters 5 --load {tmp_path}/first --hidden-dropout 0.1"
    train(1, f"{flags} --save {tmp_path}/first --exit-interval 2", base=BASE)
    saving = f"--save {tmp_path}/saved --save-interval 4"
    job = run(tmp_path, 6, f"{flags} {SHAPE} {saving}", losses, model=BASE)
    assert_nothing_lost(job, flags, model=BASE)
    assert sorted(lost(job)) == [0, 1, 5], job.outcome.output
    [change] = changes_recorded(job, world_size=6)
    assert (change["iteration"], change["ranks"], sorted(change["lost_ranks"])) == (2, 3, ["0", "1", "5"])
    assert "planted in loaded" in job.outcome.output and "\n3 ranks of 6 on cpu" in job.outcome.output, (
        job.outcome.output
    )
    assert (tmp_path / "saved" / "iter_0000005").exists() and not list((tmp_path / "saved").glob(".owner*"))


def test_a_rank_is_lost_when_all_have_built_their_parts_and_comes_back(tmp_path):
    """The rank that is left keeps what it has built."""
    losses = [[1, "told", 1, "SIGKILL"], [0, "forward", 3, "newcomer"]]
    flags = "--global-batch-size 4 --train-iters 6"
    job = run(tmp_path, 2, f"{flags} --pipeline-model-parallel-size 1", losses, max_restarts=1)
    assert_nothing_lost(job, flags)
    gone, back = changes_recorded(job, world_size=2)
    assert (gone["iteration"], gone["ranks"], back["joined_ranks"]) == (0, 1, [1]), job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP", "error"])
@pytest.mark.parametrize("place", ["proofs", "groups", "outputs", "read", "build", "built", "told"])
def test_every_place_of_building(tmp_path, place, what):
    flags = "--global-batch-size 4 --train-iters 3"
    job = run(tmp_path, 4, f"{flags} {SHAPE} --save saved", [[1, place, 1, what]], model=BASE)
    assert_nothing_lost(job, flags, model=BASE)
    assert lost(job) == [1], job.outcome.output
    assert [each["ranks"] for each in changes_recorded(job, world_size=4)] == [3]


@pytest.mark.full
def test_the_rank_that_makes_the_indices_of_samples_may_be_silent(tmp_path):
    """It holds its interpreter for longer than the failure timeout, and stays."""
    flags = "--global-batch-size 4 --train-iters 3 --seed 77"
    job = run(tmp_path, 2, f"{flags} --pipeline-model-parallel-size 1", [[0, "indices", 1, f"hold {TIMEOUT + 4:.0f}"]])
    assert_nothing_lost(job, flags)
    assert "hold" in {moment.what.partition(":")[2] for moment in job.moments} and not changes_recorded(
        job, world_size=2
    ), job.outcome.output


@pytest.mark.full
def test_a_rank_that_is_stopped_while_it_may_be_silent_is_left_out(tmp_path):
    """The others notice it before their own waits time out."""
    flags = "--global-batch-size 6 --train-iters 3 --seed 78 --distributed-timeout-minutes 0.4"
    job = run(tmp_path, 3, f"{flags} --pipeline-model-parallel-size 1", [[0, "indices", 1, "SIGSTOP"]])
    assert job.outcome.status == 0 and lost(job) == [0], job.outcome.output
    assert [each["ranks"] for each in changes_recorded(job, world_size=3)] == [2]


@pytest.mark.full
@pytest.mark.parametrize("losses, flags, max_restarts, sentence", [
    ([[2, "proofs", 1, "SIGKILL"], [3, "build", 1, "SIGKILL"]], "", 2,
     "every replica has lost rank 1, so nobody holds the weights of stage 1"),
    ([[1, "read", 1, "SIGKILL"]], "--load empty --exit-on-missing-checkpoint", 2,
     "--load empty holds no checkpoint, and --exit-on-missing-checkpoint is given"),
    ([[0, "proofs", 1, "SIGKILL"]], "--minimum-speed 0.95", 0,
     "rank 1: --minimum-speed 0.95: without a rank the job has at most "),
], ids=["all replicas", "the user's error", "too slow, and rank 0 is lost"])  # fmt: skip
def test_a_job_that_cannot_be_built_ends(tmp_path, losses, flags, max_restarts, sentence):
    """No new process is started for what would end so again."""
    (tmp_path / "empty").mkdir()
    shape = f"--global-batch-size 4 --train-iters 1000 {SHAPE}"
    job = run(tmp_path, 4, f"{shape} {flags}", losses, max_restarts=max_restarts)
    job.outcome.assert_failed_clearly(sentence, within=240)
    assert "the job is ended" in job.outcome.output


def t5() -> Trained:
    return Trained("pretrain_t5", test_t5.BASE, bert_command_line.data_flags())


def tied() -> Trained:
    return gpt(BASE)


SHARDS = "--use-distributed-optimizer"

# name: (program, ranks, flags, flags of the job alone, ranks of the undisturbed job, and its flags)
RUNS = {
    "shards": (tied, 4, "", f"{SHAPE} {SHARDS}", 1, ""),
    "copies of shards": (tied, 4, "--clip-grad 0.5", f"{SHAPE} {SHARDS} --redundant-optimizer", 1, ""),
    "virtual stages": (
        tied, 4, "", f"{SHAPE} --pipeline-schedule interleaved --num-layers-per-virtual-pipeline-stage 1", 1, "",
    ),
    "2bw, fp16": (gpt, 4, "--pipeline-schedule 2bw --fp16 --initial-loss-scale 1024", SHAPE, 1, ""),
    "an embedding on two stages": (tied, 4, "--mtp-num-layers 1 --position-embedding-type rope", SHAPE, 1, ""),
    "batches that grow": (tied, 4, "--rampup-batch-size 4 2 16 --global-batch-size 8", SHAPE, 1, ""),
    "an embedding on three stages": (t5, 8, "--lr 1e-3", "--pipeline-model-parallel-size 4", 1, ""),
    "experts": (gpt, 4, EXPERTS, SHAPE, 1, ""),
    "tensor groups": (
        tied, 8, "--tensor-model-parallel-size 2 --sequence-parallel", SHAPE, 2, "--pipeline-model-parallel-size 1",
    ),
    "shared experts, predicted weights and copies": (  # after a loss a copy reads the microbatches of both replicas
        gpt, 4, f"--train-iters 8 --global-batch-size 8 {EXPERTS} {BIASED} {ALLTOALL} --expert-model-parallel-size 2 "
        "--lr 1e-3 --pipeline-schedule 2bw --2bw-provisional uniform --2bw-provisional-reduce "
        "--pipeline-model-parallel-size 1",
        f"{SHARDS} --redundant-optimizer --2bw-provisional-microbatches 1", 2, "--2bw-provisional-microbatches 2",
    ),
    "muon": (gpt, 4, f"{MUON} --pipeline-schedule 2bw", f"{SHAPE} {SHARDS}", 1, ""),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("place", ["build", "told"])
@table("trained, num_ranks, flags, shape, num_undisturbed, more", RUNS, usual=len(RUNS))
def test_what_is_built_without_a_rank(tmp_path, trained, num_ranks, flags, shape, num_undisturbed, more, place):
    """Rank 0 is lost, and its new process takes everything over from ranks that were built without it."""
    flags = f"--global-batch-size 4 --train-iters 5 {flags}"
    losses = [[0, place, 1, "SIGKILL"], [num_ranks - 1, "forward", 3, "newcomer"]]
    job = run(tmp_path, num_ranks, f"{flags} {shape}", losses, trained=trained(), max_restarts=1, timeout=400)
    assert_nothing_lost(job, f"{flags} {more}", num_ranks=num_undisturbed, trained=trained())
    gone, back = changes_recorded(job, world_size=num_ranks)
    assert 0 not in gone["joined_ranks"] and 0 in back["joined_ranks"] and back["ranks"] == num_ranks


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_ranks_are_lost_at_random_moments(tmp_path, seed):
    """Ranks are killed or stopped until each stage has one left: 32 losses over all seeds, most of them while ranks
    build. Each seed draws other samples, whose indices are made by the job."""
    flags = f"--global-batch-size 6 --train-iters 4 --seed {1000 + seed}"
    job, gone = lose_at_random(
        tmp_path, 2, 3, f"{flags} {SHAPE} --save saved", seed=seed, building=2.0, max_restarts=seed % 2
    )
    assert len(gone) == 4, gone
    assert_nothing_lost(job, flags)
