"""New processes take the places of lost ranks where replicas share out the optimizer: all shards are cut anew."""

import pytest

from tests.trainer.run.lost_rank_jobs import (
    MODEL,
    assert_nothing_lost,
    changes_recorded,
    lose_and_return_at_random,
    run,
    undisturbed,
    values,
)
from tests.trainer.run.run_case import train

SHARED = "--use-distributed-optimizer"
COPIES = f"{SHARED} --redundant-optimizer"
DECAY = "--lr-decay-style linear --lr-warmup-iters 3 --weight-decay 0.1"
MUON = "--optimizer muon --muon-fp32-matmul-prec high --lr 1e-3"
NARROW = "--bf16 --use-precision-aware-optimizer --exp-avg-sq-dtype bf16"
FP16 = "--fp16 --initial-loss-scale 1024 --loss-scale-window 2"


def lost(job) -> list[int]:
    return [moment.rank for moment in job.moments if moment.is_loss]


def assert_returned(job, *, world_size: int, times: int = 1) -> None:
    """Ranks came back, after which all are there, and no checkpoint was loaded for that."""
    whole = [each for each in changes_recorded(job, world_size=world_size) if each["ranks"] == world_size]
    assert len(whole) == times and all(each["joined_ranks"] for each in whole), job.outcome.output
    assert "have loaded the checkpoint" not in job.outcome.output


def test_a_new_process_has_a_shard_and_a_copy(tmp_path):
    """2bw, two replicas: rank 1 is lost and comes back, then rank 0 is lost behind its own step. What is left is what
    the new process of rank 1 was handed over, or has computed from it."""
    losses = [[1, "forward", 3, "SIGKILL"], [0, "forward", 5, "newcomer"], [0, "stepped", 9, "SIGKILL"]]
    flags = f"--global-batch-size 4 --train-iters 12 --pipeline-schedule 2bw --clip-grad 0.5 {DECAY}"
    job = run(tmp_path, 2, f"{flags} --pipeline-model-parallel-size 1 {COPIES}", losses, max_restarts=1)
    assert_nothing_lost(job, flags)
    assert_returned(job, world_size=2)
    assert lost(job) == [1, 0], job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("replicas", "schedule", "flags"),
    [
        (2, "flush", ""),
        (2, "2bw", "--bf16"),
        (3, "2bw", FP16),
        (3, "zb-h1", ""),
        (2, "zb-h1", "--bf16 --attention-dropout 0.1 --hidden-dropout 0.1"),
        (3, "flush", FP16),
    ],
)
def test_another_rank_is_lost_after_the_return(tmp_path, replicas, schedule, flags):
    """A rank of each of two stages is lost and comes back, then another one of the first stage. The checkpoint from
    between is a usual one."""
    size = 2 * replicas
    losses = [[1, "chain", 3, "SIGKILL"], [size - 1, "forward", 3, "SIGKILL"]]
    losses += [[replicas, "forward", iteration, "newcomer"] for iteration in (5, 8)] + [[0, "step", 13, "SIGKILL"]]
    common = f"--global-batch-size {size} --train-iters 16 --clip-grad 0.5 {DECAY} {flags}"
    shape = f"--pipeline-model-parallel-size 2 {COPIES} --save {tmp_path}/saved --save-interval 12"
    job = run(tmp_path, size, f"{common} --pipeline-schedule {schedule} {shape}", losses, max_restarts=1)
    weights = f"--pipeline-schedule {'2bw' if schedule == '2bw' else 'flush'}"
    assert_nothing_lost(job, f"{common} {weights}")
    assert "have loaded the checkpoint" not in job.outcome.output
    assert f"{size} ranks of {size} go on" in job.outcome.output and sorted(lost(job)) == [0, 1, size - 1]
    resumed = train(1, f"{common} {weights} --load {tmp_path}/saved --ckpt-step 12", base=MODEL)
    later = {each: loss for each, loss in values(undisturbed(f"{common} {weights}"), "lm_loss").items() if each > 12}
    assert resumed[-1]["losses"] == pytest.approx(later, rel=1e-3 if FP16 in flags else 2e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    "place", ["new groups", "hand over", "handed over", "new copies", "shards taken", "new program"]
)
@pytest.mark.parametrize("dies", ["old", "new"])
def test_a_rank_is_lost_in_the_return_of_another(tmp_path, place, dies):
    """Three replicas: rank 1 comes back when rank 2, whose shard comes from its copy then, or its own new process is
    killed at the place."""
    times = {"old": 3, "new": 1} if place == "new copies" else {"old": 2, "new": 1}
    second = [2, place, times["old"], "SIGKILL"] if dies == "old" else [1, place, 1, "SIGKILL", 1]
    losses = [[1, "forward", 3, "SIGKILL"], [0, "forward", 5, "newcomer"], second]
    losses += [[0, "forward", 10, "newcomer"]] if dies == "new" else []
    flags = f"--global-batch-size 6 --train-iters 14 --pipeline-schedule 2bw {DECAY}"
    shape = f"--pipeline-model-parallel-size 1 {COPIES}"
    job = run(tmp_path, 3, f"{flags} {shape}", losses, max_restarts=2 if dies == "new" else 1)
    assert_nothing_lost(job, flags)
    assert lost(job) == [1, second[0]], job.outcome.output
    assert "have loaded the checkpoint" not in job.outcome.output
    assert dies == "old" or "3 ranks of 3 go on" in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("flags", ["", MUON, f"{MUON} --bf16", f"{NARROW} --exp-avg-dtype bf16"])
