"""FP16 weights and gradients with FP32 masters and a loss scale."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron.finetuning.data.batches import Epochs
from megatron.finetuning.optimizers import make_optimizer
from megatron.finetuning.plan import decaying
from megatron.finetuning.pretrained import open_model
from megatron.finetuning.samples import read_data
from megatron.finetuning.trainer import Trainer
from megatron.pipeline.runtime.contract.stage import BatchReport
from tests import workers
from tests.finetuning import cases, tiny
from tests.finetuning.test_runs import CLASSES, run, same


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fp16")


SCALES = ["--fp16", "--initial_loss_scale", 2.0**22, "--loss_scale_window", 2]
"""Overflows at first, and again each time that the scale has grown back."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("task", "ranks", "argv"),
    [
        (CLASSES, (0, 1, 0, 1), ["--gradient_accumulation_steps", 2, "--max_grad_norm", 0.3]),
        ("causal-lm", (0, 1), ["--pipeline_schedule", "gpipe", "--optim", "sgd", "--learning_rate", 0.1]),
    ],
)
def test_one_process_trains_the_same_with_torchs_scaler(folder, task, ranks, argv):
    """Scales, skipped steps, losses and masters are those of a plain loop with torch.amp.GradScaler."""
    argv = ["--pipeline_schedule", "flush", "--learning_rate", 1e-3, "--num_train_epochs", 4, *SCALES, *argv]
    argv += ["--dataloader_drop_last"]
    expected = cases.plain(folder, task, argv=argv)
    cut = cases.partition(folder, task, ranks, *argv)
    found = run(folder, f"scaled-{task}", *argv, "--partition", cut, task=task)
    for name in ("loss", "loss_scale", "skipped", "learning_rate"):
        assert [line[name] for line in found.lines] == [line[name] for line in expected.lines], name
    skipped = [line["skipped"] for line in expected.lines]
    assert skipped[0] and 0 in skipped and 1 in skipped[skipped.index(0) :], skipped
    same(found, expected)


def one_step_late(folder, *argv: object) -> list[dict]:
    """What 2bw computes, in one process: gradients at the weights before, and a scale from before these. Two batches
    that overflow by one scale lower it once.
    """
    args = tiny.arguments(folder, CLASSES, *argv)
    data = read_data(args)
    masters = cases.loaded(folder / f"{CLASSES}-0.0", CLASSES).train()
    model = copy.deepcopy(masters).half()
    decays = decaying(open_model(args.model_name_or_path, data.task.auto_model, changes=data.changes))
    optimizer = make_optimizer(dict(masters.named_parameters()), args, decays=decays)
    epochs = Epochs(
        num_samples=len(data.training), micro_batch_size=3, accumulation=args.gradient_accumulation_steps,
        seed=args.seed, drop_last=True,
    )  # fmt: skip
    versions, after, lines = [copy.deepcopy(model.state_dict())], {}, []
    scale, good = args.initial_loss_scale, 0
    for step, batch in zip(range(args.max_steps), epochs.batches(), strict=False):
        model.load_state_dict(versions[max(step - 1, 0)])
        model.zero_grad()
        used, losses = after.get(step - 2, args.initial_loss_scale), []
        for indices in batch:
            losses.append(model(**data.training.batch(indices, 3)).loss)
            ((losses[-1] / len(batch)).float() * used).backward()
        gradients = [each.grad.float() / used for each in model.parameters()]
        is_finite = all(each.isfinite().all() for each in gradients)
        if is_finite:
            for master, gradient in zip(masters.parameters(), gradients, strict=True):
                master.grad = gradient
            optimizer.step()
        versions.append({name: each.to(versions[0][name].dtype) for name, each in masters.state_dict().items()})
        good = good + 1 if is_finite else 0
        if good == args.loss_scale_window:
            scale, good = scale * 2, 0
        elif not is_finite and used <= scale:
            scale /= 2
        after[step] = scale
        loss = sum(each.item() for each in losses) / len(losses)
        lines.append({"loss": loss, "loss_scale": used, "skipped": int(not is_finite)})
    return lines


