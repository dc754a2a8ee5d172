"""Where a run starts from: a checkpoint's arguments, weights of another run, blends of data; and what it says then."""

import argparse
import json

import pytest

from tests import workers
from tests.trainer.data.small_data import write_dataset
from tests.trainer.run.run_case import train


def losses(results: list[dict]) -> dict[int, float]:
    return results[-1]["losses"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(directory of a checkpoint of iteration 3 of a model with two layers, the losses until iteration 6)."""
    folder = tmp_path_factory.mktemp("trained")
    whole = losses(train(2, f"--num-layers 2 --save {folder} --save-interval 3 --log-progress"))
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder, whole


@pytest.mark.sample(1)
@pytest.mark.parametrize("degrees", ["", "--pipeline-model-parallel-size 1 --use-mp-args-from-checkpoint-args"])
def test_arguments_of_the_checkpoint(trained, degrees):
    """--use-checkpoint-args takes the shape from the checkpoint, whatever the command line says, and goes on exactly;
    with --use-mp-args-from-checkpoint-args also the number of stages."""
    folder, whole = trained
    found = losses(train(2, f"--num-layers 4 --load {folder} --use-checkpoint-args {degrees}"))
    assert found == {iteration: whole[iteration] for iteration in (4, 5, 6)}


@pytest.mark.full
def test_weights_of_another_run(trained):
    """--finetune and --pretrained-checkpoint start at iteration 0 from the trained weights, alike."""
    folder, whole = trained
    flags = "--num-layers 2 --train-iters 2"
    tuned = train(2, f"{flags} --load {folder} --finetune")
    pretrained = train(2, f"{flags} --pretrained-checkpoint {folder}")
    assert losses(tuned) == losses(pretrained) and sorted(losses(tuned)) == [1, 2]
    assert losses(tuned)[1] < whole[1]
    assert any(line == f"loaded the weights of {folder}; starting from iteration 0" for line in pretrained[-1]["lines"])


def test_missing_checkpoint_ends_the_run_on_request(tmp_path):
    """--exit-on-missing-checkpoint: an empty --load is an error, not a start from nothing."""
    with pytest.raises(AssertionError, match=r"holds no checkpoint, and --exit-on-missing-checkpoint is given"):
        train(1, f"--load {tmp_path} --exit-on-missing-checkpoint")


def test_progress_is_logged(trained):
    """--log-progress appends a line for each checkpoint."""
    lines = (trained[0] / "progress.txt").read_text().splitlines()
    assert [line.split("\t")[4] for line in lines] == ["Iteration: 3", "Iteration: 6"]


@pytest.mark.full
def test_blends(tmp_path):
    """Weights decide what a blend is made of; a file that holds the blend says the same as the command line."""
    one, two = (write_dataset(tmp_path / name, vocab=60, seed=seed) for seed, name in enumerate(("one", "two")))
    common = f"--train-iters 3 --data-cache-path {tmp_path}/cache"
    (tmp_path / "blend").write_text(f"0.9 {one} 0.1 {two}")
    splits = {"train": ["0.9", one, "0.1", two], "valid": [two], "test": [two]}
    (tmp_path / "splits").write_text(json.dumps(splits))
    first = losses(train(2, f"--data-path 0.9 {one} 0.1 {two} --split 8,1,1 {common}"))
    assert first == losses(train(2, f"--data-args-path {tmp_path}/blend --split 8,1,1 {common}"))
    assert first != losses(train(2, f"--data-path 0.1 {one} 0.9 {two} --split 8,1,1 {common}"))
    assert len(losses(train(2, f"--per-split-data-args-path {tmp_path}/splits {common}"))) == 3


def noted(has_split: str, given: str = "", split: str | None = "969, 30, 1", **values: object) -> list[str]:
    """`has_split`: of v(alidation) and t(est), which have data."""
    from megatron.trainer.run.assembly import without_data

    values = {"eval_iters": 2, "eval_interval": 1, "skip_train": False, **values}
    there = (True, "v" in has_split, "t" in has_split)
    return without_data(argparse.Namespace(has_split=there, split=split, given=given.split(), **values))


def test_notes():
    """Of validation and test, where the split means them to have data; of none that somebody has left out."""
    assert noted("vt") == noted("", eval_iters=0) == noted("v", split="99,1,0") == noted("", split=None) == []
    few = "--split 969, 30, 1 leaves them no document, so"
    assert noted("v") == [f"there are no test data: {few} nothing is tested at the end"]
    assert noted("t") == [f"there are no validation data: {few} the run evaluates nothing"]
    for split in (None, "100,0,0"):  # said by hand that there are none
        assert noted("", "eval_interval", split) == ["there are no validation data, so the run evaluates nothing"]


@pytest.mark.parametrize(
    ("given", "flags"),
    [("eval_interval", "--eval-interval 1"), ("eval_iters eval_interval", "--eval-interval 1 --eval-iters 2")],
)
def test_asked_for_by_name(given, flags):
    """What the flags ask for and the data cannot give is refused."""
    with pytest.raises(ValueError, match=f"^{flags}: there are no validation data, so nothing is evaluated; give more"):
        noted("t", given)
    with pytest.raises(ValueError, match=r"^--skip-train evaluates, and there are no .*; give --valid-data-path$"):
        noted("", given, None, skip_train=True)


@pytest.mark.full
def test_a_resumed_run_with_another_seed(tmp_path):
    """The log says that the order of samples changes, and from what to what."""
    train(1, f"--train-iters 2 --save {tmp_path}")
    lines = {seed: train(1, f"--train-iters 2 --load {tmp_path} --seed {seed}")[0]["lines"] for seed in (1234, 7)}
    said = {
        seed: [line for line in each if "or their order from the first on, are others" in line]
        for seed, each in lines.items()
    }
    assert not said[1234] and len(said[7]) == 1 and "was saved with --seed 1234 (now 7): " in said[7][0]


@pytest.mark.full
def test_ten_documents(tmp_path):
    """The usual split leaves none of ten documents for validation: a run that is to evaluate does not begin, and one
    that nobody told to says that it will not."""
    prefix = write_dataset(tmp_path / "text", documents=10)
    flags = f"--data-path {prefix} --train-iters 1"
    with pytest.raises(workers.WorkerError, match="--eval-iters 2: there are no validation data, so nothing is eval"):
        train(1, f"{flags} --eval-interval 1 --eval-iters 2")
    (result,) = train(1, f"{flags} --eval-iters 0")
    assert not any("validation data" in line for line in result["lines"])
