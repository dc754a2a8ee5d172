"""`finetune.py --pipeline_schedule l2l`: any captured model trains with its weights on the host as one process does."""

import pytest

from tests.finetuning import cases, tiny
from tests.finetuning.test_runs import run, same


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("relay")


CLASSES = "sequence-classification"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("task", "ranks", "argv"),
    [
        (CLASSES, 1, ["--gradient_accumulation_steps", 4, "--max_grad_norm", 0.1, "--weight_decay", 0.1]),
        ("text-to-text", 2, ["--gradient_accumulation_steps", 2, "--max_grad_norm", 0.1]),
        ("causal-lm", 1, ["--gradient_accumulation_steps", 2, "--max_grad_norm", 0, "--l2l_stash", "device"]),
        ("causal-lm", 2, ["--optim", "sgd", "--learning_rate", 0.1, "--gradient_accumulation_steps", 2]),
        ("image-classification", 1, ["--max_grad_norm", 0, "--l2l_resident_stages", 1]),
    ],
)
def test_a_relay_trains_what_one_process_trains(folder, task, ranks, argv):
    argv = [*argv, "--num_train_epochs", 2, "--pipeline_schedule", "l2l"]
    expected = cases.plain(folder, task, argv=argv)
    found = run(folder, f"{task}-{ranks}", *argv, task=task, ranks=ranks)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5) and len(found.losses) > 2
    same(found, expected, exactly=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ranks", "precision"), [(1, ["--bf16"]), pytest.param(2, ["--l2l_stash", "device"], marks=pytest.mark.full)]
)
def test_a_resumed_relay_is_the_run(folder, ranks, precision):
    """With dropout, masters and an evaluation on the way: the same bits at the end, which are those of `flush`."""
    validation = tiny.data_file(folder, num_samples=7, seed=3)
    argv = ["--num_train_epochs", 2, "--gradient_accumulation_steps", 2, "--dataloader_drop_last", "--do_train"]
    argv += ["--do_eval", "--validation_file", validation, "--eval_steps", 3, *precision[: precision == ["--bf16"]]]
    relay = [*argv, "--pipeline_schedule", "l2l", "--save_steps", 3, *precision]
    name = f"{ranks}{precision[0]}"
    whole = run(folder, f"whole-{name}", *relay, ranks=ranks, dropout=0.1)
    checkpoint = folder / f"whole-{name}" / "checkpoint-3"
    rest = run(folder, f"rest-{name}", *relay, "--resume_from_checkpoint", checkpoint, ranks=ranks, dropout=0.1)
    assert rest.losses == whole.losses[3:] and len(rest.losses) >= 3
    same(whole, rest)
    cut = cases.partition(folder, CLASSES, (0,), *argv[-1:] * ("--bf16" in argv), dropout=0.1)
    flush = run(
        folder, f"flush-{name}", *argv, "--pipeline_schedule", "flush", "--partition", cut, ranks=1, dropout=0.1
    )
    assert whole.losses == flush.losses
    assert [line["eval_loss"] for line in whole.lines if "eval_loss" in line] == [
        line["eval_loss"] for line in flush.lines if "eval_loss" in line
    ]
    same(whole, flush)
