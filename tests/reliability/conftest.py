"""Two runs that several tests compare with or start from; every start of a job costs seconds."""

import pytest

from tests.reliability import launch

LAST = 12
TWO_BW = ["--pipeline-schedule", "2bw", "--train-iters", LAST]


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """Losses of a 2bw run that neither saves nor evaluates, by iteration."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    launch.train(2, *TWO_BW, "--metrics-file", "metrics.jsonl", directory=directory).assert_succeeded()
    losses = launch.losses(directory / "metrics.jsonl")
    assert sorted(losses) == list(range(1, LAST + 1))
    return losses


@pytest.fixture(scope="session")
def saving(tmp_path_factory):
    """Directory of the same run with a checkpoint every 4 iterations and an evaluation every 3. Not to be changed."""
    directory = tmp_path_factory.mktemp("saving")
    flags = ["--save", "checkpoints", "--save-interval", 4, "--eval-interval", 3, "--eval-iters", 1]
    launch.train(2, *TWO_BW, *flags, "--metrics-file", "metrics.jsonl", directory=directory).assert_succeeded()
    return directory
