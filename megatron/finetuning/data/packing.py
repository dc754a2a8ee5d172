"""Rows of token sequences, in which each token may count in the loss or not: one sequence a row, or several packed.

In a packed row each sequence has positions that begin at 0, and there is no mask of padding. transformers then makes
masks in which a token attends only to tokens of its own sequence. What is left of a row is a sequence of padding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.documents import counted
from megatron.finetuning.data.batches import IGNORED, Metrics, Rows
from megatron.finetuning.data.files import File
from megatron.finetuning.data.task import give_padding
from megatron.trainer.files.conversations import best_fit


@dataclass(frozen=True)
class Tokens:
    """A sequence of tokens.

    Attributes:
        ids: the token ids.
        labels: for each token its id, or `IGNORED` where it does not count in the loss.
    """

    ids: list[int]
    labels: list[int]

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.labels)
        if self.labels:
            self.labels[0] = IGNORED  # nothing in the sequence predicts its first token

    def cut(self, length: int) -> Tokens:
        """The first `length` tokens."""
        return Tokens(self.ids[:length], self.labels[:length])

    @property
    def num_counted(self) -> int:
        """The number of tokens that count in the loss."""
        return sum(label != IGNORED for label in self.labels)


def notes_on(file: File, kind: str, length: int, *, num_cut: int, num_left_out: int) -> list[str]:
    """Sentences on how many samples of a kind, such as conversations, were cut or left out; none for a number of 0."""
    return [
        f"{file.path}: {counted(count, kind)} of {len(file.samples)} {what}"
        for count, what in (
            (num_cut, f"cut to --max_seq_length {length}"),
            (num_left_out, "left out, without an answer in what is left"),
        )
        if count
    ]


def require_some(sequences: Sequence[Tokens], file: File, length: int) -> None:
    """Raise ValueError if no conversation of a file is left."""
    if not sequences:
        raise ValueError(
            f"{file.path}: no conversation has an answer within --max_seq_length {length}; give a larger "
            "--max_seq_length, or conversations in which the assistant answers"
        )


def rows_of(
    sequences: Sequence[Tokens],
    args: argparse.Namespace,
    tokenizer: Any,
    metrics: Callable[[torch.Tensor], Metrics] = lambda labels: lambda predictions, loss: {},
    notes: Sequence[str] = (),
    others: Mapping[str, torch.Tensor] | None = None,
) -> Rows:
    """Rows of `args.max_seq_length` tokens; with `args.packing` of several sequences each, otherwise of one.

    The rows have `input_ids`, `labels`, and `position_ids` if they are packed or else `attention_mask`: int64 [rows,
    tokens]. No sequence is longer than a row, and each has a token that counts.

    Args:
        metrics: makes the function for the metrics from the labels, int64 [rows, tokens].
        others: further inputs of the model, [rows, ...], for rows of one sequence each.
    """
    assert not (others and args.packing)
    give_padding(tokenizer)
    length = args.max_seq_length
    bins = best_fit([len(each.ids) for each in sequences], length) if args.packing else (
        [[number] for number in range(len(sequences))]
    )  # fmt: skip
    shape = (len(bins), length)
    ids, labels = torch.full(shape, tokenizer.pad_token_id), torch.full(shape, IGNORED)
    positions, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for row, members in enumerate(bins):
        first = 0
        for number in members:
            after = first + len(sequences[number].ids)
            ids[row, first:after] = torch.tensor(sequences[number].ids)
            labels[row, first:after] = torch.tensor(sequences[number].labels)
            positions[row, first:after] = torch.arange(after - first)
            mask[row, first:after] = 1
            first = after
        positions[row, first:] = torch.arange(length - first)
    if args.packing:
        notes = [*notes, f"--packing: {len(sequences)} sequences in {len(bins)} rows"]
    return Rows(
        {"input_ids": ids, **({"position_ids": positions} if args.packing else {"attention_mask": mask}),
         **(others or {}), "labels": labels},
        ignored={"labels": IGNORED}, num_terms=(labels != IGNORED).sum(1), metrics=metrics(labels), notes=notes,
    )  # fmt: skip
