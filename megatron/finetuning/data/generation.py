"""Generation: prediction of the next token of a text, and of a target text from a text, as in the training of T5."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.finetuning.data.batches import IGNORED, Metrics, Rows
from megatron.finetuning.data.files import File
from megatron.finetuning.data.packing import Tokens, rows_of
from megatron.finetuning.data.task import Prepared, Prompts, Task, most_likely, padded

TEXT = ("text", "content", "sentence", "document")
_TOO_SHORT = "a text of one token has nothing to predict"


def _prepare_continuation(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    name = file.column(args.text_column, TEXT, "text")

    def rows(file: File) -> Rows:
        texts = file.texts(name, "text")
        if args.packing:
            limits = {"truncation": True, "max_length": args.max_seq_length}
            sequences = [Tokens(ids, list(ids)) for ids in tokenizer(texts, **limits)["input_ids"]]
            if short := [number for number, each in enumerate(sequences, start=1) if not each.num_counted]:
                raise ValueError(f"{file.path}, sample {short[0]}: {_TOO_SHORT}; leave it out")
            return rows_of(sequences, args, tokenizer, lambda labels: perplexity)
        if args.no_group_texts:
            return continued(file, padded(tokenizer, texts, length=args.max_seq_length))
        return next(grouped([file]))

    def continued(file: File, tensors: Mapping[str, Tensor]) -> Rows:
        labels = _labels(tensors)
        return _rows(file, tensors, labels, labels[:, 1:], perplexity, _TOO_SHORT)

    def grouped(files: Iterable[File]) -> Iterator[Rows]:
        """Rows cut from all texts, joined with end tokens; a remainder that fills no row is left out."""
        ids: list[int] = []
        length, num_rows = args.max_seq_length, 0
        for file in files:
            for text in tokenizer(file.texts(name, "text"))["input_ids"]:
                ids += _ended(text, tokenizer.eos_token_id)
            if whole := len(ids) // length * length:
                num_rows += whole // length
                tokens = torch.tensor(ids[:whole]).view(-1, length)
                yield continued(file, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
                del ids[:whole]
        if not num_rows:
            raise ValueError(
                f"{file.path} has {len(ids)} tokens, which fill no sequence of {length}; give a smaller "
                "--max_seq_length"
            )

    return Prepared(rows, pieces=None if args.no_group_texts else grouped)


def _labels(encoded: Mapping[str, Tensor]) -> Tensor:
    """The token ids, with the padding ignored."""
    return encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, IGNORED)


def _rows(
    file: File, encoded: Mapping[str, Tensor], labels: Tensor, predicted: Tensor, metrics: Metrics, fault: str,
    targets: Sequence[str] = (),
) -> Rows:  # fmt: skip
    """Rows of encoded texts.

    `predicted`: the labels that the loss counts. `fault`: the error text for a row without such a label. `targets`: as
    for `Rows`.
    """
    terms = (predicted != IGNORED).sum(1)
    if not terms.all():
        raise ValueError(f"{file.path}, sample {int((terms == 0).nonzero()[0]) + 1}: {fault}; leave it out")
    tensors = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": labels}
    return Rows(tensors, ignored={"labels": IGNORED}, num_terms=terms, metrics=metrics, targets=targets)


def _ended(text: list[int], end: int | None) -> list[int]:
    """The token ids of a text with the end token, which some tokenizers add themselves.

    `end` is None if the tokenizer has no end token.
    """
    return text if end is None or text[-1:] == [end] else [*text, end]


def perplexity(predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
    """The exponential of the mean loss of a token, as a metric."""
    return {"perplexity": math.exp(min(loss, 700.0))}


CAUSAL = Task("AutoModelForCausalLM", _prepare_continuation, new_head=False)


SOURCE = ("text", "source", "input", "document", "question", "sentence")
TARGET = ("target", "summary", "answer", "output", "label")


def _prepare_targets(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    source = file.column(args.text_column, SOURCE, "text")
    target = file.column(args.target_column, TARGET, "target")

    def sources(file: File) -> list[str]:
        return [args.source_prefix + text for text in file.texts(source, "text")]

    def rows(file: File) -> Rows:
        texts, targets = sources(file), file.texts(target, "target")
        tensors = padded(tokenizer, texts, length=args.max_seq_length)
        made = tokenizer(
            text_target=targets, truncation=True, max_length=args.max_target_length, padding="max_length",
            return_tensors="pt",
        )  # fmt: skip
        labels = _labels(made)
        return _rows(file, tensors, labels, labels, matches(labels), "the target has no token", ["labels"])

    def prompts(file: File) -> Prompts:
        texts = sources(file)
        encoded = padded(tokenizer, texts, length=args.max_seq_length)
        real = [ids[mask == 1] for ids, mask in zip(encoded["input_ids"], encoded["attention_mask"], strict=True)]
        return Prompts(texts, file.texts(target, "target"), [ids.tolist() for ids in real], encoded)

    return Prepared(rows, prompts=prompts)


def matches(labels: Tensor) -> Metrics:
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


TEXT_TO_TEXT = Task("AutoModelForSeq2SeqLM", _prepare_targets, keep=("logits",), summary=most_likely, new_head=False)
