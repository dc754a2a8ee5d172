"""New processes take the places of lost ranks: real jobs, in which nothing of the training is lost."""

import json
import re
from collections import Counter

import pytest

from tests.trainer.run.lost_rank_jobs import (
    assert_drawn,
    assert_nothing_lost,
    changes_recorded,
    lose_and_return_at_random,
    on_nodes,
    run,
    run_command,
)
from tests.trainer.run.run_case import ROOT

DECAY = "--lr-decay-style linear --lr-warmup-iters 3 --weight-decay 0.1"


def test_rank_0_comes_back(tmp_path):
    """2bw: rank 0, which owns --save, is lost and comes back. The last batches run under the program of all ranks."""
    losses = [[0, "forward", 3, "SIGKILL"], [2, "forward", 5, "newcomer"]]
    flags = f"--global-batch-size 4 --train-iters 10 --pipeline-schedule 2bw --eval-interval 3 --eval-iters 2 {DECAY}"
    saving = f"--pipeline-model-parallel-size 2 --save {tmp_path}/saved --save-interval 5"
    job = run(tmp_path, 4, f"{flags} {saving} --pipeline-timeline timeline", losses, max_restarts=1)
    assert_nothing_lost(job, flags)
    lost, back = changes_recorded(job, world_size=4)
    assert (lost["ranks"], back["ranks"], back["joined_ranks"], back["slowdown"]) == (3, 4, [0], 1.0)
    lanes = ["rank 0 (pipeline rank 0)", "rank 2 (pipeline rank 1)"]
    assert_drawn(tmp_path / "timeline", first=back["iteration"], last=10, size=2, lanes=lanes, is_whole=True)
    assert "rank 0 is back: 4 ranks of 4 go on" in job.outcome.output, job.outcome.output
    assert "a batch takes as long as before any loss" in job.outcome.output, job.outcome.output
    assert sorted(path.name for path in (tmp_path / "saved").glob("iter_*")) == ["iter_0000005", "iter_0000010"]
    assert not list((tmp_path / "saved").glob(".owner*"))


@pytest.mark.full
def test_a_rank_is_lost_before_the_first_batch_is_done(tmp_path):
    """Rank 0 is the last to build its part. Rank 1 trains only behind that, is killed in its first forward, and comes
    back."""
    losses = [[0, "built", 1, "sleep 4"], [1, "forward", 1, "SIGKILL"], [0, "forward", 3, "newcomer"]]
    flags = f"--global-batch-size 4 --train-iters 6 {DECAY}"
    job = run(tmp_path, 2, f"{flags} --pipeline-model-parallel-size 1", losses, max_restarts=1)
    assert_nothing_lost(job, flags)
    slept, killed = (
        next(each.time for each in job.moments if each.what.startswith(what)) for what in ("built", "forward")
    )
    assert killed - slept > 4, job.moments
    lost, back = changes_recorded(job, world_size=2)
    assert (lost["iteration"], lost["ranks"], back["joined_ranks"]) == (0, 1, [1]), job.outcome.output


@pytest.mark.full
def test_ranks_come_back_one_after_another(tmp_path):
    """2bw: rank 0 and the writer of the log are lost. One of them comes back to a job that still lacks the other."""
    losses = [[0, "forward", 3, "SIGKILL"], [3, "chain", 4, "SIGSTOP"]]
    losses += [[2, "forward", iteration, "newcomer"] for iteration in (8, 11)]
    flags = f"--global-batch-size 4 --train-iters 16 --pipeline-schedule 2bw --eval-interval 3 --eval-iters 2 {DECAY}"
    job = run(tmp_path, 4, f"{flags} --pipeline-model-parallel-size 2", losses, max_restarts=1)
    assert_nothing_lost(job, flags)
    output = job.outcome.output
    assert "rank 0 is back: 3 ranks of 4" in output and "rank 3 is back: 4 ranks of 4" in output, output


@pytest.mark.full
def test_others_are_lost_while_a_rank_comes_back(tmp_path):
    """Flush, with an evaluation at every border. The batch with the request breaks on one rank. The first new process
    has an error while it takes the state over, with which the others do not end. When the second one has taken it, a
    rank that gave it is killed; and when that one's new process has it, another rank is."""
    losses = [
        [1, "forward", 2, "SIGKILL"],
        [2, "forward", 4, "newcomer"],
        [3, "without sums", 5, "broken"],
        [1, "restoring", 1, "error", 1],
        [2, "forward", 8, "newcomer"],
        [1, "restored", 1, "kill 0", 2],
        [2, "forward", 12, "newcomer"],
        [4, "regroup", 5, "SIGKILL"],
        [2, "forward", 16, "newcomer"],
    ]
    flags = f"--global-batch-size 6 --train-iters 20 --eval-interval 1 --eval-iters 1 {DECAY}"
    job = run(tmp_path, 6, f"{flags} --pipeline-model-parallel-size 2", losses, max_restarts=2)
    assert_nothing_lost(job, flags)
    assert [moment.rank for moment in job.moments if moment.is_loss] == [1, 1, 0, 4], job.outcome.output
    assert "6 ranks of 6 go on" in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-schedule zb-h1",
        "--pipeline-schedule bpipe",
        "--fp16 --initial-loss-scale 4294967296 --loss-scale-window 2",  # all losses overflow
        "--fp16 --initial-loss-scale 1024 --loss-scale-window 2",
        "--attention-dropout 0.1 --hidden-dropout 0.1 --calculate-per-token-loss --num-workers 2 --clip-grad 0.5",
        "--pipeline-recompute --bf16",
    ],
)
def test_what_a_new_process_takes_over(tmp_path, flags):
    """A rank of the last stage and one of the first are lost at once, and come back."""
    losses = [[1, "forward", 3, "SIGKILL"], [6, "forward", 3, "SIGKILL"]]
    losses += [[3, "forward", iteration, "newcomer"] for iteration in (6, 9)]
    shared = f"--global-batch-size 8 --train-iters 12 {flags}"
    job = run(tmp_path, 8, f"{shared} --pipeline-model-parallel-size 4", losses, max_restarts=1)
    for schedule in ("zb-h1", "bpipe"):
        shared = shared.replace(f"--pipeline-schedule {schedule}", "")
    assert_nothing_lost(job, shared)
    assert "8 ranks of 8 go on" in job.outcome.output, job.outcome.output