@pytest.mark.full
def test_a_scale_belongs_to_its_batch(folder):
    """2bw begins a batch before the step of the batch before; a run that goes on in between has the same scales."""
    argv = ["--pipeline_schedule", "2bw", *SCALES, "--gradient_accumulation_steps", 2, "--max_grad_norm", 0]
    argv += ["--lr_scheduler_type", "constant", "--learning_rate", 1e-3, "--max_steps", 20, "--dataloader_drop_last"]
    argv += ["--initial_loss_scale", 2.0**17]
    expected = one_step_late(folder, *argv)
    argv += ["--partition", cases.partition(folder, CLASSES, (0, 1), *argv), "--save_steps", 6]
    found = run(folder, "late", *argv)
    assert [{name: line[name] for name in expected[0]} for line in found.lines] == expected
    assert 4 < sum(line["skipped"] for line in expected) < 16
    rest = run(folder, "rest", *argv, "--resume_from_checkpoint", folder / "late" / "checkpoint-6")
    assert [line["loss_scale"] for line in rest.lines] == [line["loss_scale"] for line in expected[6:]]
    same(rest, found)


@pytest.mark.full
def test_replicas_skip_together(folder):
    """Two replicas: an overflow of one skips the step of both, and the rest is what one process trains. The replicas
    add up their gradients and then divide them, so they are as large as in one process by twice the scale.
    """
    argv = ["--pipeline_schedule", "flush", "--optim", "sgd", "--learning_rate", 0.1, "--num_train_epochs", 4, *SCALES]
    twice = ["--gradient_accumulation_steps", 2, "--initial_loss_scale", 2.0**23]
    expected = cases.plain(folder, "causal-lm", argv=[*argv, *twice])
    cut = ["--partition", cases.partition(folder, "causal-lm", (0, 1), *argv)]
    found = run(folder, "together", *argv, *cut, "--data_parallel_size", 2, task="causal-lm", ranks=4)
    assert [line["skipped"] for line in found.lines] == [line["skipped"] for line in expected.lines]
    assert [2 * line["loss_scale"] for line in found.lines] == [line["loss_scale"] for line in expected.lines]
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    for name, weights in found.weights.items():
        torch.testing.assert_close(weights, expected.weights[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.full
def test_no_scale_is_small_enough(folder):
    """An overflow at the smallest scale ends the run, on all ranks with one sentence."""
    argv = ["--pipeline_schedule", "flush", *SCALES, "--min_loss_scale", 2.0**21, "--max_steps", 4]
    argv += ["--partition", cases.partition(folder, CLASSES, (0, 1), "--fp16", "--pipeline_schedule", "flush")]
    said = workers.run(2, "tests.finetuning.cases:refused", folder=folder, argv=tuple(map(str, argv)))
    assert said[0] == said[1]
    assert "of step 2 is not finite" in said[0] and "loss scale 2.09715e+06); lower --learning_rate, or give" in said[0]


@pytest.mark.parametrize(
    ("fp16", "scale", "overflow", "nan", "ends"),
    [
        (False, 1.0, True, False, True),  # a loss that is finite, and gradients that are not
        (False, 1.0, False, True, True),
        (True, 8.0, True, False, False),
        (True, 8.0, True, True, True),
        (True, 2.0, True, False, True),
        (True, 2.0, False, False, False),
    ],
)
def test_what_ends_a_run(fp16, scale, overflow, nan, ends):
    """All that is not finite, but an overflow above the smallest scale."""
    trainer = SimpleNamespace(args=SimpleNamespace(fp16=fp16, min_loss_scale=2.0))
    report = BatchReport(4, losses={"loss": 1.0}, grad_norm=1.0, loss_scale=scale, overflow=overflow, nan=nan)
    with pytest.raises(ValueError, match="gradient of step 5 is not finite") if ends else nullcontext():
        Trainer._require_finite(trainer, report)
