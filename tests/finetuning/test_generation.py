"""Answers that evaluations generate: transformers' `generate` has the same, to the token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers

from megatron.finetuning import decoding
from megatron.finetuning.arguments import parse_args
from megatron.finetuning.data.text_metrics import TEXT_METRICS, TextMetric
from megatron.finetuning.decoding import Decoder
from megatron.finetuning.pretrained import open_model
from megatron.finetuning.samples import read_data
from megatron.trainer.report.metrics import read_metrics
from tests import workers
from tests.finetuning import cases, lora, tiny

GENERATES = ["--predict_with_generate", "--do_eval"]
TRAINS = ["--do_train", "--dataloader_drop_last", "--max_steps", 4, "--learning_rate", 0.02]
PENALISED = {
    "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 2,
    "suppress_tokens": [9], "begin_suppress_tokens": [5], "exponential_decay_length_penalty": [2, 1.1],
    "forced_eos_token_id": 3, "num_beams": 4, "do_sample": True, "temperature": 0.1,
}  # fmt: skip
"""Settings that change what is generated greedily, and three that do not."""


def case(*, folder: str, task: str, argv: list, name: str) -> list[list[int]]:
    """The answers of a run's last evaluation."""
    found, decode = [], Decoder.decode

    def kept(self, pipeline):
        found.append(decode(self, pipeline))
        return found[-1]

    with mock.patch.object(Decoder, "decode", kept):
        cases.finetune(folder, task, argv=argv, name=name, weights="nothing_of")
    return found[-1] if dist.get_rank() == 0 else []


def run(folder: Path, name: str, task: str, argv: list, ranks: int) -> list[list[int]]:
    answers, *_ = workers.run(
        ranks, "tests.finetuning.test_generation:case", folder=str(folder), task=task, argv=[*map(str, argv)], name=name
    )
    return answers


def generated(model: torch.nn.Module, folder: Path, task: str, argv: list, most: int) -> list[list[int]]:
    """What transformers generates from each prompt alone."""
    args = parse_args(tiny.command(folder, task, *argv))
    answers = []
    for ids in read_data(args).prompts.ids:
        room = most if task == "text-to-text" else min(most, args.max_seq_length - len(ids))
        if room <= 0:
            answers.append([])
            continue
        found = model.eval().generate(torch.tensor([ids]), do_sample=False, num_beams=1, max_new_tokens=room)
        answers.append(found[0, 1 if task == "text-to-text" else len(ids) :].tolist())
    return answers


def talkative(folder: Path, task: str, **settings: object) -> Path:
    """The tiny model with weights so large that it says much, and end tokens so many that some answers are short."""
    path = tiny.model_folder(folder, task)
    model = cases.loaded(path, task)
    torch.manual_seed(3)
    for each in model.parameters():
        each.data += torch.randn_like(each)
    model.save_pretrained(path)
    file = path / "generation_config.json"
    settings = {"eos_token_id": [3, *range(12, 18)], **settings}
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return path


def validation(folder: Path, task: str) -> list:
    return ["--validation_file", tiny.data_file(folder, task, num_samples=7, seed=5)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("task", "ranks", "settings", "argv"),
    [
        ("chat", 2, PENALISED, ["--pipeline_schedule", "flush", "--packing"]),
        ("text-to-text", 2, {}, ["--pipeline_schedule", "flush"]),
        ("text-to-text", 1, PENALISED, ["--pipeline_schedule", "l2l"]),
        ("chat", 2, {}, ["--pipeline_schedule", "2bw", "--gradient_accumulation_steps", 3, *TRAINS]),
        ("chat", 2, {}, ["--data_parallel_size", 2]),
        ("chat", 1, {}, ["--pipeline_schedule", "l2l", "--adapter_name_or_path"]),
    ],
)
def test_transformers_generates_the_same(tmp_path, task, ranks, settings, argv):
    """Each answer to its last token, in rows among others of other lengths and in a short last microbatch: of the
    folder's model, with an adapter, and at the end of a training."""
    folder = talkative(tmp_path, task, **settings)
    words = [*GENERATES, *validation(tmp_path, task), "--max_seq_length", 16]
    argv = [*words, *argv]
    if argv[-1] == "--adapter_name_or_path":
        argv.append(lora.begun(folder, task, tmp_path / "adapter"))
    found = run(tmp_path, "out", task, argv, ranks)
    if "--adapter_name_or_path" in argv:
        model = lora.adapted(folder, task, tmp_path / "adapter")
        assert found != generated(cases.loaded(folder, task), tmp_path, task, words, most=6)
    else:
        model = cases.loaded(tmp_path / "out" if "--do_train" in argv else folder, task)
    assert found == generated(model, tmp_path, task, words, most=6)
    assert len({*map(tuple, found)}) > 3 and len({*map(len, found)}) > 1, found


