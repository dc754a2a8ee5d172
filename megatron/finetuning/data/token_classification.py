"""Classification of words: a class for each word of a text, such as the entity that it names.

The first token of a word has its label; the other tokens of the word have none.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.documents import counted
from megatron.finetuning.data.batches import IGNORED, Metrics, Rows
from megatron.finetuning.data.classification import Labels
from megatron.finetuning.data.files import File
from megatron.finetuning.data.task import Prepared, Task, give_padding, most_likely, require_fast

WORDS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "labels", "label", "pos_tags")
OUTSIDE = "O"
"""The class of a word that belongs to no entity."""


def _prepare(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    words, tags = file.column(args.text_column, WORDS, "text"), file.column(args.label_column, TAGS, "label")
    require_fast(tokenizer, "token classification", "which word a token is of")
    give_padding(tokenizer)
    labels = Labels(_single_words(file, words, tags), tags, classes)

    def rows(file: File) -> Rows:
        of_words = labels.of(_single_words(file, words, tags))
        texts = [sample[words] for sample in file.samples]
        try:
            encoded = tokenizer(
                texts, is_split_into_words=True, truncation=True, max_length=args.max_seq_length, padding="max_length",
                return_tensors="pt",
            )  # fmt: skip
        except AssertionError as error:  # for example RoBERTa's tokenizer without add_prefix_space
            raise ValueError(f"the tokenizer takes no words ({error}); change that in its configuration") from error
        numbers = torch.full_like(encoded["input_ids"], IGNORED)
        num_lost = 0
        for row, first in enumerate(accumulate(map(len, texts[:-1]), initial=0)):
            of_tokens = encoded.word_ids(row)
            starts = {word: place for place, word in reversed(list(enumerate(of_tokens))) if word is not None}
            for word, place in starts.items():
                numbers[row, place] = of_words[first + word]
            num_lost += len(texts[row]) - len(starts)
        terms = (numbers != IGNORED).sum(1)
        if not terms.all():
            raise ValueError(f"{file.path}, sample {int(terms.argmin()) + 1}: no word has a token; leave it out")
        tensors = {name: encoded[name] for name in tokenizer.model_input_names if name in encoded}
        cut = f"{file.path}: {counted(num_lost, 'word')} cut off by --max_seq_length {args.max_seq_length}"
        return Rows(
            {**tensors, "labels": numbers}, ignored={"labels": IGNORED}, num_terms=terms,
            metrics=_metrics(numbers, labels.names), notes=[cut] if num_lost else [],
        )  # fmt: skip

    return Prepared(rows, {**labels.changes, "pad_token_id": tokenizer.pad_token_id})


def _single_words(file: File, words: str, tags: str) -> File:
    """The words of all samples one by one, with their labels. Raises ValueError for a sample without a label a word."""
    file.require({words: "text", tags: "label"})
    for number, sample in enumerate(file.samples, start=1):
        found, own = sample[words], sample[tags]
        if not (isinstance(found, list) and found and all(isinstance(word, str) for word in found)):
            raise ValueError(
                f"{file.path}, sample {number}: {words!r} is {found!r}, and a list of words is wanted; mend it, or "
                "leave the sample out"
            )
        if not (isinstance(own, list) and len(own) == len(found)):
            raise ValueError(
                f"{file.path}, sample {number}: {tags!r} is {own!r}, and a list of {len(found)} labels is wanted, one "
                f"for each of {words!r}; mend it"
            )
    pairs = [{tags: tag} for sample in file.samples for tag in sample[tags]]
    return File(f"{file.path} (a word a sample)", pairs)


def _metrics(labels: Tensor, names: Sequence[str]) -> Metrics:
    """A function that computes the share of words with the right class and, where the classes are B-X, I-X and O, the
    precision, recall and F1 of whole entities. `labels`: int64 [rows, tokens]."""
    counts = labels != IGNORED
    has_entities = all(name == OUTSIDE or name[:2] in ("B-", "I-") for name in names)

    def in_rows(numbers: Tensor) -> set[tuple[int, str, int, int]]:
        tags = [
            [names[number] for number in row[counted].tolist()] for row, counted in zip(numbers, counts, strict=True)
        ]
        return {(row, *each) for row, own in enumerate(tags) for each in entities(own)}

    def metrics(predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        found = predictions["logits"]
        accuracy = {"accuracy": ((found == labels) & counts).sum().item() / counts.sum().item()}
        if not has_entities:
            return accuracy
        true, guessed = in_rows(labels), in_rows(found)
        right = len(true & guessed)
        precision, recall = right / max(len(guessed), 1), right / max(len(true), 1)
        f1 = 2 * right / max(len(true) + len(guessed), 1)
        return {**accuracy, "precision": precision, "recall": recall, "f1": f1}

    return metrics


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """The entities of a text as (kind, first word, last word + 1), from tags B-X, I-X and O.

    As in CoNLL's script, I-X begins an entity where no entity of the kind X goes before it.
    """
    kinds = [tag[2:] if tag != OUTSIDE else None for tag in tags]
    begins = [
        place
        for place, (tag, kind) in enumerate(zip(tags, kinds, strict=True))
        if place == 0 or tag.startswith("B-") or kind != kinds[place - 1]
    ]
    return [(kinds[a], a, b) for a, b in pairwise([*begins, len(tags)]) if kinds[a] is not None]


TASK = Task("AutoModelForTokenClassification", _prepare, keep=("logits",), summary=most_likely)
