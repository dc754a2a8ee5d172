"""The best checkpoint, patience, and where values are shown."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
import transformers

from megatron.finetuning import checkpoint
from megatron.finetuning.best import Best
from megatron.finetuning.checkpoint import SavedProgress
from megatron.finetuning.report import Report
from megatron.pipeline.runtime.contract.stage import BatchReport
from tests.finetuning import cases, tiny
from tests.finetuning.test_runs import CLASSES, run, same


@pytest.mark.parametrize("greater", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_transformers_judges_the_same(greater, threshold):
    """Which evaluations are the best, and after which the run ends: as transformers' trainer and callback say."""
    choose = random.Random(7)
    ended = 0
    for _ in range(50):
        values = [choose.choice([0.1, 0.2, 0.3, 0.5, 0.8, float("nan")]) for _ in range(5)]
        ours = Best("f1", greater, patience=3, threshold=threshold)
        callback = transformers.EarlyStoppingCallback(3, threshold)
        args = SimpleNamespace(metric_for_best_model="f1", greater_is_better=greater, save_strategy="steps")
        state, control = transformers.TrainerState(), transformers.TrainerControl()
        trainer = SimpleNamespace(args=args, state=state)
        for value in values:
            callback.on_evaluate(args, state, control, {"eval_f1": value})
            is_best = transformers.Trainer._determine_best_metric(trainer, {"eval_f1": value}, trial=None)
            assert ours.judge({"loss": 0.0, "f1": value}) == is_best
            assert ours.ends == control.should_training_stop
            if ours.ends:
                break
        ended += ours.ends
    assert 0 < ended < 50
    with pytest.raises(ValueError, match=r"--metric_for_best_model f1 is none of .* \(loss\); give one of them"):
        Best("f1", greater).judge({"loss": 0.0})
    assert not ours.judge({"loss": 0.0}), "a later evaluation without the metric counts as one with a NaN"


@pytest.mark.parametrize(
    ("most", "best", "left"),
    [(2, "checkpoint-1", [1, 5]), (1, "checkpoint-2", [2, 5]), (1, "checkpoint-5", [5]), (3, "checkpoint-5", [3, 4, 5]),
     (3, "checkpoint-2", [2, 4, 5]), (2, None, [4, 5]), (None, "checkpoint-1", [1, 2, 3, 4, 5])],
)  # fmt: skip
def test_the_best_is_never_removed(tmp_path, most, best, left):
    for number in range(1, 6):
        (tmp_path / f"checkpoint-{number}").mkdir()
    checkpoint.prune(tmp_path, most, best=best)
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.iterdir()) == left


@pytest.mark.full
def test_the_best_is_the_model(tmp_path):
    """A rate that grows too large: the run ends after two evaluations without an improvement, and its model is the best
    checkpoint, which an older one does not outlast. `auto` begins, and then goes on: here, at the end.
    """
    validation = tiny.data_file(tmp_path, num_samples=9, seed=3)
    argv = [
        "--do_train",
        "--validation_file",
        validation,
        "--eval_steps",
        2,
        "--save_strategy",
        "best",
        "--resume",
        "auto",
    ]
    argv += ["--load_best_model_at_end", "--early_stopping_patience", 2, "--save_total_limit", 1, "--max_steps", 40]
    argv += ["--partition", cases.partition(tmp_path, CLASSES, (0, 1)), "--pipeline_schedule", "2bw", "--optim", "sgd"]
    argv += [
        "--gradient_accumulation_steps",
        2,
        "--dataloader_drop_last",
        "--learning_rate",
        1.0,
        "--warmup_steps",
        40,
        "--metric_for_best_model",
        "eval_loss",
    ]
    found = run(tmp_path, "best", *argv)
    losses = {line["step"]: line["eval_loss"] for line in found.lines if "eval_loss" in line}
    best = min(losses, key=losses.get)
    assert 0 < best < max(losses) < 40 and max(losses) == best + 4
    (kept,) = (tmp_path / "best").glob("checkpoint-*")
    assert kept.name == f"checkpoint-{best}"
    assert SavedProgress.read(kept).best == {
        "metric": "loss", "value": losses[best], "checkpoint": kept.name, "saved_value": losses[best], "without": 0
    }  # fmt: skip
    same(found, cases.Outcome([], cases.weights_of(kept, CLASSES)))
    again = run(tmp_path, "best", *argv)
    assert [line["step"] for line in again.lines[len(found.lines) :] if "loss" in line] == [*range(best + 1, best + 5)]
    same(again, found)


@pytest.mark.parametrize(("schedule", "stop_at"), [("2bw", 2), pytest.param("flush", 3, marks=pytest.mark.full)])
def test_a_stop_where_an_evaluation_is_due(tmp_path, schedule, stop_at):
    """The run saves without it, for a launcher soon kills; the run that goes on evaluates first. So both together have
    the losses, the evaluations, the best checkpoint and the model of a run that nobody stopped.
    """
    validation = tiny.data_file(tmp_path, num_samples=9, seed=3)
    argv = ["--do_train", "--validation_file", validation, "--eval_strategy", "steps", "--eval_steps", 2,
            "--save_steps", 2, "--load_best_model_at_end", "--max_steps", 8, "--resume", "auto",
            "--optim", "sgd", "--learning_rate", 1.0, "--warmup_steps", 8,
            "--gradient_accumulation_steps", 2, "--dataloader_drop_last",
            "--pipeline_schedule", schedule, "--partition", cases.partition(tmp_path, CLASSES, (0, 1))]  # fmt: skip
    whole = run(tmp_path, "whole", *argv)
    losses = {line["step"]: line["eval_loss"] for line in whole.lines if "eval_loss" in line}
    stopped = run(tmp_path, "stopped", *argv, stop_at=stop_at)
    left = SavedProgress.read(tmp_path / "stopped" / "checkpoint-4")
    assert left.owes_evaluation and [line["step"] for line in stopped.lines if "eval_loss" in line] == [2]
    rest = run(tmp_path, "stopped", *argv)
    assert {line["step"]: line["eval_loss"] for line in rest.lines if "eval_loss" in line} == losses
    same(rest, whole)
    last = [SavedProgress.read(tmp_path / name / "checkpoint-8") for name in ("stopped", "whole")]
    assert last[0] == last[1] and not last[0].owes_evaluation and last[0].best["checkpoint"] == "checkpoint-4"


