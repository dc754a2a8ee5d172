"""Every task on its tiny model: rows of one shape, rows that count nothing, and what an evaluation says."""

import json
import math
import shutil

import numpy
import pytest
import torch
import transformers
from tokenizers import processors

from megatron.finetuning.best import METRICS
from megatron.finetuning.plan import captured_model
from megatron.finetuning.pretrained import capture_model, read_config
from megatron.finetuning.samples import TASKS, read_data
from tests.finetuning import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


def opened(folder, task, *words):
    args = tiny.arguments(folder, task, *words)
    data = read_data(args)
    torch.manual_seed(0)
    config = read_config(args.model_name_or_path, data.changes)
    model = getattr(transformers, data.task.auto_model).from_config(config)
    return data, model


def loss_of(data, model, batch) -> torch.Tensor:
    return model(**batch).loss if data.forward is None else data.forward(model, batch)["loss"]


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if not task.couples_rows])
def test_rows_that_fill_up_count_nothing(folder, task):
    data, model = opened(folder, task)
    rows = data.training
    real, filled = rows.batch([1, 4], 2), rows.batch([1, 4], 5)
    assert {name: each.shape[1:] for name, each in filled.items()} == {name: e.shape[1:] for name, e in real.items()}
    found = []
    for batch in (real, filled):
        model.zero_grad()
        loss = loss_of(data, model, batch)
        loss.backward()
        found.append((loss.item(), [each.grad.clone() for each in model.parameters() if each.grad is not None]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert any(each.abs().max() > 0 for each in found[0][1])


@pytest.mark.parametrize("task", TASKS)
def test_names_of_metrics(folder, task):
    """Those among which --metric_for_best_model chooses before any evaluation."""
    data, model = opened(folder, task)
    batch = data.training.batch(range(len(data.training)), len(data.training))
    with torch.no_grad():
        output = model(**batch) if data.forward is None else data.forward(model, batch)
    found = {name: data.task.summary(name, output[name], batch) for name in data.task.keep}
    assert tuple(data.training.metrics(found, 1.0)) == METRICS[task]


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if not task.couples_rows])
def test_loss_of_an_epoch_is_the_mean_over_its_terms(folder, task):
    """Microbatches of other sizes than each other, weighed by their terms, have the loss of all samples at once."""
    data, model = opened(folder, task)
    rows, model = data.training, model.eval()
    parts = [range(0, 3), range(3, len(rows))]
    with torch.no_grad():
        losses = [loss_of(data, model, rows.batch(part, len(part))).item() for part in parts]
        together = loss_of(data, model, rows.batch(range(len(rows)), len(rows))).item()
    terms = [rows.num_terms(part) for part in parts]
    assert math.fsum(map(math.prod, zip(losses, terms, strict=True))) / sum(terms) == pytest.approx(together, rel=1e-5)


@pytest.mark.parametrize("task", ["sequence-classification", "multiple-choice", "image-classification", "text-to-text"])
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
    assert len(grouped) * 12 <= int(batch["attention_mask"].sum()) < (len(grouped) + 1) * 12


@pytest.mark.parametrize("adds_end", [True, False])
def test_grouped_texts_have_one_end_each(folder, adds_end):
    """Whether the tokenizer adds it, or leaves it to us."""
    path, model = folder / "ends.jsonl", folder / f"ends-{adds_end}"
    path.write_text('{"text": "w1 w2"}\n{"text": "w3"}\n')
    shutil.copytree(tiny.model_folder(folder, "causal-lm"), model, dirs_exist_ok=True)
    tokenizer = tiny.tokenizer()
    if not adds_end:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A", pair="[CLS] $A $B:1", special_tokens=[("[CLS]", 2)]
        )
    tokenizer.save_pretrained(model)
    args = tiny.arguments(folder, "causal-lm", "--model_name_or_path", model, "--max_seq_length", 7)
    rows = read_data(tiny.namespace(args, train_file=str(path))).training
    assert rows.batch([0], 1)["input_ids"].tolist() == [[2, 5, 6, 3, 2, 7, 3]]


