"""Text to text: a target text for each text, as T5 is trained."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.finetuning.data.files import column, texts_of
from megatron.finetuning.data.rows import IGNORED, Metrics, Rows
from megatron.finetuning.tasks.task import File, Prepared, Task, most_likely
from megatron.finetuning.tasks.tokens import padded

SOURCE = ("text", "source", "input", "document", "question", "sentence")
TARGET = ("target", "summary", "answer", "output", "label")


def _prepare(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    source = column(file.samples, file.path, args.text_column, SOURCE, "text")
    target = column(file.samples, file.path, args.target_column, TARGET, "target")

    def rows(each: File) -> Rows:
        texts, targets = (
            texts_of(each.samples, each.path, column(each.samples, each.path, name, (), what))
            for name, what in ((source, "text"), (target, "target"))
        )
        tensors = padded(tokenizer, [args.source_prefix + text for text in texts], length=args.max_seq_length)
        made = tokenizer(
            text_target=targets, truncation=True, max_length=args.max_target_length, padding="max_length",
            return_tensors="pt",
        )  # fmt: skip
        labels = made["input_ids"].masked_fill(made["attention_mask"] == 0, IGNORED)
        terms = (labels != IGNORED).sum(1)
        if not terms.all():
            raise ValueError(
                f"{each.path}, sample {int((terms == 0).nonzero()[0]) + 1}: the target has no token; leave it out"
            )
        tensors = {"input_ids": tensors["input_ids"], "attention_mask": tensors["attention_mask"], "labels": labels}
        return Rows(tensors, ignored={"labels": IGNORED}, num_terms=terms, metrics=_matches(labels))

    return Prepared(rows)


def _matches(labels: Tensor) -> Metrics:
    """Each token predicted from the true ones before it: how many are right, and in how many samples all are."""

    def metrics(predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        counted = labels != IGNORED
        right = (predictions["logits"] == labels) & counted
        return {
            "token_accuracy": (right.sum() / counted.sum()).item(),
            "exact_match": torch.eq(right.sum(1), counted.sum(1)).double().mean().item(),
        }

    return metrics


TASK = Task("AutoModelForSeq2SeqLM", _prepare, keep=("logits",), summary=most_likely, new_head=False)