@pytest.mark.full
def test_the_last_checkpoint_may_be_the_best(tmp_path):
    """It is written at the end, where no interval is due, right after the best evaluation."""
    validation = tiny.data_file(tmp_path, num_samples=9, seed=3)
    argv = ["--do_train", "--validation_file", validation, "--eval_strategy", "steps", "--eval_steps", 1,
            "--save_steps", 2, "--load_best_model_at_end", "--max_steps", 3, "--pipeline_schedule", "flush",
            "--learning_rate", 0.01, "--partition", cases.partition(tmp_path, CLASSES, (0,))]  # fmt: skip
    found = run(tmp_path, "last", *argv, ranks=1)
    losses = {line["step"]: line["eval_loss"] for line in found.lines if "eval_loss" in line}
    assert min(losses, key=losses.get) == 3
    assert SavedProgress.read(tmp_path / "last" / "checkpoint-3").best["checkpoint"] == "checkpoint-3"
    same(found, cases.Outcome([], cases.weights_of(tmp_path / "last" / "checkpoint-3", CLASSES)))


def test_the_value_that_is_named_is_that_of_the_checkpoint():
    """Also where a better evaluation has no checkpoint, in a run that goes on, too."""
    best = Best("loss", greater=False)
    assert best.judge({"loss": 0.75})
    assert "no checkpoint was written after the best evaluation (loss 0.7500)" in best.verdict()
    assert best.judge({"loss": 0.5})
    best.saved_as("checkpoint-4")
    assert best.verdict() == "the best is checkpoint-4, with loss 0.5000"
    assert best.judge({"loss": 0.25})
    rest = Best("loss", greater=False)
    rest.restore(json.loads(json.dumps(best.state())))
    assert rest.verdict().startswith("the best is checkpoint-4, with loss 0.5000; an evaluation with 0.2500 was better")
    assert "loss was never a number" in Best("loss", greater=False).verdict()


@pytest.mark.full
def test_a_run_that_has_ended_early_does_not_go_on(tmp_path):
    """Patience was at its end in the last checkpoint. So a second start writes the same model, and trains nothing."""
    validation = tiny.data_file(tmp_path, num_samples=9, seed=3)
    argv = ["--do_train", "--validation_file", validation, "--eval_strategy", "steps", "--eval_steps", 1,
            "--optim", "sgd", "--save_steps", 1, "--early_stopping_patience", 1, "--early_stopping_threshold", 100,
            "--max_steps", 8, "--resume", "auto", "--pipeline_schedule", "flush", "--learning_rate", 1.0,
            "--partition", cases.partition(tmp_path, CLASSES, (0,))]  # fmt: skip
    found = run(tmp_path, "early", *argv, ranks=1)
    assert [line["step"] for line in found.lines if "loss" in line] == [1, 2]
    again = run(tmp_path, "early", *argv, ranks=1)
    assert [line["step"] for line in again.lines if "loss" in line] == [1, 2]
    same(again, found)
    raised = run(tmp_path, "early", *argv, "--early_stopping_patience", 2, ranks=1)
    assert [line["step"] for line in raised.lines if "loss" in line] == [1, 2, 3]


WANDB = """\
import json
def note(**call):
    with open({path!r}, "a") as file:
        file.write(json.dumps(call, default=str) + "\\n")
class Run:
    def log(self, values, step): note(values=values, step=step)
    def finish(self): note(finished=True)
def init(**options):
    note(**options)
    return Run()
"""


def test_weights_and_biases_is_told(tmp_path, monkeypatch):
    """A stand-in for the package records what it is told: the run's name and flags, values by step, the end."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(WANDB.format(path=str(tmp_path / "told.jsonl")))
    monkeypatch.syspath_prepend(tmp_path)
    argv = ["--report_to", "wandb", "tensorboard", "--run_name", "mine", "--logging_dir", str(tmp_path / "board")]
    report = Report(tiny.arguments(tmp_path, CLASSES, *argv), num_steps=5, steps_per_epoch=2, writes=True)
    report.batch(BatchReport(0, losses={"loss": 2.0}, grad_norm=1.0, learning_rate=0.5), 0.1)
    report.evaluation(1, {"loss": 1.5, "accuracy": 0.5}, 0.1)
    report.close()
    began, trained, evaluated, ended = map(json.loads, (tmp_path / "told.jsonl").read_text().splitlines())
    assert began["name"] == "mine" and began["config"]["learning_rate"] == 5e-5
    assert trained["step"] == 1 and trained["values"]["train/loss"] == 2.0
    assert evaluated == {"step": 1, "values": {"eval/loss": 1.5, "eval/accuracy": 0.5}} and ended == {"finished": True}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [(each.step, each.value) for each in board.Scalars("eval/loss")] == [(1, torch.tensor(1.5).item())]
