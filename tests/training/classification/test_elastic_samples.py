"""Samples while the pipeline changes: each epoch has all of them once, with replicas that come in its middle."""

from collections import Counter

import pytest

from tests.training.classification.vision_helper import NUM_TRAINING, train_vision

EPOCHS, BATCH = 4, 8
FLAGS = (
    f"--epochs {EPOCHS} --untie-embeddings-and-output-weights --freeze-training --freeze-interval 2 "
    "--freeze-schedule 1,2,3 --elastic-pipeline --elastic-schedule 4,2,1 --eval-interval 100"
)


def samples(results: list[dict]) -> list[tuple[int, int]]:
    return [each for result in results for each in result["watched"]]


@pytest.mark.parametrize("cache", [False, pytest.param(True, marks=pytest.mark.full)])
def test_none_twice_and_none_lost(tmp_path, cache):
    """Over three changes, and over four runs each of which goes on from where the one before has stopped: right behind
    a decision, between two, and in the middle of an epoch. Each batch has the same samples."""
    flags = f"{FLAGS} --activation-cache {tmp_path / 'cache'}" if cache else FLAGS
    watch = "tests.training.classification.read_samples:sample_ids"
    whole = samples(train_vision(4, flags, watch=watch))
    parts, save = [], f"--save {tmp_path / 'checkpoints'} --load {tmp_path / 'checkpoints'} --save-interval 100"
    for last in (3, 4, 7, 100):
        parts += samples(train_vision(4, f"{flags} {save} --exit-interval {last}", watch=watch))
    assert Counter(whole) == Counter(parts)
    batches = EPOCHS * NUM_TRAINING // BATCH
    assert Counter(batch for batch, _ in whole) == {number: BATCH for number in range(batches)}
    assert Counter(number for _, number in whole) == {number: EPOCHS for number in range(NUM_TRAINING)}
