"""What a folder has for a model: as `from_pretrained` has it, nothing less and nothing more, and written back alike."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.capture.cut import cut
from megatron.capture.tensors import FolderTensors, Wanted, load_stage
from megatron.finetuning import checkpoint
from megatron.finetuning.pretrained import Pretrained, capture_model, open_model
from tests import workers
from tests.capture.cuts import contiguous
from tests.finetuning import cases, tiny

_SHAPE = {
    "vocab_size": 44, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 32, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
_SMALL = {key: _SHAPE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}


def mixtral():
    config = transformers.MixtralConfig(**_SHAPE, num_hidden_layers=1, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def qwen3_moe():
    """Experts in the second layer alone, a fifth of the parameters: 12, whose order as text is not that of numbers."""
    config = transformers.Qwen3MoeConfig(
        **{**_SHAPE, "intermediate_size": 200}, num_hidden_layers=2, moe_intermediate_size=4, num_experts=12,
        num_experts_per_tok=2, head_dim=8, mlp_only_layers=[0], tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SHAPE, num_hidden_layers=1))


def bert(kind: str, **changes: object):
    config = transformers.BertConfig(**{**_SMALL, "num_hidden_layers": 1, "max_position_embeddings": 32, **changes})
    return getattr(transformers, kind)(config)


def saved(model: torch.nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def opened(folder: Path, auto_model: str = "AutoModelForCausalLM", *, new_head: bool = False) -> Pretrained:
    return Pretrained(open_model(str(folder), auto_model), folder, new_head=new_head)


def edited(folder: Path, *, without: str = "", more: dict[str, torch.Tensor] | None = None) -> None:
    """Without a tensor of the file, or with others."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if without:
        del tensors[without]
    save_file({**tensors, **(more or {})}, path, metadata={"format": "pt"})


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [qwen3_moe, mixtral, llama])
def test_stages_are_what_from_pretrained_gives(tmp_path, make):
    """Tensor by tensor, and turned back they are what the file has, by name and value."""
    torch.manual_seed(0)
    folder = saved(make(), tmp_path)
    tokens = torch.randint(44, (2, 5))
    model = open_model(str(folder), "AutoModelForCausalLM")
    captured = capture_model(model, {"input_ids": tokens, "labels": tokens}, ())
    pretrained = Pretrained(model, folder, new_head=False)
    right, loaded = transformers.AutoModelForCausalLM.from_pretrained(folder), {}
    for stage in cut(captured, contiguous(captured, 3, random.Random(1))).values():
        assert load_stage(stage, folder, read=pretrained.read) == ()
        loaded.update({name: each.detach() for name, each in stage.named_parameters()})
    assert loaded.keys() == dict(right.named_parameters()).keys()
    assert all(torch.equal(each, right.get_parameter(name)) for name, each in loaded.items())
    back, written = pretrained.reverted(loaded), load_file(folder / "model.safetensors")
    assert back.keys() == written.keys() and all(torch.equal(back[name], written[name]) for name in back)


def test_only_what_a_tensor_is_made_of_is_read(tmp_path):
    """One layer's experts are many tensors of the files; no other is touched."""
    config = transformers.MixtralConfig(**_SHAPE, num_hidden_layers=2, num_local_experts=2)
    folder, read = saved(transformers.MixtralForCausalLM(config), tmp_path), []

    class Noted(FolderTensors):
        def read(self, name, shape=None):
            read.append(name)
            return super().read(name, shape)

    pretrained, name = opened(folder), "model.layers.1.mlp.experts.gate_up_proj"
    with Noted(folder) as files:
        wanted = {name: Wanted((name,), torch.Size([2, 48, 16]), torch.bfloat16)}
        ((found, value),) = pretrained.read(files, wanted)
    assert found == name and value.dtype is torch.bfloat16
    experts = "model.layers.1.block_sparse_moe.experts"
    assert sorted(read) == sorted(f"{experts}.{expert}.{weight}.weight" for expert in (0, 1) for weight in ("w1", "w3"))


MIXTRAL = "model.layers.0.block_sparse_moe.experts"
MORE = {"more": torch.zeros(24, 16)}


