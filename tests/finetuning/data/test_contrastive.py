"""Pairs of images and texts: a run and its evaluation, the model's inputs, and what is refused."""

import json

import pytest
import torch
import transformers

from megatron.finetuning.samples import read_data, require_whole_microbatches
from tests.finetuning import cases, tiny
from tests.finetuning.test_runs import run

TASK = "contrastive-image-text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pairs")


@pytest.mark.full
def test_an_evaluation_has_the_microbatches_of_transformers(folder):
    """The written model on the same microbatches: the mean of its losses, and the partners that score best."""
    file = tiny.data_file(folder, TASK, num_samples=9)
    argv = ["--validation_file", file, "--do_train", "--do_eval", "--dataloader_drop_last", "--num_train_epochs", 1]
    argv += ["--pipeline_schedule", "flush", "--learning_rate", 0.01]
    expected = cases.plain(folder, TASK, argv=argv)
    found = run(folder, "pairs", *argv, "--partition", cases.partition(folder, TASK, (0,)), task=TASK, ranks=1)
    assert len(found.losses) == 6 and found.losses == pytest.approx(expected.losses, rel=1e-5)
    rows = read_data(tiny.arguments(folder, TASK, *argv)).validation
    model = transformers.CLIPModel.from_pretrained(folder / "pairs").eval()
    with torch.no_grad():
        outputs = [model(**rows.batch(range(at, at + 3), 3), return_loss=True) for at in (0, 3, 6)]
    line = found.evaluation()
    assert line["eval_loss"] == pytest.approx(sum(each.loss.item() for each in outputs) / 3, rel=1e-5)
    right = [(each.logits_per_image.argmax(1) == torch.arange(3)).sum().item() for each in outputs]
    assert line["eval_image_to_text_accuracy"] == pytest.approx(sum(right) / 9)
    right = [(each.logits_per_image.argmax(0) == torch.arange(3)).sum().item() for each in outputs]
    assert line["eval_text_to_image_accuracy"] == pytest.approx(sum(right) / 9)


def test_inputs_are_the_processors(folder):
    data = read_data(tiny.arguments(folder, TASK))
    samples = [json.loads(line) for line in tiny.data_file(folder, TASK).read_text().splitlines()[:2]]
    images = [torch.tensor(each["image"], dtype=torch.uint8).numpy() for each in samples]
    expected = data.processor(
        text=[each["text"] for each in samples], images=images, padding="max_length", max_length=12, return_tensors="pt"
    )
    batch = data.training.batch([0, 1], 2)
    assert batch.keys() == expected.keys()
    for name in batch:
        torch.testing.assert_close(batch[name], expected[name])


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["--do_train"],
            r"of 20 samples would .*_batch_size 3; give --dataloader_drop_last",
        ),
        (["--do_eval", "--max_eval_samples", 7], r"last of 7 samples would change.*; give another --max_eval_samples"),
        (["--do_train", "--per_device_train_batch_size", 1], r"and --per_device_train_batch_size is 1; give more"),
    ],
)
def test_rows_that_fill_up_are_refused(folder, argv, sentence):
    args = tiny.arguments(folder, TASK, "--validation_file", tiny.data_file(folder, TASK), *argv)
    with pytest.raises(ValueError, match=sentence):
        require_whole_microbatches(args, read_data(args))


def test_columns_and_processors_that_are_missing(tmp_path):
    file = tmp_path / "pairs.jsonl"
    for sample, sentence in (
        ({"text": "w1"}, r"has no column for the image \(looked for image, "),
        ({"image": [[0.5]]}, r"has no column for the text \(looked for text, caption, "),
        ({"text": "w1", "image": "none.png"}, r"sample 1: the image .*none\.png cannot be read"),
    ):
        file.write_text(json.dumps(sample) + "\n")
        with pytest.raises(ValueError, match=sentence):
            read_data(tiny.arguments(tmp_path, TASK, "--train_file", file))
    for path in tiny.model_folder(tmp_path, TASK).glob("*processor*"):
        path.unlink()
    with pytest.raises(ValueError, match="has no processor with its image processor and tokenizer; save it there"):
        read_data(tiny.arguments(tmp_path, TASK))
