"""Direct preference optimization: plain torch trains the same, by the formula of the paper."""

from __future__ import annotations

import json
import math
from pathlib import Path

import peft
import pytest
import torch

from megatron.finetuning.arguments import parse_args
from megatron.finetuning.data.batches import Epochs
from megatron.finetuning.optimizers import make_optimizer, make_scheduler
from megatron.finetuning.plan import decaying
from tests import workers
from tests.finetuning import cases, lora, tiny
from tests.finetuning.test_runs import same

TASK = "dpo"
BETA = 0.3
TRAINS = ["--dpo_beta", BETA, "--learning_rate", 0.01, "--num_train_epochs", 2, "--adam_epsilon", 1e-4]
EVALUATES = ["--do_train", "--do_eval"]


def tokens_of(sample: dict, side: str, length: int) -> tuple[torch.Tensor, int]:
    """The tokens of a prompt and an answer, int64 [1, tokens], and the number of those before the answer."""
    prompt = f"[CLS] {sample['prompt']} [SEP] w39"
    ids = [tiny.tokenizer()(text, add_special_tokens=False)["input_ids"] for text in (prompt, sample[side] + " [SEP]")]
    return torch.tensor([[*ids[0], *ids[1]][:length]]), len(ids[0])


def log_probability(model: torch.nn.Module, ids: torch.Tensor, first: int) -> torch.Tensor:
    """log p(answer | prompt): of each token of the answer by itself, one sequence, without padding."""
    logits = model(input_ids=ids).logits[0].log_softmax(-1)
    return sum(logits[at - 1, ids[0, at]] for at in range(first, ids.shape[1]))


