"""Each stage reads its own tensors and nothing else; without memory for parameters a model is the same graph."""

import random
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from megatron.capture import tensors
from megatron.capture.blocks import blocks_of
from megatron.capture.cut import StageData, cut
from megatron.capture.export import capture, signature
from megatron.capture.tensors import fake_parameters, give_values, is_fake, load_stage, tensor_files
from tests.capture.cuts import contiguous, spread
from tests.capture.in_turn import train_in_turn
from tests.capture.models import KINDS, captured, eager_loss, gpt2, gradients, tokens

BATCH = {"input_ids": tokens(2, 9), "labels": tokens(2, 9)}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return gpt2(0.0).train()


@pytest.fixture(scope="module")
def graph():
    """The graph of the same model without values."""
    with fake_parameters():
        return capture(gpt2(0.0).train(), BATCH)


def fresh(graph):
    return cut(graph, contiguous(graph, 3, random.Random(1)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("shards", [False, True], ids=["one", "several"])
def test_stages_load_what_a_model_saved(model, graph, tmp_path, shards):
    """Tied weights, which a file has once; the loss is that of the model."""
    model.save_pretrained(tmp_path, max_shard_size="20KB" if shards else "1GB")
    assert (len(set(tensor_files(tmp_path).values())) > 2) == shards
    stages = fresh(graph)
    for stage in stages.values():
        assert load_stage(stage, tmp_path) == ()
        assert not any(is_fake(each) for each in stage.parameters())
    assert torch.equal(train_in_turn(stages, StageData(BATCH))[0], model(**BATCH).loss)


def test_a_stage_reads_no_file_of_others(model, graph, tmp_path, monkeypatch):
    """All files may be missing in which a stage has no tensor, and no other tensor is read."""
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    stage = fresh(graph)[1]
    places = tensor_files(tmp_path)
    needed = {places[name] for name, _ in stage.named_parameters()}
    others = set(places.values()) - needed
    assert others
    for path in others:
        path.unlink()
    read = []
    original = tensors.FolderTensors.read

    def noted(files, name, shape=None):
        read.append(name)
        return original(files, name, shape)

    monkeypatch.setattr(tensors.FolderTensors, "read", noted)
    load_stage(stage, tmp_path)
    assert sorted(read) == sorted(name for name, _ in stage.named_parameters())
    assert all(torch.equal(each, model.get_parameter(name)) for name, each in stage.named_parameters())
    with pytest.raises(ValueError, match="is no safetensors file that can be read"):
        load_stage(fresh(graph)[0], tmp_path)


def test_what_a_folder_lacks(model, graph, tmp_path):
    """A folder of GPT2Model, whose names lack the prefix: it is refused, or made."""
    model.transformer.save_pretrained(tmp_path)
    stage = fresh(graph)[0]
    with pytest.raises(ValueError, match=r"has no tensor for transformer.*; give the folder"):
        load_stage(stage, tmp_path)
    made = load_stage(stage, tmp_path, initial=lambda name, shape, dtype: torch.full(shape, 2.0, dtype=dtype))
    assert sorted(made) == sorted(name for name, _ in stage.named_parameters())
    assert all((each == 2).all() for each in stage.parameters())


def test_an_index_of_other_files(model, graph, tmp_path):
    """A file that lacks what the index names, or has more, is of another download."""
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    path = tensor_files(tmp_path)["transformer.wte.weight"]
    save_file({**load_file(path), "more": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"and model.safetensors.index.json do not agree about more; download both ag"):
        load_stage(fresh(graph)[0], tmp_path)


@pytest.mark.full
def test_bf16_from_fp32(model, tmp_path):
    """Files of another dtype are converted to that of the parameters, and their values are there for who asks."""
    model.save_pretrained(tmp_path)
    with fake_parameters(torch.bfloat16):
        graph = capture(gpt2(0.0).train(), BATCH)
    stage = fresh(graph)[2]
    exact = {}
    load_stage(stage, tmp_path, exact=exact)
    parameters = dict(stage.named_parameters())
    assert parameters.keys() <= exact.keys()
    for name, each in parameters.items():
        assert each.dtype is torch.bfloat16 and torch.equal(each, model.get_parameter(name).bfloat16())
        assert exact[name].dtype is torch.float32 and torch.equal(exact[name], model.get_parameter(name))
    new = {}
    drawn = lambda name, shape, dtype: torch.full(shape, 0.1, dtype=dtype)  # noqa: E731
    cut_off = fresh(graph)[2]
    folder = tmp_path / "empty"
    folder.mkdir()
    save_file({"other": torch.zeros(1)}, folder / "model.safetensors")
    load_stage(cut_off, folder, initial=drawn, exact=new)
    for name, each in cut_off.named_parameters():
        assert new[name].unique().item() == torch.tensor(0.1).item() and torch.equal(each, new[name].bfloat16())


def test_folders_that_cannot_be_read(model, graph, tmp_path):
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load_stage(fresh(graph)[0], tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not so")
    with pytest.raises(ValueError, match=r"is no safetensors file that can be read"):
        load_stage(fresh(graph)[0], tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no weight_map"):
        load_stage(fresh(graph)[0], tmp_path)


def test_another_shape_is_refused(graph, tmp_path):
    config = transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=4, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has shape \(61, 16\), and the model has \(61, 32\)"):
        load_stage(fresh(graph)[0], tmp_path)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    save_file({"other": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor for transformer"):
        load_stage(fresh(graph)[0], tmp_path)


# --- without memory


MARKS = {"plain": ()}
"""Kinds for the usual selection of tests."""


@pytest.mark.parametrize("kind", [pytest.param(each, marks=MARKS.get(each, pytest.mark.full)) for each in KINDS])
def test_the_graph_is_the_same(kind):
    """And buffers are real: no checkpoint has those that are not persistent."""
    with fake_parameters():
        model = KINDS[kind].build(0.1).train()
    assert all(is_fake(each) for each in model.parameters())
    assert not any(is_fake(each) for each in model.buffers())
    ours = capture(model, KINDS[kind].batch(2), loss=KINDS[kind].loss, keep=KINDS[kind].kept)
    assert signature(ours) == signature(captured(kind)[1])
    assert not any(is_fake(each) for each in ours.graph_module.buffers())


def test_stages_with_values_compute():
    """Cut without values and given them, stages compute what a model does that has had them from the beginning."""
    torch.manual_seed(0)
    kind = KINDS["plain"]
    model = kind.build(0.0).train()
    with fake_parameters():
        fake = kind.build(0.0).train()
    batch = kind.batch(2)
    ours = capture(fake, batch, loss=kind.loss)
    blocks = blocks_of(ours)
    stages = cut(ours, spread({block: int(2 * place > len(blocks)) for place, block in enumerate(blocks)}))
    values = {name: each.detach().clone() for name, each in model.named_parameters()}
    for stage in stages.values():
        give_values(stage, values.__getitem__)
    loss, _ = train_in_turn(stages, StageData(batch))
    expected = eager_loss("plain", model, batch)
    assert torch.equal(loss, expected)
    found = {name: each.grad for stage in stages.values() for name, each in stage.named_parameters()}
    for name, gradient in gradients(expected, model).items():
        assert torch.equal(found[name], gradient)


def test_a_model_that_reads_its_parameters_is_refused():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.norm = float(self.weight.detach().norm())

    with pytest.raises(ValueError, match="reads values of its parameters while it is built"), fake_parameters():
        Reads()
    assert not is_fake(nn.Linear(2, 2).weight)


T5_3B = """
import resource, time, torch
from transformers import T5Config, T5ForConditionalGeneration
from megatron.capture.export import capture
from megatron.capture.tensors import fake_parameters
before = time.process_time()
with fake_parameters():
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=32128, d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32, decoder_start_token_id=0))
assert sum(each.numel() for each in model.parameters()) == 2851598336
batch = {"input_ids": torch.randint(1, 64, (2, 512)), "labels": torch.randint(1, 64, (2, 4))}
print(len(capture(model, batch).nodes), time.process_time() - before)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.full
@pytest.mark.alone
def test_t5_3b_is_captured_in_25_seconds_and_1_gb():
    """2.85 billion parameters, of which none has memory: CPU seconds, and the peak of the process."""
    output = subprocess.run([sys.executable, "-c", T5_3B], check=True, capture_output=True, text=True).stdout.split()
    print(f"{output[0]} operators, {float(output[1]):.1f} CPU s, {int(output[2]) / 1e6:.0f} MB")
    assert float(output[1]) < 25 and int(output[2]) < 1e9
