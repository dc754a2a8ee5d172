"""Multiple choice: which of several texts continues a text, or answers it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from megatron.documents.files import require_characters
from megatron.finetuning.data.batches import Rows
from megatron.finetuning.data.classification import LABEL, class_name, class_rows
from megatron.finetuning.data.files import File, Sample
from megatron.finetuning.data.task import Prepared, Task, most_likely, padded

FIRST = ("sent1", "context", "question", "text", "premise")
MIDDLE = "sent2"
"""SWAG's beginning of the sentence that each choice ends."""

CHOICES = ("choices", "endings", "options")
ENDING = "ending{}"
"""SWAG's columns of choices, numbered from 0, for files without a column of `CHOICES`."""


def _prepare(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    first = file.column(args.text_column, FIRST, "text")
    label = file.column(args.label_column, LABEL, "label")
    listed = next((name for name in CHOICES if name in file.fields), None)
    if listed is None and ENDING.format(1) not in file.fields:
        raise ValueError(
            f"{file.path} has no choices: neither a list in {', '.join(CHOICES)}, nor {ENDING.format(0)}, "
            f"{ENDING.format(1)} and so on; add them"
        )
    count = len(_choices(file.samples[0], listed, f"{file.path}, sample 1"))

    def rows(file: File) -> Rows:
        texts, labels = file.texts(first, "text"), []
        file.column(label, (), "label")
        pairs: list[str] = []
        for number, sample in enumerate(file.samples, start=1):
            where = f"{file.path}, sample {number}"
            choices = _choices(sample, listed, where)
            if len(choices) != count:
                raise ValueError(
                    f"{where} has {len(choices)} choices, and the first sample of training has {count} in their place; "
                    "give all samples as many"
                )
            begin = f"{sample[MIDDLE]} " if isinstance(sample.get(MIDDLE), str) and sample[MIDDLE] else ""
            pairs += [begin + choice for choice in choices]
            labels.append(_number(sample[label], count, f"{where}: {label!r}"))
        repeated = [text for text in texts for _ in range(count)]
        tensors = padded(tokenizer, repeated, pairs, length=args.max_seq_length)
        shaped = {name: tensor.view(len(texts), count, -1) for name, tensor in tensors.items()}
        return class_rows(shaped, torch.tensor(labels))

    return Prepared(rows)


def _choices(sample: Sample, listed: str | None, where: str) -> list[str]:
    """The choices of a sample. Raises ValueError unless they are two or more texts."""
    names = [name for number in range(len(sample)) if (name := ENDING.format(number)) in sample]
    value = [sample[name] for name in names] if listed is None else sample.get(listed)
    if isinstance(value, Mapping):  # as in ARC: {"text": [...], "label": ["A", ...]}
        value = value.get("text")
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{where}: its choices are {value!r:.80}, and a list of two or more texts is wanted; mend it")
    return [require_characters(each, f"{where}: a choice") for each in value]


def _number(value: object, count: int, where: str) -> int:
    """The number of the right choice, counted from 0, from a number or a letter (A is 0)."""
    name = class_name(value, where)
    number = int(name) if name.isdecimal() else ord(name) - ord("A") if len(name) == 1 else -1
    if not 0 <= number < count:
        raise ValueError(
            f"{where} is {value!r}, and names none of {count} choices; give 0 to {count - 1}, or letters from A on"
        )
    return number


TASK = Task("AutoModelForMultipleChoice", _prepare, keep=("logits",), summary=most_likely)
