"""Answers that evaluations generate: transformers' `generate` has the same, to the token."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.finetuning.arguments import parse_args
from megatron.finetuning.decoding import Decoder
from megatron.finetuning.samples import read_data
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


@pytest.mark.parametrize(
    ("task", "ranks", "settings", "argv"),
    [
        ("text-to-text", 2, {}, ["--pipeline_schedule", "flush"]),
        ("text-to-text", 1, PENALISED, ["--pipeline_schedule", "l2l"]),
        ("chat", 2, PENALISED, ["--pipeline_schedule", "flush", "--packing"]),
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
