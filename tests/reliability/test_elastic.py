"""Jobs whose pipeline changes all the time lose a rank, or are asked to stop, at any moment: in a batch, in a change,
while saving."""

import random
import re
import signal

import pytest

from tests.reliability import launch
from tests.reliability.test_bad_input import assert_only_whole_checkpoints

END = 10.0  # seconds from the kill to the end of the job
LAST = 14
CHANGES = [
    "--train-iters", LAST, "--untie-embeddings-and-output-weights", "--freeze-training", "--freeze-interval", 2,
    "--freeze-schedule", "0,1,1,1,2,3", "--elastic-pipeline", "--elastic-schedule", "2,4,1,2,4,2",
]  # fmt: skip
SAVES = ["--save", "checkpoints", "--load", "checkpoints", "--save-interval", 3]
REPORTED = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="session")
def undisturbed(made_once):
    """Losses of a job on four ranks that changes its pipeline behind every second batch, by iteration; and how long
    after its first batch it was at the end."""

    def train(directory):
        command = launch.training_command(4, *CHANGES, *SAVES, "--metrics-file", "metrics.jsonl")
        with launch.Job(command, directory=directory) as job:
            launch.wait_for_iteration(job, directory / "metrics.jsonl", 1)
            begin = launch.now()
            launch.wait_for_iteration(job, directory / "metrics.jsonl", LAST)
            seconds = launch.now() - begin
            job.wait().assert_succeeded()
        (directory / "seconds").write_text(str(seconds))

    directory = made_once("changing", train)
    losses = launch.losses(directory / "metrics.jsonl")
    assert sorted(losses) == list(range(1, LAST + 1))
    return losses, float((directory / "seconds").read_text())


def _goes_on(directory, losses: dict[int, float], told: str) -> None:
    """The same job, started anew, has the losses of one that nobody disturbed, from its last checkpoint on."""
    latest = directory / "checkpoints" / REPORTED
    begin = int(latest.read_text()) if latest.exists() else 0
    command = [*CHANGES, *SAVES, "--metrics-file", "second.jsonl"]
    launch.train(4, *command, directory=directory).assert_succeeded()
    found = launch.losses(directory / "second.jsonl")
    assert found == {each: losses[each] for each in range(begin + 1, LAST + 1)}, f"{told}, from iteration {begin}"
    assert assert_only_whole_checkpoints(directory / "checkpoints") == LAST


def killed_and_resumed(directory, losses: dict[int, float], seconds: float) -> None:
    rank = random.SystemRandom().randrange(4)
    command = launch.training_command(4, *CHANGES, *SAVES, "--metrics-file", "first.jsonl")
    with launch.Job(command, directory=directory) as job:
        launch.wait_for_iteration(job, directory / "first.jsonl", 1)
        workers = job.workers()
        delay = launch.random_delay(0.9 * seconds)
        told = f"rank {rank} was killed {delay:.3f} s behind the first batch"
        launch.kill(workers[rank], signal.SIGKILL)
        killed = launch.now()
        outcome = job.wait()
        assert launch.now() - killed < END, f"{told}\n{outcome.output}"
    assert not outcome.leftovers
    if outcome.status:  # else it was at its end
        ended = rf"rank {rank} (\(.*\) )?ended without an error message"
        assert re.search(ended, outcome.output), f"{told}\n{outcome.output}"
    _goes_on(directory, losses, told)


@pytest.mark.full
@pytest.mark.parametrize("moment", range(30))
def test_a_killed_rank_is_named_and_the_run_goes_on(undisturbed, tmp_path, moment):
    """kill -9 of a rank at a random moment: all others end within 10 s and name it, and the job, started anew, goes on
    with the bits of one that nobody killed."""
    killed_and_resumed(tmp_path, *undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("moment", range(4))
def test_asked_to_stop(undisturbed, tmp_path, moment):
    """SIGTERM to a rank at a random moment, perhaps within a change: the job saves and ends, and goes on with the bits
    of one that was not asked."""
    losses, seconds = undisturbed
    rank = random.SystemRandom().randrange(4)
    command = launch.training_command(4, *CHANGES, *SAVES, "--metrics-file", "first.jsonl")
    with launch.Job(command, directory=tmp_path) as job:
        launch.wait_for_iteration(job, tmp_path / "first.jsonl", 1)
        delay = launch.random_delay(0.8 * seconds)
        launch.kill(job.workers()[rank], signal.SIGTERM)
        outcome = job.wait()
    outcome.assert_succeeded()
    first = launch.losses(tmp_path / "first.jsonl")
    assert int((tmp_path / "checkpoints" / REPORTED).read_text()) == max(first)
    assert first == {each: losses[each] for each in first}
    if max(first) < LAST:
        _goes_on(tmp_path, losses, f"rank {rank} was asked {delay:.3f} s behind the first batch")
