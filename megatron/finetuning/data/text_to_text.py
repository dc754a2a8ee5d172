"""Text to text: prediction of a target text from a text, as in the training of T5."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.finetuning.data.batches import IGNORED, Metrics, Rows
from megatron.finetuning.data.files import File
from megatron.finetuning.data.task import Prepared, Task, most_likely, padded

SOURCE = ("text", "source", "input", "document", "question", "sentence")
TARGET = ("target", "summary", "answer", "output", "label")


def _prepare(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    source = file.column(args.text_column, SOURCE, "text")
    target = file.column(args.target_column, TARGET, "target")

    def rows(file: File) -> Rows:
        texts, targets = file.texts(source, "text"), file.texts(target, "target")
        tensors = padded(tokenizer, [args.source_prefix + text for text in texts], length=args.max_seq_length)
        made = tokenizer(
            text_target=targets, truncation=True, max_length=args.max_target_length, padding="max_length",
            return_tensors="pt",
        )  # fmt: skip
        labels = made["input_ids"].masked_fill(made["attention_mask"] == 0, IGNORED)
        terms = (labels != IGNORED).sum(1)
        if not terms.all():
            raise ValueError(
                f"{file.path}, sample {int((terms == 0).nonzero()[0]) + 1}: the target has no token; leave it out"
            )
        tensors = {"input_ids": tensors["input_ids"], "attention_mask": tensors["attention_mask"], "labels": labels}
        return Rows(tensors, ignored={"labels": IGNORED}, num_terms=terms, metrics=_matches(labels))

    return Prepared(rows)


def _matches(labels: Tensor) -> Metrics:
    """A function that computes the shares of correct tokens and of correct whole targets.

    Each token is predicted from the true tokens before it. `labels`: int64 [rows, tokens].
    """

    def metrics(predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        counted = labels != IGNORED
        right = (predictions["logits"] == labels) & counted
        return {
            "token_accuracy": (right.sum() / counted.sum()).item(),
            "exact_match": torch.eq(right.sum(1), counted.sum(1)).double().mean().item(),
        }

    return metrics


TASK = Task("AutoModelForSeq2SeqLM", _prepare, keep=("logits",), summary=most_likely, new_head=False)
