"""Stopped runs go on as if they had never been stopped: jobs as users start them, compared loss by loss."""

import os
import signal
import time

import pytest

from tests.reliability import launch
from tests.reliability.conftest import LAST, TWO_BW
from tests.reliability.test_bad_input import assert_only_whole_checkpoints


def killed_and_resumed(directory, uninterrupted, *flags, schedule=TWO_BW, world_size=2, elsewhere=None):
    """A job that saves every second iteration is killed within half a second of its first checkpoint, and starts anew;
    `uninterrupted`: losses of one that nobody killed, by iteration. `elsewhere`: other ranks and further flags with
    which it starts anew; then losses are equal to rounding."""
    flags = [*schedule, "--save", "checkpoints", "--load", "checkpoints", "--save-interval", 2, *flags]
    with launch.Job(
        launch.training_command(world_size, *flags, "--metrics-file", "first.jsonl"), directory=directory
    ) as job:  # fmt: skip
        job.wait_until(lambda: (directory / "checkpoints" / "latest_checkpointed_iteration.txt").exists())
        workers = job.workers().values()
        delay = launch.random_delay(0.5)
        os.killpg(job.process.pid, signal.SIGKILL)
        for pid in workers:
            launch.kill(pid, signal.SIGKILL)
        outcome = job.wait()
    assert not outcome.leftovers
    reported = int((directory / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert list((directory / "checkpoints").glob(".owner_*")) or reported == LAST, "kill -9 leaves the job's mark"
    world_size, more = elsewhere or (world_size, [])
    outcome = launch.train(world_size, *flags, *more, "--metrics-file", "second.jsonl", directory=directory)
    outcome.assert_succeeded()
    assert "is marked by another job" not in outcome.output, "without a wait for the owner of the mark"
    losses = launch.losses(directory / "second.jsonl")
    rest = {iteration: uninterrupted[iteration] for iteration in range(reported + 1, LAST + 1)}
    assert losses == (pytest.approx(rest, rel=2e-6, abs=0.0) if elsewhere else rest), (
        f"killed {delay:.3f} s after the first checkpoint, resumed from {reported}"
    )
    assert assert_only_whole_checkpoints(directory / "checkpoints") == LAST
    assert not list((directory / "checkpoints").glob(".*"))


@pytest.mark.full
@pytest.mark.parametrize("flags", [["--num-workers", 2], [], ["--async-save"]])
def test_killed_run_goes_on_from_its_last_checkpoint(uninterrupted, tmp_path, flags):
    """kill -9 of the launcher and all ranks at a random moment, perhaps while saving: the same job started anew takes
    the directory at once, and the resumed losses are those of the whole run. No process is left, of those that load
    samples neither."""
    killed_and_resumed(tmp_path, uninterrupted, *flags)


@pytest.mark.full
@pytest.mark.parametrize("flags", [["stage"], ["uniform", "--2bw-provisional-microbatches", 2, "--async-save"]])
def test_killed_run_with_provisional_weights_goes_on(tmp_path, flags):
    """The same with the prediction that the checkpoint has for the next batch."""
    predicts = ["--2bw-provisional", *flags]
    launch.train(2, *TWO_BW, *predicts, "--metrics-file", "whole.jsonl", directory=tmp_path).assert_succeeded()
    killed_and_resumed(tmp_path, launch.losses(tmp_path / "whole.jsonl"), *predicts)


TWO_DATA, TWO_STAGES = ["--pipeline-model-parallel-size", 1], ["--pipeline-model-parallel-size", 2]
EXPERTS = [
    *TWO_BW, "--num-experts", 4, "--moe-aux-loss-coeff", 0.01, "--untie-embeddings-and-output-weights",
    "--disable-bias-linear", "--adam-eps", 1e-5, "--attention-dropout", 0, "--hidden-dropout", 0,
]  # fmt: skip
SHARED, SHARDS = ["--expert-model-parallel-size", 2], ["--use-distributed-optimizer"]
TENSOR = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]


@pytest.mark.full
@pytest.mark.parametrize(
    "elsewhere", [(4, TWO_STAGES), (4, [*TWO_DATA, *TENSOR, "--expert-tensor-parallel-size", 1])], ids=["p=2", "t=2"]
)
def test_killed_run_with_shared_experts_goes_on_at_other_degrees(tmp_path, elsewhere):
    """kill -9 of two ranks that share out experts and the optimizer's state."""
    flags = [*SHARED, *SHARDS, *TWO_DATA]
    launch.train(2, *EXPERTS, *flags, "--metrics-file", "whole.jsonl", directory=tmp_path).assert_succeeded()
    whole = launch.losses(tmp_path / "whole.jsonl")
    killed_and_resumed(tmp_path, whole, *flags, schedule=EXPERTS, elsewhere=elsewhere)


LONG = ["--train-iters", 100_000, "--save", "checkpoints", "--save-interval", 50_000]


def _stopped_by_signal(directory, rank, iteration, *flags, world_size=2, delay=0.0):
    """A long run, of which one rank gets SIGTERM, or with rank None every rank's process group, as launchers do;
    returns the iteration that was saved."""
    command = launch.training_command(world_size, *LONG, *flags, "--metrics-file", "metrics.jsonl")
    with launch.Job(command, directory=directory) as job:
        if iteration:
            launch.wait_for_iteration(job, directory / "metrics.jsonl", iteration)
        else:
            job.wait_until(lambda: rank in job.workers())
            time.sleep(delay)
        if rank is None:
            for pid in job.workers().values():
                os.killpg(pid, signal.SIGTERM)
        else:
            launch.kill(job.workers()[rank], signal.SIGTERM)
        outcome = job.wait()
    outcome.assert_succeeded()
    return _saved_once(directory)


def _saved_once(directory):
    names = sorted(path.name for path in (directory / "checkpoints").iterdir())
    saved = int((directory / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert names == [f"iter_{saved:07d}", "latest_checkpointed_iteration.txt"], "saved once"
    assert saved == max(launch.losses(directory / "metrics.jsonl")), "saved where it stopped, drained"
    return saved


@pytest.mark.full
def test_signal_to_the_launcher_saves_too(tmp_path):
    """A cluster signals torchrun, which passes it on to every process of every rank: the run is saved before it ends.
    (torchrun's own exit status tells of the signal, not of the run.)"""
    flags = ["--pipeline-schedule", "2bw", "--num-workers", 2, "--metrics-file", "metrics.jsonl"]
    with launch.Job(launch.training_command(2, *LONG, *flags), directory=tmp_path) as job:
        launch.wait_for_iteration(job, tmp_path / "metrics.jsonl", 5)
        launch.kill(job.process.pid, signal.SIGTERM)
        outcome = job.wait()
    assert not outcome.leftovers
    assert _saved_once(tmp_path) < 100_000


@pytest.mark.full
def test_signal_to_process_groups_with_loading_processes(tmp_path):
    """torchrun and Slurm signal whole process groups: the processes that load samples go on until the checkpoint of the
    last iteration is saved."""
    assert _stopped_by_signal(tmp_path, None, 5, "--pipeline-schedule", "2bw", "--num-workers", 2) < 100_000


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["2bw", "flush"])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_signal_to_each_of_four_ranks(tmp_path, rank, schedule):
    """SIGTERM to any one rank of p=2, d=2 saves once and ends all, with checkpoints beside training and evaluations,
    in which the signal may fall."""
    flags = ["--pipeline-model-parallel-size", 2, "--eval-interval", 2, "--eval-iters", 2, "--async-save"]
    _stopped_by_signal(tmp_path, rank, 3 + rank, "--pipeline-schedule", schedule, *flags, world_size=4)


@pytest.mark.full
@pytest.mark.parametrize("delay", [2.0, 4.0, 6.0])
def test_signal_during_start_up(tmp_path, delay):
    """A signal that comes before the first iteration is kept: the run stops after its first batches, and saves."""
    _stopped_by_signal(tmp_path, 1, 0, "--pipeline-schedule", "2bw", delay=delay)
