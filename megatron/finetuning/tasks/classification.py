"""Sequence classification: one text or two, and a class."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from megatron.finetuning.data.files import column, fields, texts_of
from megatron.finetuning.data.rows import IGNORED, Rows
from megatron.finetuning.tasks.labels import Labels, accuracy
from megatron.finetuning.tasks.task import File, Prepared, Task, most_likely
from megatron.finetuning.tasks.tokens import give_padding, padded

FIRST = ("text", "sentence", "sentence1", "premise", "question1", "review", "content")
SECOND = ("text_pair", "sentence2", "hypothesis", "question2")
LABEL = ("label", "labels", "class")


def _prepare(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    first = column(file.samples, file.path, args.text_column, FIRST, "text")
    second = args.text_pair_column
    if second is not None or set(SECOND) & set(fields(file.samples)):
        second = column(file.samples, file.path, second, SECOND, "text pair")
    labels = Labels(file, column(file.samples, file.path, args.label_column, LABEL, "label"), classes)
    give_padding(tokenizer)

    def rows(each: File) -> Rows:
        texts = texts_of(each.samples, each.path, column(each.samples, each.path, first, (), "text"))
        pairs = second and texts_of(each.samples, each.path, column(each.samples, each.path, second, (), "text pair"))
        own = labels.of(each)
        tensors = padded(tokenizer, texts, pairs or None, length=args.max_seq_length)
        return Rows(
            {**tensors, "labels": own}, ignored={"labels": IGNORED}, num_terms=torch.ones_like(own),
            metrics=accuracy(own),
        )  # fmt: skip

    return Prepared(rows, {**labels.changes, "pad_token_id": tokenizer.pad_token_id})


TASK = Task("AutoModelForSequenceClassification", _prepare, keep=("logits",), summary=most_likely)
