"""What a user can get wrong, each as a job: one clear sentence, a non-zero status in seconds, nothing left behind."""

import re
import shutil
import signal
import socket
import subprocess
import sys

import numpy
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


@pytest.mark.parametrize(
    ("world_size", "flags", "words"),
    [
        (8, ["--pipeline-model-parallel-size", 8, *TWO_BW, "--num-layers", 8], ("microbatches", "4", "8")),
        (3, ["--pipeline-model-parallel-size", 2], ("3 processes", "divided")),
        (1, ["--seq-length", 65], ("--seq-length 65", "--max-position-embeddings 64")),
        (1, ["--ckpt-format", "zarr"], ("--ckpt-format", "torch_dist")),
    ],
    ids=["m < p under 2bw", "world size", "positions", "checkpoint format"],
)
def test_contradictory_arguments(tmp_path, world_size, flags, words):
    """Found by every rank before it meets the others."""
    outcome = run_rank(tmp_path, "--train-iters", 2, *flags, world_size=world_size)
    outcome.assert_failed_clearly("error:", *words, within=40)
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


DATA = ["--data-path", "text", "--split", "100,0,0", "--tokenizer-type", "NullTokenizer", "--vocab-size", "60"]


def _copy_and_damage(text, directory, damage):
    for suffix in (".bin", ".idx"):
        shutil.copy(text.with_suffix(suffix), directory / ("text" + suffix))
    damage(directory / "text")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(_empty, ("text.bin", "empty"), marks=pytest.mark.full),
        (_truncated, ("text.bin", "truncated")),
        pytest.param(_truncated_index, ("text.idx", "truncated"), marks=pytest.mark.full),
        pytest.param(_missing, ("text.idx", "does not exist"), marks=pytest.mark.full),
    ],
    ids=["empty", "truncated", "truncated index", "missing index"],
)
def test_damaged_data_file(tmp_path, text, damage, words):
    """The file is named before the model is built."""
    _copy_and_damage(text, tmp_path, damage)
    outcome = run_rank(tmp_path, "--train-iters", 2, model=[*launch.TINY, *DATA])
    outcome.assert_failed_clearly("error:", *words)


@pytest.mark.full
def test_token_ids_beyond_the_vocabulary(tmp_path, text):
    """The id and the vocabulary are named, once for the job."""
    _copy_and_damage(text, tmp_path, _foreign)
    outcome = launch.train(2, *TWO_BW, "--train-iters", 20, model=[*launch.TINY, *DATA], directory=tmp_path)
    outcome.assert_failed_clearly("4000", "vocabulary")


@pytest.mark.full  # without a launcher: tests/trainer/data/test_microbatches.py
def test_data_file_cut_during_a_run(tmp_path, text):
    """Both ranks read it; the file and its bytes stand last on the screen, in a bus error's place."""
    _copy_and_damage(text, tmp_path, lambda prefix: None)
    command = launch.training_command(
        2, "--train-iters", 10**6, "--metrics-file", "metrics.jsonl", model=[*launch.TINY, *DATA]
    )
    with launch.Job(command, directory=tmp_path) as job:
        launch.wait_for_iteration(job, tmp_path / "metrics.jsonl", 2)
        (tmp_path / "text.bin").write_bytes(b"")
        outcome = job.wait()
    outcome.assert_failed_clearly("text.bin was cut short while the run read it: it has 0 bytes")
    assert "text.bin was cut short" in outcome.root_cause


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def _halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.full  # without a launcher: tests/trainer/checkpoint/test_checkpoint.py; its last lines: test_last_lines.py
@pytest.mark.parametrize(
    ("damage", "word"),
    [(_flip, "is damaged"), (_halve, "is truncated"), (lambda path: path.unlink(), "is missing")],
    ids=["flipped bit", "truncated", "missing"],
)
def test_damaged_checkpoint(tmp_path, saving, damage, word):
    """The shard is named, the way to the older checkpoint too, and nothing is trained or overwritten. All ranks find
    it; the sentence stands once where it is found, and once in the launcher's summary, which has nothing else to
    say."""
    shutil.copytree(saving / "checkpoints", tmp_path / "checkpoints")
    damage(tmp_path / "checkpoints" / "iter_0000012" / "__1_0.distcp")
    flags = [*TWO_BW, "--train-iters", 16, "--load", "checkpoints", "--save", "checkpoints", "--save-interval", 2]
    outcome = launch.train(2, *flags, "--metrics-file", "metrics.jsonl", directory=tmp_path)
    outcome.assert_failed_clearly("__1_0.distcp", word, "iterations 4 and 8", "--ckpt-step 8")
    (sentence,) = set(re.findall(r"pretrain_gpt\.py: error: .*", outcome.output))
    assert "--ckpt-step 8" in sentence and sentence in outcome.root_cause
    assert outcome.output.count(sentence) == outcome.output.count("--ckpt-step 8") == 2
    assert not launch.metrics(tmp_path / "metrics.jsonl")


@pytest.mark.full
def test_checkpoint_of_another_model(tmp_path, saving):
    """The first argument that differs is named."""
    flags = [*TWO_BW, "--train-iters", 16, "--load", saving / "checkpoints", "--num-layers", 2]
    launch.train(2, *flags, directory=tmp_path).assert_failed_clearly("num_layers is 4 there and 2 here")


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


@pytest.mark.full  # in seconds, and named: tests/pipeline/runtime/failure; what is left of a killed job: test_resume.py
@pytest.mark.alone
@pytest.mark.parametrize("rank", [1, 0])
def test_one_rank_killed_in_the_middle_of_training(tmp_path, rank):
    """The others end within 10 s and name it, also in the launcher's last lines, whichever of them it takes for the
    first; the checkpoints before are whole; no process is left, of those that load samples neither."""
    flags = [*TWO_BW, "--train-iters", 100_000, "--save", "checkpoints", "--save-interval", 4, "--num-workers", 2]
    command = launch.training_command(2, *flags, "--metrics-file", "metrics.jsonl")
    with launch.Job(command, directory=tmp_path) as job:
        launch.wait_for_iteration(job, tmp_path / "metrics.jsonl", 6)
        killed = launch.now()
        launch.kill(job.workers()[rank], signal.SIGKILL)
        outcome = job.wait()
    outcome.assert_failed_clearly(f"rank {rank}")
    last_lines = outcome.output.rpartition("Failures:")[2]
    assert f"rank {rank} (stage {rank}) ended without a word" in last_lines
    assert "To enable traceback see" not in outcome.output
    assert launch.now() - killed < 13, "10 s, and up to 3 to look for processes left behind"
    assert assert_only_whole_checkpoints(tmp_path / "checkpoints", was_killed=True) >= 4