def test_words_and_entities(folder):
    """The first token of a word has its label; an entity counts if its kind and both ends are right."""
    path = folder / "words.jsonl"
    sample = {"words": ["w1", "w2 w3", "w4", "w5", "w6"], "tags": ["B-a", "I-a", "O", "I-b", "B-b"]}
    path.write_text(json.dumps({"words": ["w7"], "tags": ["O"]}) + "\n" + json.dumps(sample) + "\n")
    data, _ = opened(folder, "token-classification", "--train_file", path, "--max_seq_length", 7)
    names = data.changes["id2label"]
    labels = data.training.batch([1], 1)["labels"][0]
    assert [names.get(each, "") for each in labels.tolist()] == ["", "B-a", "I-a", "", "O", "I-b", ""]
    assert data.notes == (f"{path}: 1 word cut off by --max_seq_length 7",)
    data, _ = opened(folder, "token-classification", "--train_file", path)
    guess = data.training.batch([0, 1], 2)["labels"].clone()
    number = {name: number for number, name in names.items()}
    guess[1, 5] = number["B-b"]  # the same entities, by another tag
    same = data.training.metrics({"logits": guess}, 0.0)
    assert same == {"accuracy": 5 / 6, "precision": 1.0, "recall": 1.0, "f1": 1.0}
    guess[1, 6] = number["I-b"]  # two entities of b become one
    merged = data.training.metrics({"logits": guess}, 0.0)
    assert merged == {"accuracy": 4 / 6, "precision": 0.5, "recall": 1 / 3, "f1": pytest.approx(0.4)}
    path.write_text(json.dumps({**sample, "tags": ["O"]}) + "\n")
    with pytest.raises(ValueError, match=r"sample 1: 'tags' is \['O'\], and a list of 5 labels is wanted"):
        opened(folder, "token-classification", "--train_file", path)
    path.write_text(json.dumps({"tokens": [], "tags": []}) + "\n")
    with pytest.raises(ValueError, match=r"'tokens' is \[\], and a list of words is wanted; mend it, or leave the"):
        opened(folder, "token-classification", "--train_file", path)


def test_labels_are_the_training_files(folder):
    args = tiny.arguments(folder)
    data = read_data(args)
    assert data.changes["id2label"] == {0: "even", 1: "odd"}
    bad = folder / "bad.jsonl"
    bad.write_text('{"text": "w1", "label": "odd"}\n{"text": "w2", "label": "neither"}\n')
    with pytest.raises(
        ValueError, match=r"bad.jsonl, sample 2: the label 'neither' is not one of the model's, which are .*: even, odd"
    ):
        read_data(tiny.namespace(args, validation_file=str(bad), do_eval=True))
    bad.write_text('{"text": "w1", "label": 0.5}\n{"text": "w2", "label": 0.25}\n')
    with pytest.raises(ValueError, match=r"'label' is 0\.5, and a class is a text or a whole number"):
        read_data(tiny.namespace(args, train_file=str(bad)))
    bad.write_text('{"text": "w1", "label": "odd"}\n{"text": "w2", "label": ""}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl, sample 2: 'label' is empty; name its class, or leave"):
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


def test_two_texts_have_types_where_the_tokenizer_has_them(folder):
    """As BERT's: the second text is of type 1, and the model uses that."""
    model = folder / "typed"
    shutil.copytree(tiny.model_folder(folder), model)
    typed = tiny.tokenizer()
    typed.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    typed.save_pretrained(model)
    path = folder / "typed.jsonl"
    path.write_text('{"sentence1": "w1 w2", "sentence2": "w3", "label": "a"}\n'
                    '{"sentence1": "w4", "sentence2": "w5 w6", "label": "b"}\n')  # fmt: skip
    data, bert = opened(folder, "sequence-classification", "--model_name_or_path", model, "--train_file", path)
    batch = data.training.batch([0, 1], 2)
    assert batch["token_type_ids"][:, :8].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0]]
    captured = capture_model(bert, batch, data.task.keep)
    typed, untyped = (captured.run(each) for each in (batch, {**batch, "token_type_ids": 0 * batch["token_type_ids"]}))
    assert typed[0].item() == pytest.approx(bert(**batch).loss.item(), rel=1e-6)
    assert typed[0].item() != pytest.approx(untyped[0].item(), rel=1e-6)


def test_the_second_text_is_every_samples(folder):
    path = folder / "halves.jsonl"
    path.write_text('{"sentence1": "w1", "label": 0}\n{"sentence1": "w2", "sentence2": "w3", "label": 1}\n')
    with pytest.raises(
        ValueError, match=r"sample 1: no field 'sentence2' for the text pair; it has 'sentence1', 'label'"
    ):
        read_data(tiny.namespace(tiny.arguments(folder), train_file=str(path)))


