"""--load-hf: the logits of transformers at any degrees, and refusals of what would silently compute others."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import workers
from tests.trainer.checkpoint import small_models
from tests.trainer.checkpoint.small_models import MODELS, reaches, saved, stored, transformers_logits
from tests.trainer.run.run_case import joined_weights, train

NULL = "--tokenizer-type NullTokenizer"
TOLERANCE = 1e-6


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama of four"])
def test_logits_are_those_of_transformers(name):
    """One rank, every architecture, and what its configuration may say."""
    folder = saved(name)
    assert reaches(folder, f"--load-hf {folder} {NULL}", transformers_logits(folder)) < TOLERANCE


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "mixtral", "gpt2"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("mistral", "qwen2", "qwen3", "qwen3_moe")),
    ],
)
def test_each_rank_reads_its_own_part(name):
    """Two stages of two tensor ranks each, with a padded vocabulary."""
    folder = saved(name)
    cut = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64"
    cut += " --sequence-parallel" * (name in ("mixtral", "qwen3_moe"))
    assert reaches(folder, f"--load-hf {folder} {NULL} {cut}", transformers_logits(folder), ranks=4) < TOLERANCE


def changed(folder: Path, tmp_path: Path, **keys: object) -> Path:
    """A copy of a model's folder with other keys in its configuration; None takes a key out."""
    copy = Path(shutil.copytree(folder, tmp_path / "changed"))
    config = json.loads((copy / "config.json").read_text())
    config = {key: value for key, value in (config | keys).items() if keys.get(key, "") is not None}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_another_rotary_base_shows(tmp_path):
    """A base of 10,000 in place of Mixtral's million moves the logits by far more than the tolerance."""
    folder = saved("mixtral")
    other = changed(folder, tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    assert reaches(other, f"--load-hf {other} {NULL}", transformers_logits(folder)) > 1e-3


def test_older_files_are_read(tmp_path):
    """Older keys, buffers beside the weights, a head that is the embedding, a model that was saved without its head."""
    folder = saved("gpt2")
    older = changed(folder, tmp_path, n_ctx=32, torch_dtype="float32", dtype=None)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in stored(folder).items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4).byte(), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    tensors |= {"h.1.attn.bias": torch.ones(1, 1, 4, 4).bool(), "embeddings.position_ids": torch.arange(4)}
    save_file({**tensors, "lm_head.weight": tensors["wte.weight"].clone()}, older / "model.safetensors")
    assert reaches(older, f"--load-hf {older} {NULL}", transformers_logits(folder)) < TOLERANCE
    save_file({**tensors, "lm_head.weight": tensors["wte.weight"] + 1}, older / "model.safetensors")
    with pytest.raises(workers.WorkerError, match="set tie_word_embeddings to false"):
        reaches(older, f"--load-hf {older} {NULL}", transformers_logits(folder))


def test_norms_of_the_first_berts_are_read(tmp_path):
    """Their names are TensorFlow's."""
    folder = saved("bert")
    older = Path(shutil.copytree(folder, tmp_path / "older"))
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {old_name(name, old): tensor for name, tensor in stored(folder).items()}
    assert len(tensors.keys() - stored(folder).keys()) == 2 * (2 + 2 * 2)
    save_file(tensors, older / "model.safetensors")
    assert reaches(older, f"--load-hf {older} {NULL}", transformers_logits(folder)) < TOLERANCE


def old_name(name: str, old: dict[str, str]) -> str:
    return next((name.removesuffix(new) + then for new, then in old.items() if name.endswith(new)), name)


