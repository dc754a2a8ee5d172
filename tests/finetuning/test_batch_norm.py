"""Statistics of batch norm in whole runs: they are saved and go on, are those that evaluations use, and fill no row."""

from pathlib import Path

import pytest
import torch
import transformers

from tests import workers
from tests.finetuning import cases, tiny
from tests.finetuning.test_runs import run, same

TASK = "image-classification"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("statistics")


def resnet(folder: Path) -> Path:
    path = folder / "resnet"
    if not path.exists():
        torch.manual_seed(0)
        config = transformers.ResNetConfig(
            num_channels=1, embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
        )
        transformers.ResNetForImageClassification(config).save_pretrained(path)
    return path


def command(folder: Path, schedule: str) -> list[object]:
    argv = ["--model_name_or_path", resnet(folder), "--pipeline_schedule", schedule, "--num_train_epochs", 2]
    argv += ["--dataloader_drop_last", "--do_train", "--do_eval", "--learning_rate", 1e-2]
    argv += ["--validation_file", tiny.data_file(folder, TASK, num_samples=7, seed=3)]
    return argv if schedule == "l2l" else [*argv, "--partition", cases.partition(folder, TASK, (0,), *argv)]


@pytest.mark.parametrize("schedule", ["l2l", pytest.param("flush", marks=pytest.mark.full)])
def test_they_are_saved_and_go_on(folder, schedule):
    """A resumed run has the bits of the whole one, statistics too; the written model evaluates as the run says."""
    argv = command(folder, schedule)
    whole = run(folder, f"whole-{schedule}", *argv, "--save_steps", 3, task=TASK, ranks=1)
    checkpoint = folder / f"whole-{schedule}" / "checkpoint-3"
    rest = run(folder, f"rest-{schedule}", *argv, "--resume_from_checkpoint", checkpoint, task=TASK, ranks=1)
    assert rest.losses == whole.losses[3:] and len(rest.losses) >= 3
    same(whole, rest)
    counted = [name for name in whole.weights if name.endswith("num_batches_tracked")]
    assert counted and all(whole.weights[name] == len(whole.losses) for name in counted)
    assert rest.evaluation()["eval_loss"] == whole.evaluation()["eval_loss"]


@pytest.mark.full
def test_replicas_evaluate_what_is_written(folder):
    """Each replica counts its own microbatches; evaluations use those of the first, which are written."""
    argv = command(folder, "flush")
    found = run(folder, "halves", *argv, "--data_parallel_size", 2, task=TASK, ranks=2)
    argv = [each for each in argv if each != "--do_train"]
    again = run(folder, "again", *argv, "--model_name_or_path", folder / "halves", task=TASK, ranks=1)
    assert again.evaluation()["eval_loss"] == pytest.approx(found.evaluation()["eval_loss"], rel=1e-6)


def test_rows_that_fill_up_are_refused(folder):
    """20 rows in microbatches of 3: the statistics would count a row thrice."""
    argv = [each for each in command(folder, "l2l") if each != "--dataloader_drop_last"]
    with pytest.raises(workers.WorkerError, match="statistics would count the rows that fill up"):
        run(folder, "filled", *argv, task=TASK, ranks=1)
