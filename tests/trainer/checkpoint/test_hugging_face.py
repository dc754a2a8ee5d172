"""--load-hf: the logits of transformers at any degrees, and refusals of what would silently compute others."""

import pytest

from tests.trainer.checkpoint.small_models import MODELS, reaches, saved, transformers_logits

NULL = "--tokenizer-type NullTokenizer"
TOLERANCE = 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    """One rank, every architecture, and what its configuration may say."""
    folder = saved(name)
    assert reaches(folder, f"--load-hf {folder} {NULL}", transformers_logits(folder)) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_each_rank_reads_its_own_part(name):
    """Two stages of two tensor ranks each, with a padded vocabulary."""
    folder = saved(name)
    cut = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64"
    cut += " --sequence-parallel" * (name in ("mixtral", "qwen3_moe"))
    assert reaches(folder, f"--load-hf {folder} {NULL} {cut}", transformers_logits(folder), ranks=4) < TOLERANCE
