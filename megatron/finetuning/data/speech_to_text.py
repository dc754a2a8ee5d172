"""Speech to text with an encoder of sound and a decoder of text, as in Whisper."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.finetuning.data.batches import IGNORED, Rows
from megatron.finetuning.data.ctc import TEXT
from megatron.finetuning.data.files import File
from megatron.finetuning.data.generation import matches, perplexity
from megatron.finetuning.data.sound import Sounds
from megatron.finetuning.data.task import Prepared, Task, config_of, give_padding, most_likely, parts_of


def _prepare(args: argparse.Namespace, processor: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    extractor, tokenizer = parts_of(processor, ("feature_extractor", "tokenizer"), args.model_name_or_path)
    sounds, text = Sounds(args, extractor, file), file.column(args.target_column or args.text_column, TEXT, "text")
    start = config_of(args.model_name_or_path).decoder_start_token_id
    give_padding(tokenizer)

    def rows(file: File) -> Rows:
        labels = torch.full((len(file.samples), args.max_target_length), IGNORED)
        for row, each in enumerate(file.texts(text, "text")):
            ids = tokenizer(each)["input_ids"]
            ids = ids[ids[:1] == [start] :][: args.max_target_length]  # the model itself puts the start before them
            if not ids:
                raise ValueError(f"{file.path}, sample {row + 1}: the text has no token; leave it out")
            labels[row, : len(ids)] = torch.tensor(ids)
        inputs, notes = sounds.inputs(file)
        right = matches(labels)

        def metrics(predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
            return {**perplexity(predictions, loss), **right(predictions, loss)}

        return Rows(
            {**inputs, "labels": labels}, ignored={"labels": IGNORED}, num_terms=(labels != IGNORED).sum(1),
            metrics=metrics, notes=notes,
        )  # fmt: skip

    return Prepared(rows)


TASK = Task(
    "AutoModelForSpeechSeq2Seq", _prepare, keep=("logits",), summary=most_likely, auto_processor="AutoProcessor",
    new_head=False,
)  # fmt: skip
