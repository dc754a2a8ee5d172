"""Causal language modelling: prediction of the next token of a text."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.finetuning.data.batches import IGNORED, Rows
from megatron.finetuning.data.files import File
from megatron.finetuning.data.task import Prepared, Task, padded

TEXT = ("text", "content", "sentence", "document")


def _prepare(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    name = file.column(args.text_column, TEXT, "text")

    def rows(file: File) -> Rows:
        texts = file.texts(name, "text")
        tensors = _apart(tokenizer, texts, args) if args.no_group_texts else _grouped(tokenizer, texts, args, file.path)
        terms = (tensors["labels"][:, 1:] != IGNORED).sum(1)
        if not terms.all():
            raise ValueError(
                f"{file.path}, sample {int((terms == 0).nonzero()[0]) + 1}: a text of one token has nothing to "
                "predict; leave it out"
            )
        return Rows(tensors, ignored={"labels": IGNORED}, num_terms=terms, metrics=_perplexity)

    return Prepared(rows)


def _apart(tokenizer: Any, texts: list[str], args: argparse.Namespace) -> dict[str, Tensor]:
    """The tensors of rows that have one text each, with padding."""
    tensors = padded(tokenizer, texts, length=args.max_seq_length)
    labels = tensors["input_ids"].masked_fill(tensors["attention_mask"] == 0, IGNORED)
    return {"input_ids": tensors["input_ids"], "attention_mask": tensors["attention_mask"], "labels": labels}


def _grouped(tokenizer: Any, texts: list[str], args: argparse.Namespace, path: str) -> dict[str, Tensor]:
    """The tensors of rows cut from all texts, joined with end tokens; a remainder that fills no row is left out."""
    ids = [token for text in tokenizer(texts)["input_ids"] for token in _ended(text, tokenizer.eos_token_id)]
    length = args.max_seq_length
    if len(ids) < length:
        raise ValueError(
            f"{path} has {len(ids)} tokens, which fill no sequence of {length}; give a smaller --max_seq_length"
        )
    tokens = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def _ended(text: list[int], end: int | None) -> list[int]:
    """The token ids of a text with the end token, which some tokenizers add themselves.

    `end` is None if the tokenizer has no end token.
    """
    return text if end is None or text[-1:] == [end] else [*text, end]


def _perplexity(predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
    return {"perplexity": math.exp(min(loss, 700.0))}


TASK = Task("AutoModelForCausalLM", _prepare, new_head=False)
