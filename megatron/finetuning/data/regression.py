"""Regression: one or several numbers for a text or a pair of texts.

transformers' squared error ignores no label, and rows that only fill up a microbatch must count nothing. So the loss is
computed here: a row that fills up has no number (NaN), and all others weigh the same.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.finetuning.data.batches import Rows
from megatron.finetuning.data.classification import encoder_of_texts
from megatron.finetuning.data.files import File
from megatron.finetuning.data.task import Prepared, Task

NUMBER = ("label", "labels", "score", "similarity_score", "target")


def forward(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's numbers, `logits` [rows, numbers], and their mean squared error over the rows that have numbers."""
    labels = batch["labels"]
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
    counts = ~labels.isnan()
    errors = torch.where(counts, logits.float() - labels.nan_to_num(), 0.0)
    return {"loss": errors.square().sum() / counts.sum().clamp(min=1), "logits": logits}


def _prepare(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    encoded = encoder_of_texts(args, tokenizer, file)
    column = file.column(args.label_column, NUMBER, "label")
    count = len(_numbers(file.samples[0][column], f"{file.path}, sample 1: {column!r}"))

    def rows(file: File) -> Rows:
        texts = encoded(file)
        file.column(column, (), "label")
        found = []
        for number, sample in enumerate(file.samples, start=1):
            where = f"{file.path}, sample {number}: {column!r}"
            found.append(_numbers(sample[column], where))
            if len(found[-1]) != count:
                raise ValueError(
                    f"{where} is {sample[column]!r}, and the first sample of training has {count} in its place; give "
                    "all samples as many numbers"
                )
        labels = torch.tensor(found, dtype=torch.float64)
        return Rows(
            {**texts, "labels": labels.float()}, ignored={"labels": math.nan},
            num_terms=torch.ones(len(labels), dtype=torch.int64),
            metrics=lambda predictions, loss: scores(predictions["logits"].double(), labels),
        )  # fmt: skip

    names = {number: f"LABEL_{number}" for number in range(count)}
    changes = {"num_labels": count, "id2label": names, "label2id": {name: number for number, name in names.items()}}
    changes |= {"problem_type": "regression", "pad_token_id": tokenizer.pad_token_id}
    return Prepared(rows, changes, forward=forward)


def _numbers(value: object, where: str) -> list[float]:
    """The numbers of a sample: one, or a list of them. Raises ValueError for anything else."""
    values = value if isinstance(value, list) and value else [value]
    try:
        found = [math.nan if isinstance(each, bool) else float(each) for each in values]
    except (TypeError, ValueError):
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{where} is {value!r}, and a number or a list of numbers is wanted; mend it")
    return found


def scores(predicted: Tensor, true: Tensor) -> dict[str, float]:
    """The mean squared and the mean absolute error, and Pearson's and Spearman's correlation as the mean over the
    numbers of a sample; without the correlations if a number is the same for all samples.

    `predicted`, `true`: float64 [rows, numbers].
    """
    from scipy import stats

    found = {"mse": (predicted - true).square().mean().item(), "mae": (predicted - true).abs().mean().item()}
    if len(true) > 1 and (predicted.std(0) > 0).all() and (true.std(0) > 0).all():
        columns = list(zip(predicted.T.numpy(), true.T.numpy(), strict=True))
        for name, correlation in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
            found[name] = sum(float(correlation(*each).statistic) for each in columns) / len(columns)
    return found


TASK = Task("AutoModelForSequenceClassification", _prepare, keep=("logits",))
