"""A BERT that reads what its frozen layers put out, against one that computes it."""

import re

import pytest
import torch

from tests.trainer.run.run_case import joined_weights
from tests.trainer.run.text_helper import NUM_TRAINING, train_texts
from tests.trainer.run.vision_helper import norms, numbers

FLAGS = (
    "--epochs 6 --untie-embeddings-and-output-weights --freeze-training --freeze-interval 4 --freeze-schedule 1,2 "
    "--hidden-dropout 0.1 --attention-dropout 0.1"
)


@pytest.mark.full
@pytest.mark.parametrize("flags", ["", "--pipeline-schedule 2bw --bf16"])
def test_equals_one_that_computes(flags, tmp_path):
    """Bit for bit, with evaluations, which compute. Squares of norms are added up in another order, since all frozen
    layers lie on the rank that reads."""
    cache = f"--activation-cache {tmp_path} --activation-cache-gib 0.1 --activation-cache-use always"
    computed, cached = train_texts(2, f"{FLAGS} {flags}"), train_texts(2, f"{FLAGS} {flags} {cache}")
    assert numbers(cached) == numbers(computed)
    assert norms(cached) == pytest.approx(norms(computed), rel=1e-14)
    weights = joined_weights(computed)
    assert all(torch.equal(value, weights[name]) for name, value in joined_weights(cached).items())
    told = [re.search(r"(\d+) samples read .* (\d+) written", line) for line in cached[-1]["lines"]]
    read, written = map(sum, zip(*((int(each[1]), int(each[2])) for each in told if each), strict=True))
    assert read > NUM_TRAINING and written >= 2 * NUM_TRAINING