def test_a_return_needs_no_copies(tmp_path, flags):
    """Without copies the loss takes the ranks back to the checkpoint, and the return does not."""
    losses = [[1, "forward", 6, "SIGKILL"], [0, "forward", 8, "newcomer"]]
    flags = f"--global-batch-size 4 --train-iters 13 --pipeline-schedule 2bw {SHARED} {DECAY} {flags}"
    saving = f"--pipeline-model-parallel-size 1 --save {tmp_path}/saved --save-interval 4"
    job = run(tmp_path, 2, f"{flags} {saving}", losses, max_restarts=1)
    assert_nothing_lost(job, flags)
    assert "2 ranks of 2 go on" in job.outcome.output, job.outcome.output
    assert job.outcome.output.count("have loaded the checkpoint") == 1, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("predicted", ["", "--2bw-error-feedback"])
def test_a_new_process_that_cannot_take_its_part_ends_alone(tmp_path, predicted):
    """The others go on, and take the next one in. What they have exchanged of predictions for the first one counts."""
    losses = [[1, "forward", 6, "SIGKILL"], [0, "forward", 8, "newcomer"], [1, "restoring", 1, "error", 1]]
    losses += [[0, "forward", 12, "newcomer"]]
    flags = f"--global-batch-size 4 --train-iters 15 --pipeline-schedule 2bw {predicted} {SHARED} {DECAY} {MUON}"
    shape = f"--pipeline-model-parallel-size 1 --save {tmp_path}/saved --save-interval 4"
    job = run(tmp_path, 2, f"{flags} {shape}", losses, max_restarts=2)
    assert_nothing_lost(job, flags)
    assert "planted in restoring" in job.outcome.output, job.outcome.output
    assert "2 ranks of 2 go on" in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("place", ["new groups", "restoring", "shards taken", "new program"])
@pytest.mark.parametrize("dies", ["old", "new"])
def test_a_rank_is_lost_in_the_return_to_owners(tmp_path, place, dies):
    """Three replicas that own whole parameters. If an old rank is killed where another's new process comes in, all go
    back to the checkpoint, if the new process is, they do not before it has its part."""
    second = [2, place, 2, "SIGKILL"] if dies == "old" else [1, place, 1, "SIGKILL", 1]
    losses = [[1, "forward", 6, "SIGKILL"], [0, "forward", 8, "newcomer"], second]
    losses += [[0, "forward", 13, "newcomer"]] if dies == "new" else []
    flags = f"--global-batch-size 6 --train-iters 16 --pipeline-schedule 2bw {SHARED} {DECAY} {MUON}"
    shape = f"--pipeline-model-parallel-size 1 --save {tmp_path}/saved --save-interval 4"
    job = run(tmp_path, 3, f"{flags} {shape}", losses, max_restarts=2 if dies == "new" else 1)
    assert_nothing_lost(job, flags)
    assert lost(job) == [1, second[0]], job.outcome.output
    loads = job.outcome.output.count("have loaded the checkpoint")
    assert loads == 1 + (dies == "old" or place in ("shards taken", "new program")), job.outcome.output


READS = "2bw --2bw-provisional uniform --2bw-provisional-microbatches"


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "whole"), [("2bw", "2bw"), ("zb-h1", "flush"), (f"{READS} 1 --2bw-provisional-reduce", f"{READS} 2")]
)
def test_shards_return_at_random_moments(tmp_path, schedule, whole):
    """Six losses in each job, of ranks that have come back, too. Of two replicas one is left, which has both shards."""
    flags = "--global-batch-size 4 --train-iters 20000 --eval-interval 50 --eval-iters 1 --lr 1e-4"
    shape = f"--pipeline-model-parallel-size 2 --pipeline-schedule {schedule} {COPIES} --save saved --save-interval 80"
    job, ranks = lose_and_return_at_random(tmp_path, 2, 2, f"{flags} {shape}", num_losses=6, seed=0)
    assert len(ranks) == 6, ranks
    assert "have loaded the checkpoint" not in job.outcome.output
    last = max(record["iteration"] for record in job.records)
    assert_nothing_lost(job, f"{flags} --pipeline-schedule {whole} --exit-interval {last}", is_stopped=True)
