"""Masked language modelling: some tokens of a text are hidden, and the model predicts them from both sides.

transformers' `DataCollatorForLanguageModeling` hides them: of the chosen tokens 80% become the mask, 10% another token,
and 10% stay; of whole words all become the mask. The choice depends on the seed, the epoch and the row, and not on the
microbatch, so every stage of every replica hides the same, and so does a resumed run. A row of which no token is
chosen is drawn again, since a loss over no token is not a number.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.capture.randomness import mixed
from megatron.finetuning.data.batches import IGNORED, Rows
from megatron.finetuning.data.files import File
from megatron.finetuning.data.generation import TEXT, perplexity
from megatron.finetuning.data.task import Prepared, Task, padded, require_fast
from megatron.finetuning.data.task_arguments import MLM_PROBABILITY


class MaskedRows(Rows):
    """Texts of which each epoch hides other tokens.

    Args:
        tensors: `input_ids` and what else the model takes, int64 [rows, tokens].
        special: int64 [rows, tokens]; 1 for a token that is never hidden.
        offsets: the first and the last + 1 character of each token, int64 [rows, tokens, 2]; None: single tokens are
            hidden, not whole words.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], special: Tensor, offsets: Tensor | None, *, collator: Any, seed: int
    ) -> None:
        one_each = torch.ones(len(special), dtype=torch.int64)
        super().__init__(tensors, ignored={}, num_terms=one_each, metrics=perplexity)
        self._special, self._offsets, self._collator, self._seed = special, offsets, collator, seed

    def batch(self, indices: Sequence[int], size: int, *, whole: bool = False) -> dict[str, Tensor]:
        batch = super().batch(indices, size)
        hidden = [self._hidden(number) for number in indices]
        batch["input_ids"][: len(indices)] = torch.stack([ids for ids, _ in hidden])
        batch["labels"] = torch.full_like(batch["input_ids"], IGNORED)
        batch["labels"][: len(indices)] = torch.stack([labels for _, labels in hidden])
        return batch

    def num_terms(self, indices: Sequence[int]) -> int:
        return sum(int((self._hidden(number)[1] != IGNORED).sum()) for number in indices)

    def _hidden(self, number: int) -> tuple[Tensor, Tensor]:
        """The tokens of a row with some hidden, and the labels: int64 [tokens] each."""
        row = number % len(self)
        self._collator.generator = torch.Generator().manual_seed(mixed(self._seed, number))
        while True:
            ids, labels = self._collator.torch_mask_tokens(
                self._tensors["input_ids"][None, row].clone(), special_tokens_mask=self._special[None, row],
                offset_mapping=None if self._offsets is None else self._offsets[None, row],
            )  # fmt: skip
            if (labels != IGNORED).any():
                return ids[0], labels[0]


def _prepare(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    from transformers import DataCollatorForLanguageModeling

    name, whole = file.column(args.text_column, TEXT, "text"), args.whole_word_mask
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"the tokenizer of {args.model_name_or_path} has no mask, which masked-lm puts in the place of tokens; "
            "set mask_token in its configuration, or choose another --task"
        )
    if whole:
        require_fast(tokenizer, "--whole_word_mask")
    collator = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=args.mlm_probability or MLM_PROBABILITY, whole_word_mask=whole,
        mask_replace_prob=1.0 if whole else 0.8, random_replace_prob=0.0 if whole else 0.1,
    )  # fmt: skip

    def rows(file: File) -> Rows:
        tensors = padded(
            tokenizer, file.texts(name, "text"), length=args.max_seq_length, return_special_tokens_mask=True,
            return_offsets_mapping=whole,
        )  # fmt: skip
        special, offsets = tensors.pop("special_tokens_mask"), tensors.pop("offset_mapping", None)
        if special.all(1).any():
            raise ValueError(
                f"{file.path}, sample {int(special.all(1).nonzero()[0]) + 1}: the text has no token that could be "
                "hidden; leave it out"
            )
        return MaskedRows(tensors, special, offsets, collator=collator, seed=args.seed)

    return Prepared(rows)


TASK = Task("AutoModelForMaskedLM", _prepare, new_head=False)
