"""Every task on its tiny model: rows of one shape, rows that count nothing, and what an evaluation says."""

import math

import pytest
import torch

from megatron.finetuning.model import open_model
from megatron.finetuning.samples import read_data
from megatron.finetuning.tasks import TASKS
from tests.finetuning import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


def opened(folder, task, *words):
    args = tiny.arguments(folder, task, *words)
    data = read_data(args)
    torch.manual_seed(0)
    model = open_model(args.model_name_or_path, data.task.auto_model, real=True, changes=data.changes)
    return data, model


@pytest.mark.parametrize("task", TASKS)
def test_rows_that_fill_up_count_nothing(folder, task):
    data, model = opened(folder, task)
    rows = data.training
    real, filled = rows.batch([1, 4], 2), rows.batch([1, 4], 5)
    assert {name: each.shape[1:] for name, each in filled.items()} == {name: e.shape[1:] for name, e in real.items()}
    found = []
    for batch in (real, filled):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found.append((loss.item(), [each.grad.clone() for each in model.parameters() if each.grad is not None]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert any(each.abs().max() > 0 for each in found[0][1])


@pytest.mark.parametrize("task", TASKS)
def test_loss_of_an_epoch_is_the_mean_over_its_terms(folder, task):
    """Microbatches of other sizes than each other, weighed by their terms, have the loss of all samples at once."""
    data, model = opened(folder, task)
    rows, model = data.training, model.eval()
    parts = [range(0, 3), range(3, len(rows))]
    with torch.no_grad():
        losses = [model(**rows.batch(part, len(part))).loss.item() for part in parts]
        together = model(**rows.batch(range(len(rows)), len(rows))).loss.item()
    terms = [rows.num_terms(part) for part in parts]
    assert math.fsum(map(math.prod, zip(losses, terms, strict=True))) / sum(terms) == pytest.approx(together, rel=1e-5)


@pytest.mark.parametrize("task", ["sequence-classification", "image-classification", "text-to-text"])
def test_accuracy(folder, task):
    rows = opened(folder, task)[0].training
    labels = rows.batch(range(len(rows)), len(rows))["labels"]
    right = rows.metrics({"logits": labels.clone()}, 0.0)
    assert set(right.values()) == {1.0}
    wrong = labels.clone()
    wrong[0] += 1
    found = rows.metrics({"logits": wrong}, 0.0)
    first = 1 - 1 / len(rows)
    assert found["accuracy" if "accuracy" in found else "exact_match"] == pytest.approx(first)


def test_perplexity(folder):
    rows = opened(folder, "causal-lm")[0].training
    assert rows.metrics({}, math.log(7.0)) == {"perplexity": pytest.approx(7.0)}


def test_texts_in_rows_of_their_own(folder):
    data, _ = opened(folder, "causal-lm", "--no_group_texts")
    assert len(data.training) == 20
    batch = data.training.batch(range(20), 20)
    assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
    grouped = opened(folder, "causal-lm")[0].training
    assert len(grouped) * 12 <= sum(int(row) + 1 for row in batch["attention_mask"].sum(1)) < (len(grouped) + 1) * 12


def test_labels_are_the_training_files(folder):
    args = tiny.arguments(folder)
    data = read_data(args)
    assert data.changes["id2label"] == {0: "even", 1: "odd"}
    bad = folder / "bad.jsonl"
    bad.write_text('{"text": "w1", "label": "odd"}\n{"text": "w2", "label": "neither"}\n')
    with pytest.raises(
        ValueError,
        match=r"bad.jsonl, sample 2: the label 'neither' is not one of the model's, which are .*: even, odd",
    ):
        read_data(tiny.namespace(args, validation_file=str(bad), do_eval=True))
    bad.write_text('{"text": "w1", "label": 0.5}\n{"text": "w2", "label": 0.25}\n')
    with pytest.raises(ValueError, match=r"'label' is 0\.5, and a class is a text or a whole number"):
        read_data(tiny.namespace(args, train_file=str(bad)))


def test_classes_that_are_no_numbers(folder):
    """What only looks like numbers is sorted as text."""
    path = folder / "odd.jsonl"
    path.write_text('{"text": "w1", "label": "--5"}\n{"text": "w2", "label": "\u00b2"}\n')
    assert read_data(tiny.namespace(tiny.arguments(folder), train_file=str(path))).changes["id2label"][0] == "--5"


def test_two_texts(folder):
    path = folder / "pairs.jsonl"
    path.write_text('{"premise": "w1 w2", "hypothesis": "w3", "label": 10}\n' * 2 + '{"premise": "w4", '
                    '"hypothesis": "w5 w6 w7", "label": 9}\n')  # fmt: skip
    rows = read_data(tiny.namespace(tiny.arguments(folder), train_file=str(path))).training
    batch = rows.batch([0, 2], 2)
    assert batch["input_ids"][:, :7].tolist() == [[2, 5, 6, 3, 7, 3, 0], [2, 8, 3, 9, 10, 11, 3]]
    assert batch["labels"].tolist() == [1, 0], "9 comes before 10"
