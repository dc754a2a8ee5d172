"""`finetune.py --pipeline_schedule l2l`: any captured model trains with its weights on the host as one process does."""

import pytest

from tests.finetuning import cases
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
