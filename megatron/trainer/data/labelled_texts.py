"""Texts with classes as a BERT reads them: [CLS], the text, [SEP], and padding up to --seq-length."""

import argparse
from collections.abc import Sequence

import numpy

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.trainer.data.bert import check_tokenizer
from megatron.trainer.data.classification import COMMON_FIELDS, build_datasets, digest
from megatron.trainer.data.microbatches import Field
from megatron.trainer.files import text_files


def text_fields(args: argparse.Namespace) -> tuple[Field, ...]:
    """`text` (int64 [b, s]) on the first stage, `padding_mask` (int64 [b, s], 0 at padding) on all, `labels` and
    `counts` on the last."""
    return (Field(name="text", stages="first", least_id=0), Field(name="padding_mask"), *COMMON_FIELDS)


class TextSamples:
    """Token ids and classes in memory. A text that is too long loses its end. `digest`: of all of them.

    Args:
        samples: texts and the names of their classes, which are among `classes`.
        length: tokens of a sample, with [CLS], [SEP] and padding.
    """

    def __init__(
        self,
        samples: Sequence[text_files.Sample],
        tokenizer: MegatronTokenizerBase,
        *,
        length: int,
        classes: Sequence[str],
    ) -> None:
        self.tokens = numpy.full((len(samples), length), tokenizer.pad, dtype=numpy.int32)
        self.lengths = numpy.zeros(len(samples), dtype=numpy.int32)
        for row, (text, _) in enumerate(samples):
            ids = [tokenizer.cls, *tokenizer.tokenize(text)[: length - 2], tokenizer.sep]
            self.tokens[row, : len(ids)], self.lengths[row] = ids, len(ids)
        numbers = {name: number for number, name in enumerate(classes)}
        self.labels = numpy.array([numbers[label] for _, label in samples], dtype=numpy.int64)
        self.digest = digest(self.tokens, self.lengths, self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict:
        mask = numpy.arange(self.tokens.shape[1]) < self.lengths[index]
        return {
            "text": self.tokens[index].astype(numpy.int64),
            "padding_mask": mask.astype(numpy.int64),
            "labels": self.labels[index],
        }


def build_text_datasets(args: argparse.Namespace, tokenizer: MegatronTokenizerBase) -> list:
    """The three datasets of a BERT that tells classes. Raises ValueError for files or a tokenizer that do not fit."""
    check_tokenizer(args, tokenizer)
    return build_datasets(args, text_fields(args), lambda paths: _read(args, tokenizer, paths))


def _read(args: argparse.Namespace, tokenizer: MegatronTokenizerBase, paths: list[str]) -> TextSamples:
    samples = text_files.read(paths)
    known = set(args.class_names)
    for _, label in samples:
        if label not in known:
            raise ValueError(
                f"{' '.join(paths)} has the class {label}, which the training data have not: they have "
                f"{', '.join(args.class_names[:8])}; leave those samples out, or train on some of them"
            )
    return TextSamples(samples, tokenizer, length=args.seq_length, classes=args.class_names)
