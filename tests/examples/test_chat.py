"""The example of a chat model: the same conversations every time, and a script that trains and asks."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.finetuning import tiny

ROOT = Path(__file__).resolve().parents[2]


def test_the_answers_of_the_made_conversations(tmp_path):
    """500 conversations with right answers; the tokenizer's template marks each answer with its end, and no more."""
    import transformers

    command = [sys.executable, str(ROOT / "examples" / "chats.py")]
    for flags in (["--folder", tmp_path, "--layers", 1, "--hidden", 40], ["--chats", tmp_path / "again.jsonl"]):
        subprocess.run([*command, *map(str, flags)], check=True, capture_output=True, timeout=300)
    train, validation, again = ((tmp_path / f"{name}.jsonl").read_text() for name in ("train", "validation", "again"))
    assert train + validation == again and (len(train.splitlines()), len(validation.splitlines())) == (450, 50)
    messages = json.loads(train.splitlines()[0])["messages"]
    pairs = {each["content"]: other["content"] for line in train.splitlines() for chat in [json.loads(line)["messages"]]
             for each, other in zip(chat[::2], chat[1::2], strict=True)}  # fmt: skip
    assert pairs["What is the day before Monday?"] == "Sunday" and pairs["What is 4 plus 3?"] == "7"
    args = tiny.parse_args(
        ["--model_name_or_path", str(tmp_path / "model"), "--task", "chat", "--output_dir", "o",
         "--train_file", str(tmp_path / "train.jsonl"), "--max_seq_length", "256"]
    )  # fmt: skip
    from megatron.finetuning.samples import read_data

    data = read_data(args)
    labels = data.training.batch([0], 1)["labels"]
    found = data.processor.decode(labels[labels >= 0])
    assert found == "".join(f"{each['content']}<|im_end|>" for each in messages[1::2])
    assert isinstance(data.processor, transformers.PreTrainedTokenizerFast) and data.notes == ()


def test_a_width_that_no_model_has(capsys, monkeypatch):
    """It is refused before anything is made."""
    monkeypatch.setattr(sys, "argv", ["chats.py", "--folder", "unused", "--hidden", "64"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples" / "chats.py"), run_name="__main__")
    assert "--hidden 64 make no model of 5 heads of an even width; give" in capsys.readouterr().err


@pytest.mark.full
def test_conversations_with_answers_in_another_form(tmp_path):
    """--chats writes the same questions, and --answer says what stands around each answer."""
    command = [sys.executable, str(ROOT / "examples" / "chats.py"), "--chats", str(tmp_path / "own.jsonl")]
    subprocess.run([*command, "--answer", "It is {}."], check=True, capture_output=True, timeout=300)
    chats = [json.loads(line)["messages"] for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    answers = {chat[at]["content"]: chat[at + 1]["content"] for chat in chats for at in range(0, len(chat), 2)}
    assert len(chats) == 500 and answers["What is the day after Monday?"] == "It is Tuesday."


@pytest.mark.full
def test_the_script_trains_and_asks(tmp_path):
    """A model is trained and asked, and an adapter of it; the merged model has the logits of PEFT's."""
    environment = {"OUTPUT": str(tmp_path), "PYTHONPATH": str(ROOT), "LAYERS": "2", "HIDDEN": "40", "EPOCHS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "chat.sh")], timeout=500, stdin=subprocess.DEVNULL,
        env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--packing: 450 sequences in " in done.stdout and "== What is the day after Monday?" in done.stdout
    losses = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1]["eval_loss"] < losses[0]["loss"]
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.arange(40).reshape(2, 20)
    plain = model(tokens).logits
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter")(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter" / "merged")(tokens).logits
    assert (merged - adapted).abs().max() < 1e-5 < 1e-2 < (adapted - plain).abs().max()
