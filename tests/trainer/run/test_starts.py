"""Where a run starts from: a checkpoint's arguments, weights of another run, blends of data; from flags to losses."""

import json

import pytest

from tests.trainer.data.small_data import write_dataset
from tests.trainer.run.run_case import train


def losses(results: list[dict]) -> dict[int, float]:
    return results[-1]["losses"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(directory of a checkpoint of iteration 3 of a model with two layers, the losses until iteration 6)."""
    folder = tmp_path_factory.mktemp("trained")
    whole = losses(train(2, f"--num-layers 2 --save {folder} --save-interval 3"))
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder, whole


@pytest.mark.parametrize(
    "degrees",
    [
        "",
        pytest.param("--pipeline-model-parallel-size 1 --use-mp-args-from-checkpoint-args", marks=pytest.mark.full),
    ],
    ids=["shape", "shape and degrees"],
)
def test_arguments_of_the_checkpoint(trained, degrees):
    """--use-checkpoint-args takes the shape from the checkpoint, whatever the command line says, and goes on exactly;
    with --use-mp-args-from-checkpoint-args also the number of stages."""
    folder, whole = trained
    found = losses(train(2, f"--num-layers 4 --load {folder} --use-checkpoint-args {degrees}"))
    assert found == {iteration: whole[iteration] for iteration in (4, 5, 6)}


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


def test_progress_is_logged(tmp_path):
    """--log-progress appends a line for each checkpoint."""
    train(1, f"--save {tmp_path} --save-interval 3 --log-progress")
    lines = (tmp_path / "progress.txt").read_text().splitlines()
    assert [line.split("\t")[4] for line in lines] == ["Iteration: 3", "Iteration: 6"]


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