@pytest.mark.parametrize(
    ("make", "without", "more", "sentence"),
    [
        (llama, "model.norm.weight", {}, r"has no tensor for model.norm.weight of LlamaForCausalLM; give a folder"),
        (llama, "lm_head.weight", {}, r"has no tensor for lm_head.weight of LlamaForCausalLM"),
        (llama, "", MORE, r"has more, of which LlamaForCausalLM has no use"),
        (llama, "", {"model.layers.1.mlp.up_proj.weight": torch.zeros(24, 16)}, r"has model.layers.1.mlp.up_proj.wei"),
        (mixtral, f"{MIXTRAL}.2.w3.weight", {}, r"has no tensor .*experts.2.w3.weight, of which .*gate_up_proj is mad"),
        (mixtral, "", {f"{MIXTRAL}.4.w1.weight": torch.zeros(24, 16)}, r"has .*experts.4.w1.weight, which .*gate_up_p"),
        (mixtral, f"{MIXTRAL}.3.w2.weight", {f"{MIXTRAL}.7.w2.weight": torch.zeros(16, 24)}, r"no tensor .*3.w2.weigh"),
        (mixtral, "", {"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 16, 24)}, r"both make .*.down_proj"),
        (qwen3_moe, "model.layers.1.mlp.gate.weight", {}, r"has no tensor for model.layers.1.mlp.gate.weight"),
    ],
)  # fmt: skip
def test_a_tensor_less_or_more_is_refused_by_name(tmp_path, make, without, more, sentence):
    """Also where as many experts are there as there should be, but not the same ones."""
    folder = saved(make(), tmp_path)
    opened(folder)
    edited(folder, without=without, more=more)
    with pytest.raises(ValueError, match=sentence):
        opened(folder)


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    """One expert's, which no name shows: each rank sees what it reads."""
    folder = saved(mixtral(), tmp_path)
    edited(folder, more={f"{MIXTRAL}.{expert}.w2.weight": torch.zeros(16, 23) for expert in range(4)})
    pretrained, name = opened(folder), "model.layers.0.mlp.experts.down_proj"
    with (
        FolderTensors(folder) as files,
        pytest.raises(ValueError, match=r"experts.0.w2.weight \(and 3 more\) in shape \(4, 16, 23\), and"),
    ):
        list(pretrained.read(files, {name: Wanted((name,), torch.Size([4, 16, 24]), torch.float32)}))
    edited(folder, more={f"{MIXTRAL}.1.w2.weight": torch.zeros(16, 24)})
    with FolderTensors(folder) as files, pytest.raises(ValueError, match=r"from which .*down_proj cannot be made"):
        list(pretrained.read(files, {name: Wanted((name,), torch.Size([4, 16, 24]), torch.float32)}))


def test_tied_copies_with_other_values_are_refused(tmp_path):
    """from_pretrained would not tie them; the graph has one tensor for both."""
    folder, names = saved(qwen3_moe(), tmp_path), ("model.embed_tokens.weight", "lm_head.weight")
    assert opened(folder).notes == [
        f"{folder}: lm_head.weight to model.embed_tokens.weight: tied, so only one copy is read"
    ]
    table = load_file(folder / "model.safetensors")[names[0]]
    for copy, refused in ((table.clone(), False), (table + 1, True)):
        edited(folder, more={names[1]: copy})
        wanted = {names[0]: Wanted(names, table.shape, table.dtype)}
        with FolderTensors(folder) as files:
            if refused:
                with pytest.raises(
                    ValueError, match=r"other values for lm_head.weight .* set tie_word_embeddings to fal"
                ):
                    list(opened(folder).read(files, wanted))
            else:
                assert len(list(opened(folder).read(files, wanted))) == 1


CLASSES, ANSWERS = "AutoModelForSequenceClassification", "AutoModelForQuestionAnswering"


@pytest.mark.parametrize(
    ("kind", "auto_model", "notes"),
    [
        ("BertForSequenceClassification", CLASSES, []),
        ("BertModel", CLASSES, ["classifier.bias, classifier.weight: missing, so they are initialized at random"]),
        ("BertForMaskedLM", CLASSES, ["cls.*: not used: the task does not", "bert.pooler.* initialized at random"]),
        ("BertForPreTraining", ANSWERS, ["bert.pooler.dense.bias, .*cls.seq_rel.* their head", "qa_.* at random"]),
        ("BertForSequenceClassification", ANSWERS, ["classifier.bias.*: not used: the task", "qa_outputs.* at random"]),
        ("BertForTokenClassification", CLASSES, ["bert.pooler.dense.bias, bert.pooler.dense.weight: missing"]),
    ],
)  # fmt: skip
def test_a_head_that_the_task_replaces_is_noted(tmp_path, kind, auto_model, notes):
    """By the names of its tensors, a pooler among them, which is of no use to answers."""
    found = opened(saved(bert(kind), tmp_path), auto_model, new_head=True).notes
    assert len(found) == len(notes) and all(map(re.search, notes, found)), found


def test_a_head_of_other_classes(tmp_path):
    """It is refused, or begins at random where the flag asks for that; what has the model's shapes is read."""
    folder = saved(bert("BertForSequenceClassification"), tmp_path)
    model = open_model(str(folder), CLASSES, changes={"num_labels": 7})
    with pytest.raises(ValueError, match=r"\(classifier.bias has another shape\); give --ignore_mismatched_sizes"):
        Pretrained(model, folder, new_head=True)
    found = Pretrained(model, folder, new_head=True, other_sizes=True)
    assert found.new_names == {"classifier.weight", "classifier.bias"}
    assert found.notes == [
        f"{folder}: classifier.bias, classifier.weight: of another shape, so they are initialized at random"
    ]


def test_half_a_head_is_none(tmp_path):
    """A classifier that lacks its bias, and one with a tensor too many, are damaged files and no other task's."""
    folder = saved(bert("BertForSequenceClassification"), tmp_path)
    edited(folder, more={"classifier.scale": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"has classifier.scale, of which BertForSequenceClassification has no use"):
        opened(folder, CLASSES, new_head=True)
    saved(bert("BertForSequenceClassification"), tmp_path)
    edited(folder, without="classifier.bias")
    with pytest.raises(ValueError, match=r"has no tensor for classifier.bias of BertForSequenceClassification"):
        opened(folder, CLASSES, new_head=True)
    saved(bert("BertModel", num_hidden_layers=2), tmp_path)
    model = bert("BertForSequenceClassification")
    with pytest.raises(ValueError, match=r"has encoder.layer.1.* \(and 15 more\), of which BertForSequenceC"):
        Pretrained(model, folder, new_head=True)


@pytest.mark.full
def test_experts_go_through_a_run_unchanged(tmp_path):
    """At a learning rate of 0 the folder that two ranks write is the one that they read: names, values and logits."""
    torch.manual_seed(0)
    source = saved(qwen3_moe(), tmp_path / "source")
    tiny.tokenizer().save_pretrained(source)
    argv = ("--model_name_or_path", str(source), "--pipeline_schedule", "flush", "--max_steps", "1")
    argv += ("--learning_rate", "0", "--partition", str(cases.partition(tmp_path, "causal-lm", (0, 1), *argv)))
    workers.run(2, "tests.finetuning.cases:finetune", folder=tmp_path, task="causal-lm", argv=argv, name="written")
    with FolderTensors(tmp_path / "written") as written, FolderTensors(source) as before:
        assert written.places.keys() == before.places.keys()
        for name in before.places:
            assert torch.equal(written.read(name), before.read(name)), name
    tokens = torch.randint(44, (2, 9))
    one, other = (cases.loaded(folder, "causal-lm").eval()(tokens).logits for folder in (source, tmp_path / "written"))
    assert torch.equal(one, other)


def meet() -> dict[str, torch.Tensor]:
    """On rank r: tensors r and a, of which a of all ranks is written together."""
    rank = torch.distributed.get_rank()
    own = {f"{name}.{rank}": torch.full((1,), float(rank)) for name in "abc"}
    return checkpoint._reunited(own, lambda name: "a" if name.startswith("a") else name)


def test_tensors_that_are_written_as_one_meet(tmp_path):
    """Queries, keys and values that stages of two ranks have, and a file has as one."""
    first, second = workers.run(2, "tests.finetuning.test_pretrained:meet")
    assert sorted(first) == ["a.0", "a.1", "b.0", "c.0"] and sorted(second) == ["b.1", "c.1"]
    assert first["a.1"].item() == 1.0