def test_a_missing_target_is_said_as_the_target(folder):
    args = tiny.arguments(folder, "text-to-text")
    path = folder / "no_target.jsonl"
    path.write_text('{"source": "w1"}\n')
    with pytest.raises(ValueError, match=r"no_target.jsonl has no column 'target' for the target; it has 'source'"):
        read_data(tiny.namespace(args, validation_file=str(path), do_eval=True))


def pictures(folder):
    """A file of samples that name three PNGs of 8 x 8, and their pixels [image, row, column, channel]."""
    image = pytest.importorskip("PIL.Image")
    pixels = numpy.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=numpy.uint8)
    for number, each in enumerate(pixels):
        image.fromarray(each).save(folder / f"{number}.png")
    path = folder / "pictures.jsonl"
    lines = [json.dumps({"image_path": f"{number}.png", "label": number}) for number in range(3)]
    path.write_text("\n".join(lines) + "\n")
    return path, pixels


def test_images_from_paths(folder):
    path, pixels = pictures(folder)
    args = tiny.arguments(folder, "image-classification", "--train_file", path)
    found = read_data(args).training.batch([2, 0], 2)
    assert torch.equal(found["pixel_values"], torch.tensor(pixels[[2, 0]]).permute(0, 3, 1, 2).float())
    assert found["labels"].tolist() == [2, 0]
    path.write_text(path.read_text().replace("1.png", "broken.png"))
    (folder / "broken.png").write_bytes(b"no picture")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"sample 2: the image .*broken\.png cannot be read; mend it"):
            read_data(args)
        (folder / "broken.png").unlink(missing_ok=True)


def test_images_of_the_package_datasets(folder):
    """Parquet has the bytes of each picture, a saved folder makes Pillow's images: gray ones and those with a
    transparent part become the three colours that a file of that kind becomes.
    """
    image, datasets = pytest.importorskip("PIL.Image"), pytest.importorskip("datasets")
    pixels = numpy.random.default_rng(1).integers(0, 256, (3, 8, 8, 3), dtype=numpy.uint8)
    made = [image.fromarray(each).convert(mode) for each, mode in zip(pixels, ("RGB", "L", "RGBA"), strict=True)]
    expected = torch.tensor(numpy.stack([each.convert("RGB") for each in made])).permute(0, 3, 1, 2).float()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    stored = datasets.Dataset.from_dict({"image": made, "label": [0, 1, 2]}, features=features)
    stored.save_to_disk(str(folder / "stored"))
    stored.to_parquet(str(folder / "stored.parquet"))
    for name in ("stored", "stored.parquet"):
        args = tiny.arguments(folder, "image-classification", "--train_file", folder / name)
        found = read_data(args).training.batch([0, 1, 2], 3)
        assert torch.equal(found["pixel_values"], expected), name


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Deberta", "DebertaV2"])
def test_a_classifier_that_finds_its_loss_by_the_labels(folder, kind):
    """DeBERTa decides by the labels which loss it takes unless its configuration says it; a column of classes does."""
    model = folder / kind
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=44, **tiny._SHAPE, relative_attention=True, pos_att_type=["c2p", "p2c"], type_vocab_size=0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    getattr(transformers, f"{kind}ForSequenceClassification")(config).save_pretrained(model)
    tiny.save_processor(model, "sequence-classification")
    args = tiny.arguments(folder, "sequence-classification", "--model_name_or_path", model)
    data = read_data(args)
    captured, *_ = captured_model(args, data)
    assert data.changes["problem_type"] == "single_label_classification" and captured.model_name.startswith(kind)


def test_images_by_the_models_processor(folder):
    """What preprocessor_config.json says is done, and the folder that a run writes has it."""
    path, pixels = pictures(folder)
    model = folder / "processed"
    shutil.copytree(tiny.model_folder(folder, "image-classification"), model)
    transformers.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(model)
    words = ["--train_file", path, "--model_name_or_path", model]
    data = read_data(tiny.arguments(folder, "image-classification", *words))
    found = data.training.batch([0, 1], 2)["pixel_values"]
    expected = (torch.tensor(pixels[:2]).permute(0, 3, 1, 2).double() / 255 - 0.5) / 0.5
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
    (folder / "written").mkdir()
    data.processor.save_pretrained(folder / "written")
    assert (folder / "written" / "preprocessor_config.json").is_file()
