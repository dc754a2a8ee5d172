"""Runs of programs that users bring: what they compute is what one process computes, however they are stopped."""

from pathlib import Path

import pytest
import torch

from tests.pipeline.brought_programs import FOLDED, RHYTHM, TORCH, WHOLE, hurried_2bw, written
from tests.trainer.run.run_case import joined_weights, train
from tests.trainer.run.test_virtual_stages import EXACT, FULL, TWO_BW, single, values

FOUR = f"{EXACT} --global-batch-size 4"  # microbatches of one sample

# name: (text, flags of the single process)
PROGRAMS = {
    "torch": (TORCH, FOUR),
    "whole": (WHOLE, FOUR),
    "rhythm": (RHYTHM, f"{FOUR} {TWO_BW}"),
    "folded": (FOLDED, f"{FOUR} {TWO_BW}"),
    "hurried": (hurried_2bw(), f"{FOUR} {TWO_BW}"),
}


def flags_of(model: str, path: Path) -> str:
    """The same model, trained with the rows of a file."""
    return f"{model.replace(TWO_BW, '')} --pipeline-program {path}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_what_one_process_trains(name, tmp_path):
    """With dropout, untied and unclipped, each is another order than any preset's: losses and weights are bit-equal."""
    text, model = PROGRAMS[name]
    expected, weights = single(model)
    results = train(2, flags_of(model, written(tmp_path, text)))
    assert values(results)["lm_loss"] == expected["lm_loss"]
    found = joined_weights(results)
    assert found.keys() == weights.keys()
    assert not [each for each, tensor in weights.items() if not torch.equal(found[each], tensor)]
