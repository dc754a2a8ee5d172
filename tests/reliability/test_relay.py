"""A run whose weights live on the host, and that is killed: what it has reported as saved is there, and it goes on
exactly.
"""

from pathlib import Path

import pytest

from tests.reliability import launch
from tests.reliability.conftest import LAST
from tests.reliability.test_bad_input import assert_only_whole_checkpoints
from tests.reliability.test_resume import killed_and_resumed

PROGRAM = Path(__file__).with_name("killed_in_an_update.py")
RELAY = ["--pipeline-schedule", "l2l", "--bf16", "--train-iters", LAST]
ONE_RANK, REPLICAS, TWO_STAGES = (1, []), (2, ["--pipeline-model-parallel-size", 1]), (2, [])
STAGES = 4  # each with an update a batch


def killed_in_an_update(directory, *flags, iteration, update):
    """kill -9 in the update of that number, from 1, of an iteration. Returns the job's flags, its losses before, and
    the iteration that was saved last: with --async-save the one before, where the last was still being written.
    """
    saving = [*RELAY, *flags, "--save", "checkpoints", "--load", "checkpoints", "--save-interval", 2]
    command = launch.training_command(1, *saving, "--metrics-file", "first.jsonl", program=PROGRAM, has_launcher=False)
    with launch.Job(command, directory=directory, KILLED_IN_UPDATE=str((iteration - 1) * STAGES + update)) as job:
        outcome = job.wait()
    assert outcome.status != 0 and not outcome.leftovers, outcome.output
    before = launch.losses(directory / "first.jsonl")
    assert max(before) in (iteration - 1, iteration)
    last, saved = (iteration - 1) // 2 * 2, assert_only_whole_checkpoints(directory / "checkpoints", was_killed=True)
    assert saved in ((last, last - 2) if "--async-save" in flags else (last,))
    return saving, before, saved


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Losses of runs that nobody killed, by number of ranks and flags."""
    found = {}

    def losses(world_size, degrees):
        key = world_size, *degrees
        if key not in found:
            directory = tmp_path_factory.mktemp("whole")
            flags = [*RELAY, *degrees, "--metrics-file", "metrics.jsonl"]
            launch.train(world_size, *flags, directory=directory).assert_succeeded()
            found[key] = launch.losses(directory / "metrics.jsonl")
        return found[key]

    return losses


@pytest.mark.full
@pytest.mark.parametrize("flags", [[], ["--async-save"], ["--clip-grad", 0], ["--l2l-stash", "host"]])
@pytest.mark.parametrize("update", [1, STAGES])
def test_killed_in_the_first_and_the_last_update_of_a_batch(tmp_path, whole, flags, update):
    """Deferred and eager; the resumed losses are those of a run that nobody killed."""
    saving, before, saved = killed_in_an_update(tmp_path, *flags, iteration=7, update=update)
    launch.train(
        1, *saving, "--metrics-file", "second.jsonl", directory=tmp_path, has_launcher=False
    ).assert_succeeded()
    expected = whole(1, [*flags] if "--clip-grad" in flags else [])
    assert before == {iteration: expected[iteration] for iteration in before}
    after = launch.losses(tmp_path / "second.jsonl")
    assert after == {iteration: expected[iteration] for iteration in range(saved + 1, LAST + 1)}


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "degrees"), [ONE_RANK, REPLICAS, TWO_STAGES], ids=["one", "d=2", "p=2"])
@pytest.mark.parametrize("flags", [[], ["--async-save"], ["--l2l-stash", "host"]])
def test_killed_at_a_random_moment(tmp_path, whole, world_size, degrees, flags):
    """kill -9 of the launcher and all ranks, perhaps while saving, perhaps in an update; replicas with one store."""
    killed_and_resumed(
        tmp_path, whole(world_size, degrees), *degrees, *flags, schedule=RELAY, world_size=world_size
    )  # fmt: skip
