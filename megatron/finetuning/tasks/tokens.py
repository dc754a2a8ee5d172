"""Texts as token ids of one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def padded(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None = None, *, length: int, **options: object
) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask`, and `token_type_ids` where the tokenizer has them; int64 [texts, length]."""
    give_padding(tokenizer)
    special = tokenizer.num_special_tokens_to_add(pair=pairs is not None)
    if special >= length:
        raise ValueError(
            f"{length} tokens leave no room for a text, as {special} are special; give a larger --max_seq_length"
        )
    encoded = tokenizer(
        list(texts), None if pairs is None else list(pairs), truncation=True, max_length=length, padding="max_length",
        return_tensors="pt", **options,
    )  # fmt: skip
    return dict(encoded)


def give_padding(tokenizer: Any) -> None:
    """A tokenizer without a padding token, as GPT-2's, pads with that of the end. Raises ValueError without either."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has neither a padding token nor one for the end; set pad_token in its configuration"
            )
        tokenizer.pad_token = tokenizer.eos_token
