"""Two runs that several tests compare with or start from; every start of a job costs seconds."""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability import launch

LAST = 12
TWO_BW = ["--pipeline-schedule", "2bw", "--train-iters", LAST]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory, request):
    """`made_once(name, fill)`: a directory that one of the processes that share the tests has filled."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if hasattr(request.config, "workerinput") else base

    def make(name: str, fill: Callable[[Path], None]) -> Path:
        directory, done = base / name, base / f"{name}.done"
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
                fill(directory)
                done.touch()
        return directory

    return make


@pytest.fixture(scope="session")
def uninterrupted(made_once):
    """Losses of a 2bw run that neither saves nor evaluates, by iteration."""

    def train(directory: Path) -> None:
        launch.train(2, *TWO_BW, "--metrics-file", "metrics.jsonl", directory=directory).assert_succeeded()

    directory = made_once("uninterrupted", train)
    losses = launch.losses(directory / "metrics.jsonl")
    assert sorted(losses) == list(range(1, LAST + 1))
    return losses


@pytest.fixture(scope="session")
def saving(made_once):
    """Directory of the same run with a checkpoint every 4 iterations and an evaluation every 3. Not to be changed."""
    flags = ["--save", "checkpoints", "--save-interval", 4, "--eval-interval", 3, "--eval-iters", 1]

    def train(directory: Path) -> None:
        launch.train(2, *TWO_BW, *flags, "--metrics-file", "metrics.jsonl", directory=directory).assert_succeeded()

    return made_once("saving", train)
