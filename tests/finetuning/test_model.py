"""A model from its folder."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from megatron.capture.tensors import tensor_files
from megatron.finetuning.partitioning import cut_model
from megatron.finetuning.plan import captured_model, make_plan, num_positions
from megatron.finetuning.pretrained import Pretrained, check_folder, open_model, read_config
from megatron.finetuning.samples import read_data
from tests.finetuning import tiny

CLASSES = "sequence-classification"


def test_renamed_modules_are_found(tmp_path):
    """transformers writes a ViT's tensors under the names that its modules once had."""
    folder = tiny.model_folder(tmp_path, "image-classification")
    model = open_model(str(folder), "AutoModelForImageClassification")
    own, in_files = dict(model.named_parameters()), set(tensor_files(folder))
    assert own.keys() != in_files, "the names are the same, so this shows nothing"
    pretrained = Pretrained(model, folder, new_head=True)
    assert pretrained.notes == [] and pretrained.unused(set()).keys() == own.keys()
    assert pretrained.reverted(pretrained.unused(set())).keys() == in_files


@pytest.mark.full
def test_how_text_is_generated_is_kept(tmp_path):
    args = tiny.arguments(tmp_path, "causal-lm")
    plan = make_plan(tiny.namespace(args, partition=None, max_stages_per_device=1), read_data(args))
    own = Path(args.model_name_or_path) / "generation_config.json"
    own.write_text(json.dumps({**json.loads(own.read_text()), "max_new_tokens": 7}))
    (tmp_path / "written").mkdir()
    plan.save_rest(tmp_path / "written")
    assert json.loads((tmp_path / "written" / own.name).read_text())["max_new_tokens"] == 7
    assert (tmp_path / "written" / "config.json").is_file()


@pytest.mark.full
@pytest.mark.parametrize("argv", [["2bw"], ["flush", "--freeze_training", "--freeze_interval", 2], ["flush"]])
def test_a_model_is_cut_as_its_schedule_needs(tmp_path, monkeypatch, argv):
    """Several stages on a device, which a profile may show to be faster, are for schedules that run them alone."""
    asked = []

    def cut(*arguments, methods, **options):
        asked.extend(methods)
        return cut_model(*arguments, methods=methods, **options)

    monkeypatch.setattr("megatron.finetuning.plan.cut_model", cut)
    args = tiny.arguments(tmp_path, CLASSES, "--dry_run", "--devices", 2, "--pipeline_schedule", *argv)
    plan = make_plan(tiny.namespace(args, partition=None), read_data(args))
    assert asked == (["sequential", "mixed"] if argv == ["flush"] else ["sequential"])
    assert argv == ["flush"] or plan.partition.rank_of_stage == (0, 1)


def test_more_tokens_than_the_model_has_positions(tmp_path):
    args = tiny.arguments(tmp_path, "causal-lm", "--max_seq_length", 33)
    with pytest.raises(ValueError, match=r"--max_seq_length 33 is more than the 32 positions of .*; give 32 or less"):
        make_plan(args, read_data(args))


def test_a_model_that_sees_what_it_is_to_predict(tmp_path):
    """A BERT is refused as a causal model, and taken once it is told to be one."""
    folder = tiny.model_folder(tmp_path, CLASSES)
    texts = tiny.data_file(tmp_path, "causal-lm")
    words = ["--task", "causal-lm", "--model_name_or_path", folder, "--train_file", texts]
    args = tiny.arguments(tmp_path, CLASSES, *words)
    with pytest.raises(
        ValueError, match=r"is a bert, whose attention is not causal.*; set is_decoder to true in its conf"
    ):
        captured_model(args, read_data(args))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_decoder": True}))
    captured, *_ = captured_model(args, read_data(args))
    assert captured.model_name == "BertLMHeadModel"


def test_positions_behind_that_of_padding():
    """RoBERTa's real positions begin at 2 with the usual padding, so 2 of its 514 are none; BERT has all."""
    import transformers

    small = {
        "vocab_size": 16,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    roberta = transformers.RobertaConfig(**small, max_position_embeddings=14, pad_token_id=1)
    model = transformers.RobertaForSequenceClassification(roberta)
    assert num_positions(model) == 12
    model(input_ids=torch.full((1, 12), 5))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(input_ids=torch.full((1, 13), 5))
    bert = transformers.BertConfig(**small, max_position_embeddings=14)
    assert num_positions(transformers.BertForSequenceClassification(bert)) == 14
    assert num_positions(torch.nn.Module()) is None


def test_tokens_that_hold_no_text(tmp_path):
    with pytest.raises(ValueError, match=r"2 tokens leave no room for a text, as 2 are special; give a larger"):
        read_data(tiny.arguments(tmp_path, CLASSES, "--max_seq_length", 2))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", "[]", r"config\.json cannot be read: Unrecognized model"),
        ("config.json", '{"model_type": "bert", "hidden_size": "x"}', r"config\.json cannot be read: .*hidden_size"),
        ("tokenizer.json", "{}", r"the AutoTokenizer of .* cannot be read: .*; save it anew"),
        ("tokenizer_config.json", "[]", r"the AutoTokenizer of .* cannot be read: .*; save it anew"),
    ],
)
def test_damaged_files_of_a_model(tmp_path, name, content, sentence):
    args = tiny.arguments(tmp_path, CLASSES)
    (Path(args.model_name_or_path) / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        read_data(args)


def test_sentences(tmp_path):
    with pytest.raises(ValueError, match="nowhere is no folder; download the model first"):
        check_folder("nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json, so it is no model of transformers"):
        check_folder(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such thing"}))
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        read_config(str(tmp_path))
    folder = tiny.model_folder(tmp_path, "causal-lm")
    with pytest.raises(ValueError, match=r"gpt2 of .* has no AutoModelForSeq2SeqLM: .*; choose another --task"):
        open_model(str(folder), "AutoModelForSeq2SeqLM")
    config = transformers.DebertaV2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.save_pretrained(tmp_path / "deberta")
    with pytest.raises(
        ValueError, match=r"deberta-v2 of .* has no --attn_implementation sdpa: Deb.* does not .* yet; leave it out"
    ):
        open_model(str(tmp_path / "deberta"), "AutoModelForMaskedLM", attention="sdpa")


@pytest.mark.full
@pytest.mark.parametrize(("word", "is_kernel"), [("eager", False), ("sdpa", True)])
def test_attention_as_operators_or_as_a_kernel(tmp_path, word, is_kernel):
    args = tiny.arguments(tmp_path, "chat", "--attn_implementation", word)
    captured, *_ = captured_model(args, read_data(args))
    assert any("attention" in str(node.target) for node in captured.nodes) == is_kernel
    assert any("softmax" in str(node.target) for node in captured.nodes if node is not captured.loss) != is_kernel
