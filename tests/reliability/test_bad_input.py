"""What a user can get wrong, each as a job: one clear sentence, a non-zero status in seconds, nothing left behind."""

import contextlib
import shutil
import signal
import socket
import subprocess
import sys

import numpy
import pytest

from tests.reliability import launch

TWO_BW = ["--pipeline-schedule", "2bw"]
SAVING = [*TWO_BW, "--train-iters", 4, "--save", "checkpoints", "--save-interval", 2]


def run_rank(directory, *flags, world_size=1, model=(*launch.TINY, *launch.SYNTHETIC), **environment):
    """One rank without a launcher, for what is found before the ranks meet."""
    command = [sys.executable, str(launch.REPOSITORY / "pretrain_gpt.py"), *model, *map(str, flags)]
    variables = {"WORLD_SIZE": str(world_size), "RANK": "0", **environment} if world_size > 1 else environment
    with launch.Job(command, directory=directory, **variables) as job:
        return job.wait()


@pytest.mark.parametrize(
    ("world_size", "flags", "words"),
    [
        (8, ["--pipeline-model-parallel-size", 8, *TWO_BW, "--num-layers", 8], ("microbatches", "4", "8")),
        (3, ["--pipeline-model-parallel-size", 2], ("3 processes", "divided")),
        (1, ["--seq-length", 65], ("--seq-length 65", "--max-position-embeddings 64")),
        (1, ["--ckpt-format", "zarr"], ("--ckpt-format", "torch_dist")),
        (1, ["--save-interval", 2], ("--save",)),
    ],
    ids=["m < p under 2bw", "world size", "positions", "checkpoint format", "interval without directory"],
)
def test_contradictory_arguments(tmp_path, world_size, flags, words):
    """Found by every rank before it meets the others."""
    outcome = run_rank(tmp_path, "--train-iters", 2, *flags, world_size=world_size)
    outcome.assert_failed_clearly("error:", *words, within=20)
    assert outcome.output.count("error:") == 1 and "Traceback" not in outcome.output


def test_port_in_use(tmp_path):
    """The rendezvous names the port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ["--pipeline-model-parallel-size", 2, "--train-iters", 2]
        outcome = run_rank(tmp_path, *flags, world_size=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    outcome.assert_failed_clearly("error:", "port in use", port)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Prefix of a small data file: 40 documents of 50 token ids below 60."""
    from megatron import backend

    backend.install()
    import torch

    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("data") / "text"
    builder = IndexedDatasetBuilder(str(prefix) + ".bin", dtype=numpy.uint16)
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        builder.add_document(torch.randint(0, 60, (50,), generator=generator), [50])
    builder.finalize(str(prefix) + ".idx")
    return prefix


def _empty(prefix):
    prefix.with_suffix(".bin").write_bytes(b"")


def _truncated(prefix):
    prefix.with_suffix(".bin").write_bytes(prefix.with_suffix(".bin").read_bytes()[:1000])


def _truncated_index(prefix):
    prefix.with_suffix(".idx").write_bytes(prefix.with_suffix(".idx").read_bytes()[:40])


def _foreign(prefix):
    tokens = numpy.frombuffer(prefix.with_suffix(".bin").read_bytes(), numpy.uint16).copy()
    tokens[::7] = 4000
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())


