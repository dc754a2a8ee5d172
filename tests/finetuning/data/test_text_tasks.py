"""Hidden tokens, choices and numbers: their rows, their metrics and their refusals."""

import json

import numpy
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import DataCollatorForLanguageModeling

from megatron.capture.randomness import mixed
from megatron.finetuning.data import regression
from megatron.finetuning.data.batches import IGNORED
from megatron.finetuning.samples import read_data
from tests.finetuning import tiny


def read(folder, task: str, *samples: dict, argv: tuple = ()):
    path = folder / f"{task}.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    return read_data(tiny.arguments(folder, task, "--train_file", path, *argv))


def hidden_texts(folder, *argv: object):
    texts = [{"text": " ".join(f"w{(n + place) % 40}" for place in range(10))} for n in range(200)]
    return read(folder, "masked-lm", *texts, argv=("--max_seq_length", 14, *argv)).training


def test_hidden_tokens(tmp_path):
    """Each epoch hides others, by the seed alone and however a batch is cut; hidden ones are counted, special ones and
    padding never hidden; of a great share 80% are the mask, 10% others and 10% as they were."""
    rows = hidden_texts(tmp_path, "--mlm_probability", 0.5)
    first, second = (rows.batch(range(start, start + 200), 200) for start in (0, 200))
    again = rows.batch([205, 207], 3)
    assert torch.equal(again["input_ids"][:2], second["input_ids"][[5, 7]])
    assert torch.equal(again["labels"][:2], second["labels"][[5, 7]]) and (again["labels"][2] == IGNORED).all()
    assert not torch.equal(first["labels"], second["labels"])
    assert rows.num_terms(range(200, 400)) == int((second["labels"] != IGNORED).sum())
    original = 4 + (torch.arange(200)[:, None] + torch.arange(10)) % 40
    counted = first["labels"][:, 1:11] != IGNORED
    assert 900 < counted.sum() < 1100 and torch.equal(first["labels"][:, 1:11][counted], original[counted])
    assert (first["labels"][:, [0, 11, 12, 13]] == IGNORED).all()
    shown = first["input_ids"][:, 1:11]
    assert torch.equal(shown[~counted], original[~counted])
    assert 0.75 < (shown[counted] == 1).double().mean() < 0.85
    assert 0.07 < (shown[counted] == original[counted]).double().mean() < 0.14


def test_tokens_are_hidden_as_transformers_hides_them(tmp_path):
    """By its collator as a user calls it, on the text of the row, with the generator of the row."""
    rows = hidden_texts(tmp_path, "--mlm_probability", 0.5)
    own = tiny.tokenizer()
    own.mask_token = "[UNK]"
    for number in (3, 203):
        collator = DataCollatorForLanguageModeling(own, seed=0, mlm_probability=0.5)
        collator.create_rng("pt")
        collator.generator.manual_seed(mixed(42, number))
        text = " ".join(f"w{(3 + place) % 40}" for place in range(10))
        encoded = own(text, max_length=14, padding="max_length", return_special_tokens_mask=True)
        expected, found = collator([encoded]), rows.batch([number], 1)
        assert {name for name, each in found.items() if torch.equal(each, expected[name])} == found.keys()


def test_a_rows_loss_is_over_a_token_at_least(tmp_path):
    rare = hidden_texts(tmp_path, "--mlm_probability", 0.001)
    assert {rare.num_terms([row]) for row in range(20)} == {1}


def test_whole_words_are_hidden(tmp_path):
    """Where words are several tokens, all of a word are the mask, or none; without the flag some are hidden in part."""
    folder = tiny.model_folder(tmp_path, "masked-lm")
    tokenizer = tiny.tokenizer()
    tokenizer.mask_token = "[UNK]"
    split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("w", "merged_with_next")]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.save_pretrained(folder)
    samples = [{"text": "w1w2w3 w4 w5w6"}] * 40
    for argv, is_whole in ((("--whole_word_mask",), True), ((), False)):
        rows = read(tmp_path, "masked-lm", *samples, argv=("--mlm_probability", 0.4, *argv)).training
        batch = rows.batch(range(40), 40)
        assert batch["attention_mask"][0].sum() == 8
        hidden = batch["labels"] != IGNORED
        words = [hidden[:, 1:4], hidden[:, 4:5], hidden[:, 5:7]]
        assert all(torch.equal(word.any(1), word.all(1)) for word in words) == is_whole
        assert not is_whole or (batch["input_ids"][hidden] == 1).all()
        assert any(word.any() for word in words) and not all(word.all() for word in words)


def test_choices(tmp_path):
    """SWAG's columns, ARC's, and a list: the same rows, and each choice stands behind its text."""
    swag = {"sent1": "w1", "sent2": "w2", "ending0": "w3", "ending1": "w4 w5", "label": 1}
    arc = {"question": "w1", "choices": {"text": ["w2 w3", "w2 w4 w5"], "label": ["A", "B"]}, "label": "B"}
    listed = {"context": "w1", "endings": ["w2 w3", "w2 w4 w5"], "label": "1"}
    batches = [read(tmp_path, "multiple-choice", each).training.batch([0], 1) for each in (swag, arc, listed)]
    assert batches[0]["input_ids"][0, :, :7].tolist() == [[2, 5, 3, 6, 7, 3, 0], [2, 5, 3, 6, 8, 9, 3]]
    assert all(torch.equal(batches[0][name], other[name]) for other in batches[1:] for name in batches[0])
    assert batches[0]["labels"].tolist() == [1]


