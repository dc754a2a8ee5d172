"""What a user can get wrong, each as a job: one clear sentence, a non-zero status in seconds, nothing left behind."""

import re
import shutil
import socket
import subprocess
import sys

import pytest

from megatron.trainer.checkpoint import directory as directory_of_checkpoints
from tests.reliability import launch

TWO_BW = ["--pipeline-schedule", "2bw"]


def run_rank(directory, *flags, world_size=1, model=(*launch.TINY, *launch.SYNTHETIC), **environment):
    """One rank without a launcher, for what is found before the ranks meet."""
    command = [sys.executable, str(launch.REPOSITORY / "pretrain_gpt.py"), *model, *map(str, flags)]
    variables = {"WORLD_SIZE": str(world_size), "RANK": "0", **environment} if world_size > 1 else environment
    with launch.Job(command, directory=directory, **variables) as job:
        return job.wait()


def test_contradictory_arguments(tmp_path):
    """Found by every rank before it meets the others."""
    flags = ["--train-iters", 2, "--pipeline-model-parallel-size", 8, *TWO_BW, "--num-layers", 8]
    outcome = run_rank(tmp_path, *flags, world_size=8)
    outcome.assert_failed_clearly("error:", "microbatches", "4", "8", within=40)
    assert outcome.output.count("error:") == 1 and "Traceback" not in outcome.output


@pytest.mark.full
def test_port_in_use(tmp_path):
    """The rendezvous names the port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ["--pipeline-model-parallel-size", 2, "--train-iters", 2]
        outcome = run_rank(tmp_path, *flags, world_size=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    outcome.assert_failed_clearly("error:", "port in use", port)


def assert_only_whole_checkpoints(directory, *, was_killed=False):
    """The tracker names the latest; each is complete and undamaged; nothing else lies there, but for the hidden files
    of a killed save. Returns the latest."""
    latest = directory_of_checkpoints.read_tracker(directory)
    iterations = directory_of_checkpoints.complete_iterations(directory)
    assert latest == iterations[-1]
    for iteration in iterations:
        path = directory_of_checkpoints.iteration_directory(directory, iteration)
        files = directory_of_checkpoints.read_manifest(path)
        assert directory_of_checkpoints.find_damage(path, files, list(files)) == []
        assert {file.name for file in path.iterdir()} == {*files, directory_of_checkpoints.MANIFEST}
    is_left = re.compile(r"\..*\.incomplete|\.owner_\d+").fullmatch
    names = [path.name for path in directory.iterdir() if not (was_killed and is_left(path.name))]
    assert len(names) == len(iterations) + 1
    return latest


@pytest.mark.full
@pytest.mark.parametrize("schedule", [TWO_BW, ["--pipeline-schedule", "l2l"]], ids=["2bw", "l2l"])
def test_disk_full_while_saving(tmp_path, schedule):
    """On a file system of 3 MiB some checkpoint does not fit: the job says so, those before are whole, and no temporary
    directory is left."""
    inside = 'mount -t tmpfs -o size=3m tmpfs disk && "$@"; status=$?; cp -a disk/. after; exit $status'
    (tmp_path / "disk").mkdir()
    (tmp_path / "after").mkdir()
    flags = [*schedule, "--train-iters", 40, "--save", "disk", "--save-interval", 2]
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this machine permits no mount of a small tmpfs (unshare --user --mount)")
    command = [*unshare, "sh", "-c", inside, "sh", *launch.training_command(2, *flags)]
    with launch.Job(command, directory=tmp_path) as job:
        outcome = job.wait()
    outcome.assert_failed_clearly("cannot save the checkpoint", "bytes are free", "is intact")
    assert outcome.output.count("cannot save the checkpoint") == 2, "once by the job, once in the launcher's summary"
    assert_only_whole_checkpoints(tmp_path / "after")
