"""Training that reads what frozen layers put out, against training that computes it."""

import re
from argparse import Namespace
from pathlib import Path
from unittest import mock

import numpy
import pytest

from megatron.trainer.changes import prefix_cache
from megatron.trainer.changes.prefix_cache import PrefixCache, missing_cache, require_cache
from tests import workers
from tests.trainer.run.run_case import train

BASE = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --img-h 4 --img-w 4 --num-channels 1 --patch-dim 2 "
    "--num-classes 3 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --epochs 5 --eval-iters 0 --num-workers 0 "
    "--log-interval 1 --clip-grad 0 --hidden-dropout 0.1 --attention-dropout 0.1 --transformer-impl local "
    "--untie-embeddings-and-output-weights --freeze-training --freeze-interval 4 --freeze-schedule 1,2"
)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """26 images of noise: an epoch ends within a batch."""
    path, random = tmp_path_factory.mktemp("images") / "train.npz", numpy.random.RandomState(0)
    numpy.savez(path, images=random.rand(26, 4, 4, 1).astype("float32"), labels=random.randint(0, 3, 26))
    return path


def run(num_ranks: int, images: Path, flags: str, **options: str) -> tuple[list[tuple[float, float]], list[list[int]]]:
    """(loss, accuracy) of each batch, and of each line about the cache samples read, not found, of these found at the
    depth before, written."""
    results = train(
        num_ranks, f"--train-data-path {images} {flags}", program="pretrain_vision_classify", base=BASE, **options
    )  # fmt: skip
    batches = [(each["loss"], each["accuracy"]) for each in results[-1]["records"] if "grad_norm" in each]
    told = r"(\d+) samples read .* (\d+) not found \((\d+) at the depth before\), (\d+) written"
    found = [re.search(told, line) for line in results[-1]["lines"]]
    return batches, [list(map(int, each.groups())) for each in found if each]


def cached(folder: Path) -> str:
    return f"--activation-cache {folder} --activation-cache-gib 0.1 --activation-cache-use always"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (2, "--pipeline-schedule 2bw"),
        (2, ""),
        (2, "--bf16"),
        (2, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1"),
        (2, "--pipeline-model-parallel-size 1"),
        (4, "--elastic-pipeline --elastic-schedule 2,1"),
    ],
)
def test_equals_training_that_computes(num_ranks, flags, images, tmp_path):
    """Bit for bit, while it writes and while it reads; a second run finds all that the first has written."""
    computed, _ = run(num_ranks, images, flags)
    first, counts = run(num_ranks, images, f"{flags} {cached(tmp_path)}")
    assert first == computed
    # Behind 4 batches of 32 samples one layer is frozen, behind 8 two: 32 samples, then all that are left.
    assert [read + missing for read, missing, *_ in counts] == [32 * tensor_ranks(flags), 72 * tensor_ranks(flags)]
    assert all(missing > 0 and written >= 26 for _, missing, _, written in counts)
    # At the second depth the first epoch goes on from what the first has put out. It begins within an epoch, so some
    # microbatches of the next one have a sample of either depth, and are computed from the first, both of them.
    (*_, older, _), (_, missing, later, _) = counts
    assert older == 0 and missing <= later <= 2 * missing
    again, counts = run(num_ranks, images, f"{flags} {cached(tmp_path)}")
    assert again == computed
    assert counts[-1][1:] == [0, 0, 0]


@pytest.mark.full
def test_tensor_ranks_compute_together_what_one_of_them_has_not(images, tmp_path):
    """Values of one rank are gone, so both compute, though the other one finds its own."""
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1"
    computed, _ = run(2, images, flags)
    forgets = {"watch": "tests.trainer.changes.forgetful_cache:of_the_second_rank"}
    found, counts = run(2, images, f"{flags} {cached(tmp_path)}", **forgets)
    assert found == computed
    assert counts[-1][0] > 0 and counts[-1][1] > 26 - 8, "one rank reads in the second epoch at this depth"