class Plain:
    """DPO in one process, with nothing but torch: the policy, and a second model for the reference."""

    def __init__(self, policy, reference, samples: list[dict], length: int, smoothing: float) -> None:
        self.policy, self._reference, self.samples, self._length = policy, reference.eval(), samples, length
        self._smoothing = smoothing

    def rewards(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for side in ("chosen", "rejected"):
            ids, first = tokens_of(self.samples[number % len(self.samples)], side, self._length)
            with torch.no_grad():
                reference = log_probability(self._reference, ids, first)
            found.append(BETA * (log_probability(self.policy, ids, first) - reference))
        return found[0], found[1]

    def loss(self, number: int) -> torch.Tensor:
        chosen, rejected = self.rewards(number)
        right, wrong = (-torch.log(1 / (1 + torch.exp(-by))) for by in (chosen - rejected, rejected - chosen))
        return (1 - self._smoothing) * right + self._smoothing * wrong


def plain(models: tuple, argv: list, *, delay: int = 0) -> tuple[cases.Outcome, Plain]:
    """Batch j is computed at version max(j - delay, 0)."""
    args = parse_args(list(map(str, argv)))
    samples = [json.loads(line) for line in Path(args.train_file).read_text().splitlines()]
    policy, reference = models
    found = Plain(policy, reference, samples, args.max_seq_length, args.dpo_label_smoothing)
    trained = {name: each for name, each in policy.named_parameters() if each.requires_grad}
    base = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    names = {name: name.removeprefix(lora.PREFIX) for name in trained}
    optimizer = make_optimizer({names[name]: each for name, each in trained.items()}, args, decays=decaying(base))
    epochs = Epochs(
        num_samples=len(samples), micro_batch_size=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps, seed=args.seed, drop_last=args.dataloader_drop_last,
    )  # fmt: skip
    num_steps = int(args.num_train_epochs * epochs.batches_per_epoch)
    scheduler = make_scheduler(optimizer, args, num_steps=num_steps)
    versions, lines = [{name: each.detach().clone() for name, each in trained.items()}], []
    for step, batch in zip(range(num_steps), epochs.batches(), strict=False):
        for name, each in trained.items():
            each.data.copy_(versions[max(step - delay, 0)][name])
        numbers = [number for part in batch for number in part]
        losses = [found.loss(number) for number in numbers]
        (sum(losses) / len(numbers)).backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), args.max_grad_norm)
        lines.append({"step": step + 1, "loss": sum(losses).item() / len(numbers)})
        for name, each in trained.items():
            each.data.copy_(versions[-1][name])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        versions.append({name: each.detach().clone() for name, each in trained.items()})
    weights = peft.get_peft_model_state_dict(policy) if hasattr(policy, "get_base_model") else policy.state_dict()
    return cases.Outcome(lines, {name: each.detach() for name, each in weights.items()}), found


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "schedule", "adapts", "argv"),
    [
        (2, "flush", False, ["--gradient_accumulation_steps", 2, "--dpo_label_smoothing", 0.1]),
        (2, "2bw", True, ["--gradient_accumulation_steps", 4, "--num_train_epochs", 4]),
        (1, "l2l", True, ["--per_device_train_batch_size", 8]),
        (2, "flush", False, ["--gradient_accumulation_steps", 2, "--data_parallel_size", 2]),
        (2, "2bw", False, ["--gradient_accumulation_steps", 4]),
        (1, "flush", False, ["--per_device_train_batch_size", 1, "--learning_rate", 0.001]),
    ],
)
def test_plain_torch_trains_the_same(tmp_path, ranks, schedule, adapts, argv):
    """Losses, weights, and the rewards of an evaluation; 20 pairs, of which the last microbatch and the last batch of
    an epoch have fewer."""
    validation = tiny.data_file(tmp_path, TASK, num_samples=7, seed=5)
    folder = tiny.model_folder(tmp_path, TASK)
    words = [*TRAINS, "--pipeline_schedule", schedule, *argv]
    models = cases.loaded(folder, TASK), cases.loaded(folder, TASK)
    if adapts:
        adapter = lora.begun(folder, TASK, tmp_path / "adapter")
        models = lora.adapted(folder, TASK, adapter, is_trainable=True), lora.adapted(folder, TASK, adapter)
        words += ["--adapter_name_or_path", adapter]
    found = trained(tmp_path, *words, "--validation_file", validation, *EVALUATES, ranks=ranks, adapts=adapts)
    alone = [word for word in words if word != "--data_parallel_size"]  # a batch has as many rows on one pipeline
    if "--data_parallel_size" in words:
        at = alone.index("--gradient_accumulation_steps")
        alone = [*alone[: at + 1], 4]
    expected, policy = plain(models, tiny.command(tmp_path, TASK, *alone), delay=int(schedule == "2bw"))
    assert found.losses == pytest.approx(expected.losses, rel=1e-5) and len({*found.losses}) > 2
    assert found.losses[0] == pytest.approx(math.log(2), rel=1e-6)
    for name, weights in found.weights.items():
        torch.testing.assert_close(weights, expected.weights[name], rtol=1e-5, atol=1e-6, msg=name)
    policy.samples = [json.loads(line) for line in validation.read_text().splitlines()]
    with torch.no_grad():
        rewards = torch.tensor([policy.rewards(number) for number in range(7)])
        loss = torch.stack([policy.loss(number) for number in range(7)]).mean().item()
    chosen, rejected = rewards.unbind(1)
    line = found.evaluation()
    assert line["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert line["eval_rewards_accuracy"] == pytest.approx((chosen > rejected).double().mean().item())
    assert 0 < line["eval_rewards_accuracy"] < 1
    means = [each.mean().item() for each in (chosen - rejected, chosen, rejected)]
    named = [line[f"eval_rewards_{name}"] for name in ("margin", "chosen", "rejected")]
    assert named == pytest.approx(means, rel=1e-4, abs=1e-6)


def trained(folder: Path, *argv: object, ranks: int, adapts: bool = False, name: str = "out") -> cases.Outcome:
    outcome, *_ = workers.run(
        ranks, "tests.finetuning.cases:finetune", folder=folder, task=TASK, argv=tuple(map(str, argv)), name=name,
        weights="adapter_of" if adapts else "weights_of",
    )  # fmt: skip
    return outcome


def test_a_run_goes_on_to_the_last_bit(tmp_path):
    """From a checkpoint, with the rewards relative to where the whole run began; and an evaluation of it alone."""
    validation = ["--validation_file", tiny.data_file(tmp_path, TASK, num_samples=7, seed=5)]
    argv = [*TRAINS, "--pipeline_schedule", "flush", "--save_steps", 5, *validation]
    whole = trained(tmp_path, *argv, *EVALUATES, ranks=1)
    again = [*argv, "--resume_from_checkpoint", tmp_path / "out" / "checkpoint-5"]
    rest = trained(tmp_path, *again, *EVALUATES, ranks=1, name="rest")
    assert rest.losses == whole.losses[5:] and len(rest.losses) == 9
    same(rest, whole)
    assert {**rest.evaluation(), "eval_time_ms": 0} == {**whole.evaluation(), "eval_time_ms": 0}
    last = [*argv, "--do_eval", "--resume_from_checkpoint", tmp_path / "out" / "checkpoint-14"]
    alone = trained(tmp_path, *last, ranks=1, name="alone").evaluation()
    assert alone["eval_rewards_margin"] == whole.evaluation()["eval_rewards_margin"] != 0
