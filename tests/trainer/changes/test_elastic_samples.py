"""Samples while the pipeline changes: each epoch has all of them once, with replicas that come in its middle."""

from collections import Counter

import pytest

from tests.trainer.run.vision_helper import NUM_TRAINING, train_vision

BATCH = 8
FLAGS = (
    "--untie-embeddings-and-output-weights --freeze-training --freeze-interval 2 "
    "--freeze-schedule 1,2,3 --elastic-pipeline --elastic-schedule 4,2,1 --eval-interval 100"
)


def samples(results: list[dict]) -> list[tuple[int, int]]:
    return [each for result in results for each in result["watched"]]


@pytest.mark.parametrize(
    ("epochs", "flags", "stops"),
    [
        (4, "--epochs 4", (7,)),
        pytest.param(4, "--epochs 4", (3, 4, 7), marks=pytest.mark.full),
        pytest.param(4, "--epochs 4 --activation-cache {folder} --activation-cache-use always", (3, 4, 7),
                     marks=pytest.mark.full),
        pytest.param(8, f"--train-samples {8 * NUM_TRAINING} --elastic-batch grow", (3, 4, 7), marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_none_twice_and_none_lost(tmp_path, epochs, flags, stops):
    """Over three changes, and over runs each of which goes on from where the one before has stopped: right behind a
    decision, between two, and in the middle of an epoch. Each batch has the same samples, and so has each part of a
    batch that has grown."""
    flags = f"{FLAGS} {flags.format(folder=tmp_path / 'cache')}"
    watch = "tests.trainer.run.read_samples:sample_ids"
    whole = samples(train_vision(4, flags, watch=watch))
    parts, save = [], f"--save {tmp_path / 'checkpoints'} --load {tmp_path / 'checkpoints'} --save-interval 100"
    for last in (*stops, 100):
        parts += samples(train_vision(4, f"{flags} {save} --exit-interval {last}", watch=watch))
    assert Counter(whole) == Counter(parts)
    batches = epochs * NUM_TRAINING // BATCH
    assert Counter(batch for batch, _ in whole) == {number: BATCH for number in range(batches)}
    assert Counter(number for _, number in whole) == {number: epochs for number in range(NUM_TRAINING)}