@pytest.mark.parametrize("count", [1, 2])
def test_numbers(tmp_path, count):
    """The loss is transformers' own, of one number or several; rows that fill up a microbatch change nothing."""
    samples = [{"text": f"w{n}", "score": str(n**2 / 9) if count == 1 else [n**2 / 9, -n]} for n in range(5)]
    found = read(tmp_path, "regression", *samples)
    config = tiny.MODELS["regression"](0.0).config
    config.num_labels = count
    model = tiny.transformers.BertForSequenceClassification(config)
    batch = found.training.batch(range(5), 5)
    output = model(**batch)
    assert regression.forward(model, batch)["loss"].item() == pytest.approx(output.loss.item(), rel=1e-6)
    filled = regression.forward(model, found.training.batch(range(5), 8))
    assert filled["loss"].item() == pytest.approx(output.loss.item(), rel=1e-5)
    assert found.changes["num_labels"] == count and found.changes["problem_type"] == "regression"
    true = numpy.array([[n**2 / 9, -n][:count] for n in range(5)])
    logits = output.logits.detach()
    scores = found.training.metrics({"logits": logits}, 0.0)
    errors = logits.double().numpy() - true
    assert scores["mse"] == pytest.approx((errors**2).mean()) and scores["mae"] == pytest.approx(abs(errors).mean())
    pearson = [numpy.corrcoef(*pair)[0, 1] for pair in zip(logits.double().numpy().T, true.T, strict=True)]
    assert scores["pearson"] == pytest.approx(sum(pearson) / count)
    ranks = [numpy.corrcoef(*(each.argsort().argsort() for each in pair))[0, 1]
             for pair in zip(logits.numpy().T, true.T, strict=True)]  # fmt: skip
    assert scores["spearman"] == pytest.approx(sum(ranks) / count)
    assert found.training.metrics({"logits": torch.ones(5, count)}, 0.0).keys() == {"mse", "mae"}


def test_labels_of_numbers_keep_their_precision(tmp_path):
    rows = read(tmp_path, "regression", {"text": "w1", "score": 1.001}, argv=("--dtype", "bfloat16")).training
    assert rows.batch([0], 1)["labels"].item() == pytest.approx(1.001, rel=1e-6)


GOOD = {
    "masked-lm": {"text": "w1"},
    "multiple-choice": {"text": "w1", "choices": ["w2", "w3"], "label": 0},
    "regression": {"text": "w1", "score": [1.0, 2.0]},
}


@pytest.mark.parametrize(
    ("task", "changes", "sentence"),
    [
        ("masked-lm", {"text": ""}, r"sample 2: the text has no token that could be hidden; leave it out"),
        ("masked-lm", {"text": 1}, r"sample 2: 'text' is 1, and a text is wanted"),
        ("multiple-choice", {"choices": ["w2"]}, r"sample 2: its choices are \['w2'\], and a list of two or more"),
        ("multiple-choice", {"choices": ["w2"] * 3}, r"sample 2 has 3 choices, and the first sample .* has 2 in the"),
        ("multiple-choice", {"label": 2}, r"sample 2: 'label' is 2, and names none of 2 choices; give 0 to 1, or"),
        ("multiple-choice", {"label": "yes"}, r"sample 2: 'label' is 'yes', and names none of 2 choices"),
        ("regression", {"score": "high"}, r"sample 2: 'score' is 'high', and a number or a list of numbers is wanted"),
        ("regression", {"score": [1.0, "nan"]}, r"sample 2: 'score' is \[1.0, 'nan'\], and a number or a list"),
        ("regression", {"score": True}, r"sample 2: 'score' is True, and a number or a list"),
        ("regression", {"score": 1.0}, r"sample 2: 'score' is 1.0, and the first sample of training has 2 in its"),
    ],
)
def test_refused_in_one_sentence(tmp_path, task, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path, task, GOOD[task], {**GOOD[task], **changes})


@pytest.mark.parametrize(
    ("task", "sample", "sentence"),
    [
        ("multiple-choice", {"text": "w1", "label": 0}, r"has no choices: neither a list in choices, endings, options"),
        ("regression", {"text": "w1"}, r"has no column for the label \(looked for label, labels, score, "),
        ("masked-lm", {"words": "w1"}, r"has no column for the text \(looked for text, "),
    ],
)
def test_a_missing_column_is_refused(tmp_path, task, sample, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path, task, sample)


def test_a_tokenizer_without_a_mask_is_refused(tmp_path):
    tiny.tokenizer().save_pretrained(tiny.model_folder(tmp_path, "masked-lm"))
    with pytest.raises(ValueError, match=r"has no mask, which masked-lm puts in the place of tokens; set mask_token"):
        read(tmp_path, "masked-lm", GOOD["masked-lm"])


def test_flags_of_other_tasks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--mlm_probability is for --task masked-lm, and --task is regression; leave"):
        tiny.arguments(tmp_path, "regression", "--mlm_probability", 0.2)
