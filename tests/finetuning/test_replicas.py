"""Replicas of a fine-tuned pipeline: what they train, evaluate and write is what one pipeline does with all rows."""

from pathlib import Path

import pytest
import torch

from megatron.pipeline.simulate.timeline import Timeline
from tests.finetuning import cases, tiny
from tests.finetuning.test_runs import CLASSES, run, same


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("replicas")


def close(found: cases.Outcome, expected: cases.Outcome) -> None:
    """Losses, and weights after all steps, within 1e-6."""
    assert len(set(found.losses)) == len(found.losses) > 2
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    norms = [[line["grad_norm"] for line in each.lines if "grad_norm" in line] for each in (found, expected)]
    assert not norms[1] or norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert found.weights.keys() == expected.weights.keys()
    for name, weights in found.weights.items():
        torch.testing.assert_close(weights, expected.weights[name], rtol=0, atol=1e-6, msg=name)


def files(folder: Path) -> list[str]:
    return sorted(path.name.split("-of-")[0] for path in folder.iterdir())


@pytest.mark.parametrize("task", ["causal-lm", pytest.param("text-to-text", marks=pytest.mark.full)])
def test_two_replicas_train_what_one_process_trains(folder, task):
    """Two pipelines of two ranks with two stages each: 20 rows in batches of 12, so that the second batch has three
    microbatches for the four of both replicas, the last of them short. A shared embedding, clipping, an evaluation of
    7 rows in three microbatches; then the run goes on from its checkpoint as one pipeline, and as one process.
    """
    validation = tiny.data_file(folder, task, num_samples=7, seed=3)
    argv = ["--pipeline_schedule", "flush", "--max_grad_norm", 0.5, "--weight_decay", 0.1, "--optim", "sgd"]
    argv += ["--learning_rate", 0.1, "--num_train_epochs", 2, "--validation_file", validation, "--do_train"]
    argv += ["--do_eval", "--save_steps", 2, *["--no_group_texts"] * (task == "causal-lm")]
    cut = ["--partition", cases.partition(folder, task, (0, 1, 0, 1), *argv[-1:] * (task == "causal-lm"))]
    halves = ["--gradient_accumulation_steps", 2, "--data_parallel_size", 2]
    halves += ["--pipeline_timeline", folder / f"drawn-{task}"]
    found = run(folder, f"halves-{task}", *argv, *cut, *halves, task=task, ranks=4)
    assert Timeline.load(folder / f"drawn-{task}" / "measured.json").rank_of_stage == (0, 1, 0, 1)
    expected = cases.plain(folder, task, argv=[*argv, "--gradient_accumulation_steps", 4])
    close(found, expected)
    rest = ["--gradient_accumulation_steps", 4, "--resume_from_checkpoint", folder / f"halves-{task}" / "checkpoint-2"]
    one = run(folder, f"rest-{task}", *argv, *cut, *rest, task=task)
    assert one.losses == pytest.approx(found.losses[2:], rel=1e-6)
    for name, weights in one.weights.items():
        torch.testing.assert_close(weights, found.weights[name], rtol=0, atol=1e-6, msg=name)
    evaluated = [outcome.evaluation() for outcome in (found, one)]
    values = [{name: each[name] for name in each if name.startswith("eval_") and "time" not in name}
              for each in evaluated]  # fmt: skip
    assert values[0] == pytest.approx(values[1], rel=1e-6) and len(values[0]) > 1
    assert files(folder / f"halves-{task}" / "checkpoint-2") == files(folder / f"rest-{task}" / "checkpoint-4")


@pytest.mark.parametrize(
    ("schedule", "ranks", "argv"),
    [
        ("ftpipe", (0, 1, 0, 1), ["--gap_aware", "--gradient_accumulation_steps", 2]),
        ("ftpipe", (0, 1, 0, 1), ["--weight_prediction"]),
        ("ftpipe", (0, 1, 0, 1), []),
        ("2bw", (0, 1), ["--gradient_accumulation_steps", 2]),
        ("pipedream", (0, 1), []),
    ],
)
@pytest.mark.full
def test_a_microbatch_may_be_divided_among_replicas(folder, schedule, ranks, argv):
    """However stale weights are: replicas with microbatches of 3 rows train what one pipeline trains with 6."""
    argv = [*argv, "--pipeline_schedule", schedule, "--num_train_epochs", 2, "--learning_rate", 1e-3]
    argv += ["--adam_epsilon", 1e-4]
    name = "".join([schedule, *map(str, argv)])
    wide = ["--per_device_train_batch_size", 6]
    whole = run(folder, f"wide-{name}", *argv, *wide, "--partition", cases.partition(folder, CLASSES, ranks, *wide))
    argv += ["--partition", cases.partition(folder, CLASSES, ranks), "--data_parallel_size", 2]
    close(run(folder, f"divided-{name}", *argv, ranks=4), whole)


@pytest.mark.full
def test_dropout_is_that_of_the_microbatch(folder):
    """One pipeline and two have the same dropout, batch for batch, also where one goes on from the other's."""
    argv = ["--pipeline_schedule", "flush", "--num_train_epochs", 2, "--save_steps", 2, "--partition"]
    argv += [cases.partition(folder, CLASSES, (0, 1), dropout=0.1), "--adam_epsilon", 1e-4]
    settings = {1: (["--gradient_accumulation_steps", 4], 2)}
    settings[2] = (["--gradient_accumulation_steps", 2, "--data_parallel_size", 2], 4)
    whole = {
        number: run(folder, f"dropout-{number}", *argv, *own, dropout=0.1, ranks=ranks)
        for number, (own, ranks) in settings.items()
    }
    close(whole[2], whole[1])
    for number, (own, ranks) in settings.items():
        start = ["--resume_from_checkpoint", folder / f"dropout-{3 - number}" / "checkpoint-2"]
        rest = run(folder, f"rest-{number}", *argv, *own, *start, dropout=0.1, ranks=ranks)
        rest.lines = whole[1].lines[:2] + rest.lines
        close(rest, whole[1])


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "argv"),
    [
        ("masked-lm", []), ("regression", []), ("ctc", []), ("speech-to-text", []), ("audio-classification", []),
        ("multiple-choice", ["--adam_epsilon", 1e-5]),
        ("contrastive-image-text", ["--adam_epsilon", 1e-5, "--dataloader_drop_last"]),
    ],
)  # fmt: skip
def test_replicas_of_every_task(folder, task, argv):
    """Two replicas of one stage train what plain transformers trains with twice the microbatches."""
    argv = [*argv, "--num_train_epochs", 2, "--pipeline_schedule", "flush"]
    expected = cases.plain(folder, task, argv=[*argv, "--gradient_accumulation_steps", 4])
    argv += ["--gradient_accumulation_steps", 2, "--data_parallel_size", 2]
    found = run(folder, task, *argv, "--partition", cases.partition(folder, task, (0,)), task=task)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5) and len(found.losses) > 1
    same(found, expected, exactly=False)
