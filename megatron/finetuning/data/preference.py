"""Preferences: pairs of answers to a prompt, of which one is preferred (direct preference optimization, DPO).

The loss of a pair compares how much more likely each answer has become than it was in a reference model, which is the
model that the run began with (Rafailov et al., "Direct Preference Optimization", 2023, equation 7). Of the reference
only log-probabilities are needed, two numbers a pair, so they are data and no second model is held.

The two sequences of a pair are two rows in the model's forward. The loss is a part of the captured graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from megatron.finetuning.data.batches import IGNORED, Rows
from megatron.finetuning.data.chat import ASSISTANT, PROMPT, Message, Template, messages_of
from megatron.finetuning.data.files import File, Sample
from megatron.finetuning.data.packing import Sequences, rows_of
from megatron.finetuning.data.task import Prepared, Task

ANSWERS = ("chosen", "rejected")
"""The two answers of a pair, in the order of all tensors here."""

LOG_PROBABILITIES = "log_probabilities"
"""The output that evaluations keep: the log-probability of both answers, float32 [pairs, 2]."""


class Pairs(Rows):
    """Pairs of answers. Each answer has `input_ids`, `attention_mask` and `labels`, with its name in `ANSWERS` before.

    Attributes:
        reference: the log-probabilities of the answers in the reference model, float32 [pairs, 2]; they have to be set
            before the rows are trained on or evaluated.
    """

    def __init__(self, chosen: Rows, rejected: Rows, beta: float, notes: Sequence[str]) -> None:
        number = range(len(chosen))
        sides = zip(ANSWERS, (chosen.batch(number, len(number)), rejected.batch(number, len(number))), strict=True)
        super().__init__(
            {f"{side}_{name}": tensor for side, tensors in sides for name, tensor in tensors.items()},
            ignored={f"{side}_labels": IGNORED for side in ANSWERS},
            num_terms=torch.ones(len(number), dtype=torch.int64), metrics=self._rewards, notes=notes,
        )  # fmt: skip
        self.reference, self._beta = torch.zeros(len(number), 2), beta

    def batch(self, indices: Sequence[int], size: int, *, whole: bool = False) -> dict[str, Tensor]:
        """Return the rows as `Rows.batch` does, with the reference's log-probabilities."""
        chosen = torch.tensor([*indices, *[indices[-1]] * (size - len(indices))]) % len(self)
        references = {f"{side}_reference": self.reference[chosen, at] for at, side in enumerate(ANSWERS)}
        return {**super().batch(indices, size), **references}

    def _rewards(self, predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        """Metrics of the answers' rewards: beta times the gain of their log-probabilities over the reference."""
        chosen, rejected = (self._beta * (predictions[LOG_PROBABILITIES] - self.reference)).unbind(1)
        return {
            "rewards_accuracy": (chosen > rejected).double().mean().item(),
            "rewards_margin": (chosen - rejected).double().mean().item(),
            "rewards_chosen": chosen.double().mean().item(),
            "rewards_rejected": rejected.double().mean().item(),
        }


def _prepare(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    columns = {file.column(getattr(args, f"{side}_column"), (side,), side): side for side in ANSWERS}
    has_prompt = args.text_column is not None or not set(PROMPT).isdisjoint(file.fields)
    prompt = file.column(args.text_column, PROMPT, "text") if has_prompt else None
    template, beta, length = Template(args, tokenizer), args.dpo_beta, args.max_seq_length

    def rows(file: File) -> Rows:
        file.require({**columns, **({} if prompt is None else {prompt: "text"})})
        pairs = Sequences(file, "pair", length)
        for number, sample in enumerate(file.samples, start=1):
            where = f"{file.path}, sample {number}"
            before, answers = _split(sample, prompt, list(columns), where)
            tools = sample.get("tools") or None
            pairs.add(*(template.completion(before, answer, tools, where) for answer in answers))
        if not pairs.kept:
            raise ValueError(
                f"{file.path}: no pair has both answers within --max_seq_length {length}; give a larger one"
            )
        chosen, rejected = (rows_of(side, args, tokenizer) for side in zip(*pairs.kept, strict=True))
        return Pairs(chosen, rejected, beta, pairs.notes())

    return Prepared(rows, forward=loss_of_pairs(beta, args.dpo_label_smoothing))


def _split(
    sample: Sample, prompt: str | None, columns: Sequence[str], where: str
) -> tuple[list[Message], list[list[Message]]]:
    """The messages of the prompt, and of the two answers to it.

    Without a column of prompts both conversations have the prompt, which is all but their last message.

    Raises ValueError for anything else.
    """
    if prompt is not None:
        return messages_of(sample, prompt, "user", where), [
            messages_of(sample, column, ASSISTANT, where) for column in columns
        ]
    chosen, rejected = (messages_of(sample, column, None, where) for column in columns)
    if chosen[:-1] != rejected[:-1] or len(chosen) < 2:
        raise ValueError(
            f"{where}: {columns[0]!r} and {columns[1]!r} are no conversations that differ in their last message alone; "
            "mend them, or give a column of prompts"
        )
    return chosen[:-1], [chosen[-1:], rejected[-1:]]


def loss_of_pairs(beta: float, label_smoothing: float):
    """The forward of a model for a microbatch of `Pairs`, with its loss: the mean over the pairs that count."""

    def forward(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ids, mask, labels = (
            torch.cat([batch[f"{side}_{name}"] for side in ANSWERS])
            for name in ("input_ids", "attention_mask", "labels")
        )
        found = log_probabilities(model(input_ids=ids, attention_mask=mask).logits, labels)
        chosen, rejected = found.view(2, -1).unbind(0)
        gained = (chosen - batch["chosen_reference"]) - (rejected - batch["rejected_reference"])
        losses = -logsigmoid(beta * gained) * (1 - label_smoothing) - logsigmoid(-beta * gained) * label_smoothing
        counts = (batch["chosen_labels"] != IGNORED).any(1).float()
        loss = (losses * counts).sum() / counts.sum()
        return {"loss": loss, LOG_PROBABILITIES: torch.stack([chosen, rejected], 1)}

    return forward


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the log-probabilities of each row's counted tokens, float32 [rows].

    Args:
        logits: [rows, tokens, words], of which each predicts the next token.
        labels: int64 [rows, tokens], `IGNORED` where a token does not count.
    """
    expected = labels[:, 1:]
    of_tokens = logits[:, :-1].float().log_softmax(-1).gather(-1, expected.clamp(min=0)[..., None])[..., 0]
    return (of_tokens * (expected != IGNORED)).sum(1)


TASK = Task("AutoModelForCausalLM", _prepare, keep=(LOG_PROBABILITIES,), new_head=False)