@pytest.mark.parametrize(
    "name, tensors, message",
    [
        ("llama", {"lm_head.weight": None}, "no tensor lm_head.weight"),
        ("qwen2", {"model.layers.1.self_attn.q_proj.bias": None}, "no tensor model.layers.1.self_attn.q_proj.bias"),
        ("llama", {"model.layers.2.mlp.up_proj.weight": torch.ones(48, 32)}, "has model.layers.2.mlp.up_proj.weight"),
        ("llama", {"model.norm.weight": torch.ones(33)}, r"has shape \(33,\), and config.json asks for \(32,\)"),
        ("llama", {"model.layers.0.self_attn.q_proj.weight": torch.ones(32, 32).bfloat16()}, "in several dtypes"),
        ("llama", {"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, "is of dtype FP8, and there is no"),
    ],
)
def test_files_of_another_model_are_refused(name, tensors, message, tmp_path):
    """By the tensor's name, before anything is loaded."""
    folder = changed(saved(name), tmp_path)
    there = {key: tensor for key, tensor in (stored(folder) | tensors).items() if tensor is not None}
    save_file(there, folder / "model.safetensors")
    with pytest.raises(workers.WorkerError, match=message):
        workers.run(1, "tests.trainer.checkpoint.small_models:logits_case", flags=f"--load-hf {folder} {NULL}")


def test_a_truncated_file_is_refused(tmp_path):
    """Before anything is loaded."""
    folder = changed(saved("llama"), tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(workers.WorkerError, match="truncated or damaged"):
        workers.run(1, "tests.trainer.checkpoint.small_models:logits_case", flags=f"--load-hf {folder} {NULL}")


SCHEDULES = {
    "2bw": "--pipeline-schedule 2bw",
    "predicted": "--pipeline-schedule 2bw --2bw-provisional uniform --2bw-provisional-microbatches 1",
    "zbv": "--pipeline-schedule zbv --num-virtual-stages-per-pipeline-rank 2 --no-gradient-accumulation-fusion",
    "interleaved": "--num-virtual-stages-per-pipeline-rank 2",
    "l2l": "--pipeline-schedule l2l",
    "replicas": "--pipeline-model-parallel-size 1 --use-distributed-optimizer",
}


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["2bw", "zbv", *(pytest.param(name, marks=pytest.mark.full) for name in SCHEDULES if name not in ("2bw", "zbv"))],
)
def test_a_run_starts_from_these_weights(name, tmp_path):
    """Under every placement, with bf16 masters: the losses of a run that starts from the converted checkpoint."""
    folder = saved("llama of four", torch.bfloat16)
    workers.run(1, f"{small_models.__name__}:convert_case", source=folder, output=tmp_path / "ours")
    flags = (
        f"--seq-length 16 --bf16 --train-iters 3 --lr 1e-3 {NULL} {SCHEDULES[name]} --make-vocab-size-divisible-by 1"
    )
    base = "--micro-batch-size 1 --global-batch-size 4 --num-workers 0 --log-interval 1 --eval-iters 0"
    ours = train(2, f"{flags} --load-hf {folder}", base=base)
    theirs = train(2, f"@{tmp_path / 'ours' / 'flags.txt'} {flags} --load {tmp_path / 'ours'}", base=base)
    assert ours[-1]["losses"] == theirs[-1]["losses"] and len(ours[-1]["losses"]) == 3
    one, other = joined_weights(ours), joined_weights(theirs)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert any(f"loaded the weights of {folder}" in line for line in ours[0]["lines"])


def test_layers_of_either_implementation_load_the_other(tmp_path):
    """Transformer Engine's layers with experts have other keys for their norms; and so in a conversion."""
    folder = saved("mixtral")
    workers.run(1, f"{small_models.__name__}:convert_case", source=folder, output=tmp_path / "engine", own_norms=True)
    flags = f"@{tmp_path / 'engine' / 'flags.txt'} --load {tmp_path / 'engine'} --dist-ckpt-strictness raise_all"
    assert reaches(folder, flags, transformers_logits(folder)) < TOLERANCE
    argv = {"source": tmp_path / "engine", "output": tmp_path / "back", "to": "hugging-face"}
    workers.run(1, f"{small_models.__name__}:convert_case", **argv)
    assert all(torch.equal(tensor, stored(folder)[name]) for name, tensor in stored(tmp_path / "back").items())


def test_a_tokenizer_with_more_tokens_is_refused():
    """Their rows would be zero."""
    flags = f"--seq-length 16 --train-iters 1 --lr 1e-3 --load-hf {saved('llama')} --mock-data"
    with pytest.raises(
        workers.WorkerError, match=r"the tokenizer has \d+ tokens, and the model of --load-hf .* 100; give"
    ):
        train(1, f"{flags} --tokenizer-type ByteLevelTokenizer", base="--micro-batch-size 1 --num-workers 0")


def test_a_run_goes_on_from_its_own_checkpoint(tmp_path):
    """The same command again does not start from the folder again."""
    flags = f"--seq-length 16 --lr 1e-3 {NULL} --load-hf {saved('llama')} --save {tmp_path} --load {tmp_path}"
    base = "--micro-batch-size 1 --global-batch-size 4 --num-workers 0 --log-interval 1 --eval-iters 0 --train-iters"
    train(1, flags, base=f"{base} 2")
    again = train(1, flags, base=f"{base} 3 --override-opt_param-scheduler")
    assert list(again[0]["losses"]) == [3]
    assert not any("loaded the weights of" in line for line in again[0]["lines"])
