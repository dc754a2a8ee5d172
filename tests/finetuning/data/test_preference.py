"""Pairs of answers: which tokens count, forms of files, the loss by hand; what is cut, left out and refused."""

import json
import math
import re
from itertools import pairwise

import pytest
import torch

from megatron.finetuning.arguments import parse_args
from megatron.finetuning.samples import read_data
from tests.finetuning import tiny
from tests.finetuning.data.test_chat import FORGETS, ids, turns

SAMPLE = {"prompt": "w1 w2", "chosen": "w3", "rejected": "w4 w5"}
LEAST = ["--model_name_or_path", "m", "--task", "dpo", "--train_file", "t.jsonl", "--output_dir", "o"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


def data_of(folder, samples, *words, template=None):
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in samples))
    if template is not None:
        (folder / "template.jinja").write_text(template)
        words += ("--chat_template", folder / "template.jinja")
    return read_data(tiny.arguments(folder, "dpo", "--train_file", path, *words))


@pytest.mark.parametrize(
    "sample",
    [
        SAMPLE,
        {"prompt": turns("w1 w2"), "chosen": turns("", "w3")[1:], "rejected": turns("", "w4 w5")[1:]},
        {"chosen": turns("w1 w2", "w3"), "rejected": turns("w1 w2", "w4 w5")},
    ],
    ids=["texts", "messages", "conversations"],
)
def test_the_answers_count(folder, sample):
    """Each with its end, behind the prompt for a generation, in rows of the whole text."""
    batch = data_of(folder, [sample]).training.batch([0], 1)
    for side, answer in (("chosen", "w3"), ("rejected", "w4 w5")):
        found = {name: batch[f"{side}_{name}"][0] for name in ("input_ids", "attention_mask", "labels")}
        text = ids(f"[CLS] w1 w2 [SEP] w39 {answer} [SEP]")
        assert found["input_ids"][found["attention_mask"] == 1].tolist() == text
        assert found["labels"][found["labels"] >= 0].tolist() == ids(f"{answer} [SEP]")
        assert found["labels"].tolist().index(ids("w3")[0] if side == "chosen" else ids("w4")[0]) == 5


def test_only_the_last_answer_counts(folder):
    """Answers in the prompt do not."""
    prompt = turns("w1", "w2", "w6")
    sample = {"prompt": prompt, "chosen": "w3", "rejected": "w4"}
    labels = data_of(folder, [sample]).training.batch([0], 1)["chosen_labels"]
    assert labels[labels >= 0].tolist() == ids("w3 [SEP]")


def test_loss_by_hand(folder):
    """Two pairs and a row that fills up: the mean over two, with beta and label smoothing; rewards by beta."""
    data = data_of(folder, [SAMPLE] * 2, "--dpo_beta", 0.5, "--dpo_label_smoothing", 0.25)
    rows = data.training
    rows.reference = torch.tensor([[-1.0, -2.0], [-3.0, -1.5]])
    model = torch.nn.Embedding(44, 44)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.weight)
    found = data.forward(lambda input_ids, attention_mask: type("Output", (), {"logits": model(input_ids)}),
                         rows.batch([0, 1], 3))  # fmt: skip
    scores = model.weight.log_softmax(-1)
    own = []
    for answer in ("w3", "w4 w5"):
        text = ids(f"w39 {answer} [SEP]")
        own.append(sum(scores[one, other].item() for one, other in pairwise(text)))
    assert found["log_probabilities"].tolist() == [pytest.approx(own), pytest.approx(own), [0.0, 0.0]]
    gains = [0.5 * ((own[0] - one) - (own[1] - other)) for one, other in rows.reference.tolist()]
    losses = [0.75 * math.log(1 + math.exp(-gain)) + 0.25 * math.log(1 + math.exp(gain)) for gain in gains]
    assert found["loss"].item() == pytest.approx(sum(losses) / 2, rel=1e-6)
    metrics = rows.metrics({"log_probabilities": found["log_probabilities"][:2]}, 0.0)
    assert metrics["rewards_margin"] == pytest.approx(sum(gains) / 2, rel=1e-5)
    assert metrics["rewards_accuracy"] == sum(gain > 0 for gain in gains) / 2


def test_pairs_that_are_too_long(folder):
    """One loses its end; one has no answer's token left, and is left out with both its answers."""
    samples = [SAMPLE, {**SAMPLE, "rejected": "w4 " * 9}, {**SAMPLE, "prompt": "w1 " * 12}]
    data = data_of(folder, samples)
    path = folder / "pairs.jsonl"
    assert len(data.training) == 2
    assert data.notes == (
        f"{path}: 2 pairs of 3 cut to --max_seq_length 12",
        f"{path}: 1 pair of 3 left out, without an answer in what is left",
    )


@pytest.mark.parametrize(
    ("sample", "words", "template", "sentence"),
    [
        ({"prompt": "w1", "chosen": "w2"}, (), None, "has no column for the rejected (looked for rejected); it has"),
        ({**SAMPLE, "chosen": 3}, (), None, "sample 1: 'chosen' is 3, and a text or a list of messages is wanted"),
        ({"chosen": turns("w1", "w2"), "rejected": turns("w3", "w4")}, (), None, "differ in their last message alone"),
        ({"chosen": "w1", "rejected": "w2"}, (), None, "'chosen' is 'w1', and a list of messages is wanted"),
        (SAMPLE, (), FORGETS, "writes the prompt in another way once its answer follows"),
        (SAMPLE, ("--max_seq_length", 5), None, "no pair has both answers within --max_seq_length 5"),
    ],
)
def test_what_is_no_pair_is_refused(folder, sample, words, template, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        data_of(folder, [sample], *words, template=template)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--task chat --dpo_beta 0.2", "--dpo_beta is for --task dpo, and --task is chat; leave it out"),
        ("--task chat --chosen_column=", "--chosen_column is for --task dpo, and --task is chat; leave it out"),
        ("--validation_file v.jsonl --do_eval", "--do_eval alone with --task dpo compares a model with itself"),
        ("--packing", "--packing puts several samples into a row for --task chat"),
        ("--train_on_prompt", "--train_on_prompt is for --task chat, image-text-to-text, and --task is dpo"),
        ("--validation_file v.jsonl --predict_with_generate", "needs prompts, and --task dpo has none; leave it out"),
        ("--dpo_beta 0", "0 is no number from 1e-06 on"),
        ("--dpo_label_smoothing 0.6", "0.6 is no number from 0 to 0.5"),
    ],
)
def test_refused_flags(argv, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_args([*LEAST, *argv.split()])
