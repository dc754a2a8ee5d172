"""Rows of token sequences, in which each token may count in the loss or not: one sequence a row, or several packed.

In a packed row each sequence has positions that begin at 0, and there is no mask of padding. transformers then makes
masks in which a token attends only to tokens of its own sequence. The rest of a row is a sequence of padding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass
class Sequences:
    """The sequences of a file's samples, cut to a length. A sample is left out if one of its
    sequences has no answer within the length.

    Attributes:
        kind: the word for a sample, such as conversation.
        kept: the sequences of each sample that is not left out.
        num_cut, num_left_out: numbers of samples.
    """

    file: File
    kind: str
    length: int
    kept: list[list[Tokens]] = field(default_factory=list)
    num_cut: int = 0
    num_left_out: int = 0

    def add(self, *found: Tokens) -> bool:
        """Add the sequences of a sample. Returns whether they are kept."""
        self.num_cut += any(len(each.ids) > self.length for each in found)
        cut = [each.cut(self.length) for each in found]
        is_kept = all(each.num_counted for each in cut)
        self.kept += [cut] * is_kept
        self.num_left_out += not is_kept
        return is_kept

    def only(self) -> list[Tokens]:
        """The sequences, if each sample has a single one. Raises ValueError if none is kept."""
        if not self.kept:
            raise ValueError(
                f"{self.file.path}: no conversation has an answer within --max_seq_length {self.length}; give a larger "
                "--max_seq_length, or conversations in which the assistant answers"
            )
        return [sequence for (sequence,) in self.kept]

    def notes(self) -> list[str]:
        """Sentences on how many samples were cut or left out; none for a number of 0."""
        return [
            f"{self.file.path}: {counted(count, self.kind)} of {len(self.file.samples)} {what}"
            for count, what in (
                (self.num_cut, f"cut to --max_seq_length {self.length}"),
                (self.num_left_out, "left out, without an answer in what is left"),
            )
            if count
        ]


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
