"""Microbatches of several lengths: what they train is what rows padded to one length train."""

import pytest
import torch

from tests.finetuning import cases, tiny
from tests.finetuning.test_runs import CLASSES, run, same

PADDED = ["--pad_to_multiple_of", 3]
GROUPED = [*PADDED, "--group_by_length"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lengths")


def close(found: cases.Outcome, expected: cases.Outcome) -> None:
    """Losses, and weights after all steps, within 1e-6."""
    assert len(set(found.losses)) == len(found.losses) > 2
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    for name, weights in found.weights.items():
        torch.testing.assert_close(weights, expected.weights[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("task", "schedule", "ranks", "argv"),
    [
        ("text-to-text", "flush", (0, 1, 0, 1), ["--gradient_accumulation_steps", 2]),
        ("text-to-text", "ftpipe", (0, 1, 0, 1), []),
        ("chat", "2bw", (0, 1), ["--gradient_accumulation_steps", 2, "--dataloader_drop_last"]),
        ("chat", "l2l", None, ["--gradient_accumulation_steps", 2]),
        (CLASSES, "flush", (0,), ["--gradient_accumulation_steps", 2]),
        ("token-classification", "flush", (0, 1), ["--gradient_accumulation_steps", 2]),
    ],
)
def test_shorter_rows_train_what_full_ones_train(folder, task, schedule, ranks, argv):
    argv = [*argv, "--pipeline_schedule", schedule, "--num_train_epochs", 2, "--optim", "sgd", "--learning_rate", 0.1]
    argv += ["--validation_file", tiny.data_file(folder, task, num_samples=7, seed=3), "--do_train", "--do_eval"]
    name, outcomes = f"{task}-{schedule}", []
    for number, more in enumerate(([], PADDED)):
        cut = [] if ranks is None else ["--partition", cases.partition(folder, task, ranks, *more)]
        outcomes.append(
            run(folder, f"{name}-{number}", *argv, *more, *cut, task=task, ranks=2 if ranks is None else max(ranks) + 1)
        )
    full, shorter = outcomes
    close(shorter, full)
    assert shorter.evaluation().items() > {}.items()
    values = [{name: value for name, value in each.evaluation().items() if "time" not in name} for each in outcomes]
    assert values[1] == pytest.approx(values[0], rel=1e-6)
    if schedule == "flush":
        close(shorter, cases.plain(folder, task, argv=[*argv, *PADDED]))


def test_a_run_goes_on_in_the_same_order_of_lengths(folder):
    """Rows of similar lengths together, two replicas with microbatches of different shapes at a time: what one process
    trains. Resumed from its checkpoint, the run has the same numbers to the last bit; with other padding it is refused.
    """
    argv = ["--pipeline_schedule", "flush", "--num_train_epochs", 2, "--save_steps", 2, *GROUPED, "--optim", "sgd"]
    argv += ["--learning_rate", 0.1, "--data_cache", folder / "cache"]
    whole = cases.plain(folder, "text-to-text", argv=[*argv, "--gradient_accumulation_steps", 2])
    argv += ["--partition", cases.partition(folder, "text-to-text", (0, 1), *GROUPED), "--data_parallel_size", 2]
    found = run(folder, "whole", *argv, task="text-to-text", ranks=4)
    close(found, whole)
    argv += ["--resume_from_checkpoint", folder / "whole" / "checkpoint-2"]
    rest = run(folder, "rest", *argv, task="text-to-text", ranks=4)
    assert rest.losses == found.losses[2:] and len(rest.losses) > 1
    same(rest, found)
    argv[argv.index("--pad_to_multiple_of") + 1] = 4
    with pytest.raises(Exception, match="another --pad_to_multiple_of"):
        run(folder, "other", *argv, task="text-to-text", ranks=4)