@pytest.mark.full
def test_what_the_model_computes_is_in_the_key(images, tmp_path):
    """Nothing is learned, so weights are the same, and data are; but a layer computes something else."""
    run(2, images, f"--lr 1e-300 {cached(tmp_path)}")
    flags = "--lr 1e-300 --layernorm-epsilon 1e-2"
    computed, _ = run(2, images, flags)
    other, counts = run(2, images, f"{flags} {cached(tmp_path)}")
    assert other == computed and counts[0][1] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--activation-cache {file}/cache", "cannot be the folder of a cache"),
        ("--activation-cache {folder} --activation-cache-gib 0.0005", "holds nothing; allow 1048576 and more"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_at_the_start(images, tmp_path, flags, said):
    (tmp_path / "file").touch()
    with pytest.raises(workers.WorkerError, match=said):
        run(2, images, flags.format(file=tmp_path / "file", folder=tmp_path / "cache"))


@pytest.mark.parametrize(
    ("folder", "gib", "said"),
    [
        ("/proc/nope", 1, "--activation-cache: /proc/nope cannot be the folder of a cache (No such file or directory)"),
        ("/dev/null/x", 1, "--activation-cache: /dev/null/x cannot be the folder of a cache (Not a directory)"),
        ("{tmp}/file", 1, "--activation-cache: {tmp}/file cannot be the folder of a cache (File exists)"),
        ("{tmp}", 1e-9, "--activation-cache-gib 1e-09: a cache of at most 1 bytes holds nothing; allow 1048576"),
    ],
)
def test_a_dry_run_says_what_the_run_would_say(folder, gib, said, tmp_path):
    """In the same words, flag and all; the run makes its folder, the dry run nothing."""
    (tmp_path / "file").touch()
    args = Namespace(activation_cache=folder.format(tmp=tmp_path), activation_cache_gib=gib)
    for check in (require_cache, missing_cache):
        with pytest.raises(ValueError) as caught:
            check(args)
        assert said.format(tmp=tmp_path) in str(caught.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file"]


def test_a_dry_run_makes_nothing(tmp_path, monkeypatch):
    """A folder that could be made is no matter; one that lies where nothing can be written here may be there."""
    args = Namespace(activation_cache=str(tmp_path / "new" / "cache"), activation_cache_gib=1)
    assert missing_cache(args) == []
    monkeypatch.setattr(prefix_cache.tempfile, "TemporaryFile", mock.Mock(side_effect=PermissionError(13, "no")))
    (elsewhere,) = missing_cache(args)
    assert elsewhere == f"--activation-cache {tmp_path}/new/cache is not on this machine"
    args.activation_cache = str(tmp_path / "cache")  # beside what is there
    with pytest.raises(ValueError, match=r"--activation-cache: .* cannot be the folder of a cache \(no\)"):
        missing_cache(args)
    assert not list(tmp_path.iterdir())


def test_no_line_about_a_cache_that_there_is_not(monkeypatch):
    """Until layers are frozen nothing is kept, and nothing is said."""
    monkeypatch.setattr(prefix_cache, "control_group", lambda: None)
    monkeypatch.setattr(prefix_cache, "gathered", lambda own, group: [own])
    assert PrefixCache(Namespace(), None).describe() == ""


def tensor_ranks(flags: str) -> int:
    return 2 if "--tensor-model-parallel-size 2" in flags else 1


@pytest.mark.full
def test_another_order_finds_the_same_samples(images, tmp_path):
    """All that the first run has written is read. Weights are loaded and do not move, so a loss is that of its samples:
    batches have others, and thirteen of them have all samples four times."""
    run(2, images, f"--save {tmp_path / 'weights'} --exit-interval 2")
    flags = f"--load {tmp_path / 'weights'} --finetune --lr 1e-300 --hidden-dropout 0 --attention-dropout 0"
    flags, cache = f"{flags} --freeze-schedule 1", cached(tmp_path / "cache")
    first, counts = run(2, images, f"{flags} {cache}")
    assert [sum(each) for each in zip(*counts, strict=True)][:3] == [78, 26, 0]
    computed, _ = run(2, images, f"{flags} --seed 7")
    other, counts = run(2, images, f"{flags} --seed 7 {cache}")
    assert other == computed != first
    assert [sum(each) for each in zip(*counts, strict=True)] == [104, 0, 0, 0]
    losses = [sum(loss for loss, _ in batches[:13]) for batches in (first, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_samples_that_do_not_say_that_they_repeat_are_refused():
    with pytest.raises(ValueError, match="--activation-cache here: list does not say that its samples come again"):
        PrefixCache(Namespace(activation_cache="here"), [1, 2])