def _missing(prefix):
    prefix.with_suffix(".idx").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_empty, ("text.bin",)),
        (_foreign, ("4000", "vocabulary")),
        pytest.param(_truncated, ("text.bin",), marks=pytest.mark.full),
        pytest.param(_truncated_index, ("text.idx",), marks=pytest.mark.full),
        pytest.param(_missing, ("text",), marks=pytest.mark.full),
    ],
    ids=["empty", "ids beyond the vocabulary", "truncated", "truncated index", "missing index"],
)
def test_damaged_data(tmp_path, text, damage, words):
    """The file, or the token id, is named; on two ranks, of which both or only one may read it."""
    for suffix in (".bin", ".idx"):
        shutil.copy(text.with_suffix(suffix), tmp_path / ("text" + suffix))
    damage(tmp_path / "text")
    data = ["--data-path", "text", "--split", "100,0,0", "--tokenizer-type", "NullTokenizer", "--vocab-size", "60"]
    outcome = launch.train(2, *TWO_BW, "--train-iters", 20, model=[*launch.TINY, *data], directory=tmp_path)
    outcome.assert_failed_clearly(*words)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directory with checkpoints of iterations 2 and 4."""
    directory = tmp_path_factory.mktemp("saved")
    launch.train(2, *SAVING, directory=directory).assert_succeeded()
    return directory / "checkpoints"


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def _halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (_flip, "is damaged"),
        pytest.param(_halve, "is truncated", marks=pytest.mark.full),
        pytest.param(lambda path: path.unlink(), "is missing", marks=pytest.mark.full),
    ],
    ids=["flipped bit", "truncated", "missing"],
)
def test_damaged_checkpoint(tmp_path, saved, damage, word):
    """The shard is named, the way to the older checkpoint too, and nothing is trained or overwritten."""
    shutil.copytree(saved, tmp_path / "checkpoints")
    shard = tmp_path / "checkpoints" / "iter_0000004" / "__1_0.distcp"
    damage(shard)
    flags = [*SAVING, "--train-iters", 8, "--load", "checkpoints"]
    outcome = launch.train(2, *flags, "--metrics-file", "metrics.jsonl", directory=tmp_path)
    outcome.assert_failed_clearly("__1_0.distcp", word, "--ckpt-step 2")
    assert outcome.output.count("--ckpt-step 2") == 1, "told once, not by every rank"
    assert not launch.metrics(tmp_path / "metrics.jsonl")


def test_checkpoint_of_another_model(tmp_path, saved):
    """The first argument that differs is named."""
    flags = [*TWO_BW, "--train-iters", 8, "--load", saved, "--num-layers", 2]
    launch.train(2, *flags, directory=tmp_path).assert_failed_clearly("num_layers is 4 there and 2 here")


def test_disk_full_while_saving(tmp_path):
    """On a file system of 3 MiB the second checkpoint does not fit: the job says so, the first is whole, no temporary
    directory is left, and the run can go on from it."""
    inside = 'mount -t tmpfs -o size=3m tmpfs disk && "$@"; status=$?; cp -a disk/. after; exit $status'
    (tmp_path / "disk").mkdir()
    (tmp_path / "after").mkdir()
    flags = [*TWO_BW, "--train-iters", 40, "--save", "disk", "--save-interval", 2]
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*command[:4], "true"], capture_output=True).returncode:
        pytest.skip("this machine permits no mount of a small tmpfs (unshare --user --mount)")
    with launch.Job([*command, *launch.training_command(2, *flags)], directory=tmp_path) as job:
        outcome = job.wait()
    outcome.assert_failed_clearly("cannot save the checkpoint", "bytes are free", "is intact")
    saved = int((tmp_path / "after" / "latest_checkpointed_iteration.txt").read_text())
    names = sorted(path.name for path in (tmp_path / "after").iterdir())
    assert names[-1] == "latest_checkpointed_iteration.txt" and names[-2] == f"iter_{saved:07d}"
    assert all(name.startswith("iter_") for name in names[:-1])
    flags = [*TWO_BW, "--train-iters", saved + 2, "--load", "after"]
    launch.train(2, *flags, directory=tmp_path).assert_succeeded()


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.full)])
def test_one_rank_killed_in_the_middle_of_training(tmp_path, rank):
    """The others end within 10 s and name it; the checkpoint before is whole; no process is left."""
    flags = [*TWO_BW, "--train-iters", 100_000, "--save", "checkpoints", "--save-interval", 4]
    command = launch.training_command(2, *flags, "--metrics-file", "metrics.jsonl")
    with launch.Job(command, directory=tmp_path) as job:
        launch.wait_for_iteration(job, tmp_path / "metrics.jsonl", 6)
        job.started = launch.now()
        launch.kill(job.workers()[rank], signal.SIGKILL)
        outcome = job.wait()
    outcome.assert_failed_clearly(f"rank {rank}", within=10)
    flags = [*TWO_BW, "--load", "checkpoints", "--train-iters"]
    saved = int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    with contextlib.suppress(FileNotFoundError):
        (tmp_path / "metrics.jsonl").unlink()
    resumed = launch.train(2, *flags, saved + 2, "--metrics-file", "metrics.jsonl", directory=tmp_path)
    resumed.assert_succeeded()
    assert sorted(launch.metrics(tmp_path / "metrics.jsonl")) == [saved + 1, saved + 2]