TORCHRUN = ["-m", "torch.distributed.run", "--max-restarts", "2"]
LAUNCHER = [str(ROOT / "tools" / "launch.py"), "--max-restarts", "2"]


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher, num_nodes, num_local, lost, back",
    [
        (TORCHRUN, 4, 1, (0, 1), (0, 1)),  # an agent a rank; that of rank 0 hosts the store
        (TORCHRUN, 4, 2, (3,), (2, 3)),  # an agent a node, which ends the other rank, too
        (LAUNCHER, 2, 2, (2, 1), (0, 3)),  # where each node has the ranks of the other
    ],
)
def test_ranks_of_several_nodes_come_back(tmp_path, launcher, num_nodes, num_local, lost, back):
    """Under torchrun, whose agents start their own ranks again, and under our launcher."""
    size = num_nodes * num_local
    losses = [[rank, "forward", 3 + 6 * at, "SIGKILL"] for at, rank in enumerate(lost)]
    losses += [[num_local * num_nodes - 1, "forward", iteration, "newcomer"] for iteration in (6, 9, 12)]
    (tmp_path / "mapping.json").write_text(json.dumps([2, 3, 0, 1]))
    mapping = "--rank-mapping mapping.json" if launcher is LAUNCHER else ""
    flags = f"--global-batch-size 8 --train-iters 16 {DECAY}"
    started = on_nodes(num_nodes, num_local, launcher, f"{flags} --pipeline-model-parallel-size 2 {mapping}")
    job = run_command(tmp_path, started, losses)
    assert_nothing_lost(job, flags)
    for rank in back:
        assert re.search(rf"rank {rank} is back.* go on", job.outcome.output), job.outcome.output
    assert f"{size} ranks of {size} go on" in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("lost, flags, sentence", [
    ((2, 3), "", "every replica has lost rank 1, so nobody holds the weights of stage 1"),
    ((0, 2), "--use-distributed-optimizer", "nobody else has a lost rank's shard of the optimizer's state"),
])  # fmt: skip
def test_a_job_that_cannot_go_on_is_not_started_again(tmp_path, lost, flags, sentence):
    """New processes are started for the lost ranks, and for no other: the launcher ends the job, and says why."""
    losses = [[rank, "forward", 3, "SIGKILL"] for rank in lost]
    shape = f"--global-batch-size 4 --train-iters 1000 --pipeline-model-parallel-size 2 {flags}"
    job = run(tmp_path, 4, shape, losses, max_restarts=2)
    job.outcome.assert_failed_clearly(sentence, "the job is ended", within=240)
    began = Counter(moment.rank for moment in job.moments if moment.what == "began")
    assert [began[rank] for rank in range(4) if rank not in lost] == [1, 1], job.outcome.output


@pytest.mark.full
def test_torchruns_agents_start_all_ranks_again_where_none_is_left(tmp_path):
    """A stage has lost all of its ranks, so the others end, too. The job goes on from its checkpoint."""
    losses = [[rank, "forward", 6, "SIGKILL"] for rank in (2, 3)]
    flags = f"--global-batch-size 8 --train-iters 9 {DECAY}"
    saving = "--pipeline-model-parallel-size 2 --save saved --load saved --save-interval 2"
    job = run_command(tmp_path, on_nodes(4, 1, TORCHRUN, f"{flags} {saving}"), losses)
    assert_nothing_lost(job, flags)
    assert "every replica has lost rank 1" in job.outcome.output, job.outcome.output
    assert "loaded saved; starting from iteration 4" in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    "depth, replicas, schedule", [(2, 2, "2bw"), (2, 3, "flush"), (4, 2, "zb-h1"), (4, 2, "bpipe")]
)
def test_ranks_come_back_at_random_moments(tmp_path, depth, replicas, schedule):
    """Eight losses in each job, of ranks that have come back, too.

    The learning rate is low: at 1e-2 jobs that nothing disturbs differ from one process by 1e-2 after 100 iterations.
    """
    size = depth * replicas
    flags = f"--global-batch-size {size} --train-iters 20000 --eval-interval 50 --eval-iters 1 --lr 1e-4"
    shape = f"--pipeline-model-parallel-size {depth} --pipeline-schedule {schedule} --save saved --save-interval 80"
    job, lost = lose_and_return_at_random(tmp_path, depth, replicas, f"{flags} {shape}", num_losses=8, seed=0)
    assert len(lost) == 8, lost
    last = max(record["iteration"] for record in job.records)
    weights = "2bw" if schedule == "2bw" else "flush"
    assert_nothing_lost(job, f"{flags} --pipeline-schedule {weights} --exit-interval {last}", is_stopped=True)