SHAPE = {"vocab_size": 44, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": [3, 12, 13]}
LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32, "decoder_start_token_id": 3,
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
        ("OPT", {**LAYERS, "ffn_dim": 32, "max_position_embeddings": 32, "word_embed_proj_dim": 16}),
        ("Bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2}),
        ("Mamba", {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
        ("Gemma2", {**LAYERS, "head_dim": 8, "num_key_value_heads": 1, "sliding_window": 4}),
        ("Mixtral", {**LAYERS, "num_key_value_heads": 1, "num_local_experts": 4}),
        ("T5", {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}),
        ("Bart", BART),
        ("M2M100", BART),
        ("Pegasus", BART),
    ],
)
def test_rows_decode_to_what_transformers_generates(tmp_path, monkeypatch, kind, shape):
    """Positions of every kind, padding on the right and labels for a decoder's tokens: the models themselves. Each
    token of an answer costs a forward of its row."""
    model = model_of(kind, shape, tmp_path)
    task = "text-to-text" if model.config.is_encoder_decoder else "chat"
    words = [*GENERATES, *validation(tmp_path, task), "--max_seq_length", 16]
    args = parse_args(tiny.command(tmp_path, task, *words, "--model_name_or_path", tmp_path))
    data = read_data(args)

    ran = []

    def run_forward(pipeline, rows, microbatches):
        ran.extend(number for part in microbatches for number in part)
        found = []
        for part in microbatches:
            batch = rows.batch(part, 3)
            reads = {name: each for name, each in batch.items() if name in taken}
            with torch.no_grad():
                found.append(pipeline.results.summary("logits", model(**reads).logits, batch)[: len(part)])
        return [], {"logits": torch.cat(found)}

    monkeypatch.setattr(decoding, "forward", run_forward)
    taken = {"input_ids", "attention_mask", "labels"}
    opened = open_model(str(tmp_path), data.task.auto_model)
    found = Decoder(args, opened, data.prompts, 0).decode(SimpleNamespace(results=SimpleNamespace(summary=None)))
    assert found == generated(model, tmp_path, task, words, most=6)
    assert len({*map(tuple, found)}) > 2, found
    assert [ran.count(number) for number in range(len(found))] == [len(answer) for answer in found]


def model_of(kind: str, shape: dict, folder: Path) -> torch.nn.Module:
    """A random model that says much, in a folder with the tiny tokenizer."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **shape})
    name = next(name for name in (f"{kind}ForConditionalGeneration", f"{kind}ForCausalLM", f"{kind}LMHeadModel")
                if hasattr(transformers, name))  # fmt: skip
    model = getattr(transformers, name)(config).eval()
    for each in model.parameters():
        each.data += torch.randn_like(each) * (1.0 if each.dim() > 1 else 0.1)
    if config.is_encoder_decoder:
        model.generation_config.forced_bos_token_id = 20
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "shape", "settings", "sentence"),
    [
        ("MBart", BART, {}, "MBartForConditionalGeneration does not make its decoder's tokens of"),
        ("Bart", BART, {"decoder_start_token_id": 2}, "of the start token 2 and its labels"),
        ("T5", {"num_layers": 1, "decoder_start_token_id": 0}, {"guidance_scale": 2.0}, "with guidance_scale 2.0"),
        ("T5", {"num_layers": 1, "decoder_start_token_id": 0}, {"stop_strings": "w1"}, "with stop_strings w1"),
        ("XLNet", {"d_model": 16, "n_layer": 1, "n_head": 2}, {}, "is a xlnet, which reads a mask token"),
        (
            "Phi3",
            {**LAYERS, "original_max_position_embeddings": 8, "max_position_embeddings": 32,
             "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
                                 "long_factor": [2.0] * 4, "original_max_position_embeddings": 8}},
            {},
            "other rotary frequencies for rows of more than 8 tokens, and --max_seq_length 12 pads short ones",
        ),
    ],
)  # fmt: skip
def test_what_would_not_be_the_same_is_refused(tmp_path, kind, shape, settings, sentence):
    model = model_of(kind, shape, tmp_path)
    task = "text-to-text" if model.config.is_encoder_decoder else "chat"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, **settings}))
    words = [*GENERATES, *validation(tmp_path, task), "--model_name_or_path", tmp_path]
    args = parse_args(tiny.command(tmp_path, task, *words))
    data = read_data(args)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Decoder(args, open_model(str(tmp_path), data.task.auto_model), data.prompts, 0)


def test_answers_are_metrics_and_a_file(tmp_path):
    """Of each evaluation; the last one's answers are beside their prompts and references, and the best checkpoint is
    the one with the most exact matches. A prompt without room has no answer."""
    samples = [("w1 w2", "w5"), ("w3", "w6"), ("w4 " * 20, "w7")]
    file = tmp_path / "validation.jsonl"
    file.write_text("".join(json.dumps({"prompt": one, "completion": other}) + "\n" for one, other in samples * 3))
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps({"prompt": one, "completion": other}) + "\n" for one, other in samples[:2] * 6))
    argv = ["--predict_with_generate", "--train_file", train, "--validation_file", file, "--max_eval_samples", 6]
    argv += ["--learning_rate", 0.03, "--num_train_epochs", 15, "--eval_steps", 20, "--lr_scheduler_type", "constant"]
    argv += ["--save_strategy", "best", "--metric_for_best_model", "generated_exact_match", "--max_new_tokens", 4]
    argv += ["--pipeline_schedule", "flush", "--predictions_file", tmp_path / "some" / "answers.jsonl"]
    answers = run(tmp_path, "out", "chat", argv, 1)
    lines = read_metrics(str(tmp_path / "out.jsonl"))
    found = [line["eval_generated_exact_match"] for line in lines if "eval_loss" in line]
    assert len(found) == 3 and found[-1] == pytest.approx(2 / 3), found
    written = [json.loads(line) for line in (tmp_path / "some" / "answers.jsonl").read_text().splitlines()]
    prompts = [f"[CLS] {one} [SEP]\nw39 " for one, _ in samples]
    texts = [("w5", "w5"), ("w6", "w6"), ("", "w7")]
    assert (
        written
        == [
            {"prompt": prompt, "generated": one, "reference": other}
            for prompt, (one, other) in zip(prompts, texts, strict=True)
        ]
        * 2
    )
    assert answers == [tiny.tokenizer().convert_tokens_to_ids([one, "[SEP]"]) if one else [] for one, _ in texts] * 2
    best = min(range(3), key=lambda at: (-found[at], at))
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {f"checkpoint-{20 * (best + 1)}"}


def test_metrics_of_texts():
    """ROUGE, BLEU and chrF of packages, where they are installed; a text that equals its reference but for blanks."""
    generated, references = ["w1 w2 w3 w4", "w5 \n"], ["w1 w2 w3 w4 w6 w7", "w5"]
    assert TEXT_METRICS["exact_match"].compute(generated, references) == {"generated_exact_match": 0.5}
    pytest.importorskip("rouge_score")
    scores = TEXT_METRICS["rouge"].compute(generated, references)
    assert scores == pytest.approx({"rouge1": (0.8 + 1) / 2, "rouge2": 0.75 / 2, "rougeL": (0.8 + 1) / 2})
    pytest.importorskip("sacrebleu")
    assert TEXT_METRICS["bleu"].compute(references, references) == pytest.approx({"bleu": 100.0})
    assert 0 < TEXT_METRICS["chrf"].compute(generated, references)["chrf"] < 100


@pytest.mark.parametrize(
    ("task", "argv", "sentence"),
    [
        ("chat", "--max_new_tokens 4", "--max_new_tokens is for --predict_with_generate; give it, too"),
        (
            "causal-lm",
            "--predict_with_generate",
            "needs prompts, and --task causal-lm has none; give --task chat with",
        ),
        ("chat", "--predict_with_generate --do_train", "--predict_with_generate is for evaluations"),
        ("chat", "--predict_with_generate --num_beams 4", "--num_beams 4 searches, and evaluations take"),
        ("chat", "--predict_with_generate --max_new_tokens 4 --generation_max_length 9", "leave one out"),
        ("chat", "--predict_with_generate --max_new_tokens 128", "is more than the 127 for which rows have room"),
        ("text-to-text", "--predict_with_generate --max_new_tokens 129", "or a larger --max_target_length"),
        ("chat", "--predict_with_generate --generation_metrics absent", "absent needs the package nowhere"),
    ],
)
def test_refused_flags(monkeypatch, task, argv, sentence):
    monkeypatch.setitem(TEXT_METRICS, "absent", TextMetric((), lambda one, other: {}, "nowhere"))
    least = ["--model_name_or_path", "m", "--task", task, "--train_file", "t.jsonl", "--output_dir", "o"]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_args([*least, "--validation_file", "v.jsonl", *argv.split()])
