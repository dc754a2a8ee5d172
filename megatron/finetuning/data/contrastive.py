"""Pairs of an image and a text: each image learns to match its own text among the texts of its microbatch, as in CLIP.

Source: Radford et al. (2021), "Learning transferable visual models from natural language supervision".
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.finetuning.data.batches import Rows
from megatron.finetuning.data.classification import IMAGE, images_of, pixels_of
from megatron.finetuning.data.files import File
from megatron.finetuning.data.task import Prepared, Task, padded, parts_of

CAPTION = ("text", "caption", "sentence", "title")
SCORES = {"logits_per_image": "image_to_text_accuracy", "logits_per_text": "text_to_image_accuracy"}
"""Output of the model, [rows, rows] -> the metric of it."""


def _prepare(args: argparse.Namespace, processor: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    images, tokenizer = parts_of(processor, ("image_processor", "tokenizer"), args.model_name_or_path)
    image, text = file.column(args.image_column, IMAGE, "image"), file.column(args.text_column, CAPTION, "text")

    def rows(file: File) -> Rows:
        texts = padded(tokenizer, file.texts(text, "text"), length=args.max_seq_length)
        found = images_of(file, image)
        tensors = {**texts, "pixel_values": pixels_of(images, found, file)}
        return Rows(tensors, ignored={}, num_terms=torch.ones(len(found), dtype=torch.int64), metrics=_accuracies)

    return Prepared(rows)


def _own(name: str, scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Whether each row scores best with its own partner, bool [rows]. `scores`: [rows, rows]."""
    return scores.argmax(-1) == torch.arange(len(scores), device=scores.device)


def _accuracies(predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
    return {metric: predictions[name].double().mean().item() for name, metric in SCORES.items()}


TASK = Task(
    "AutoModelForZeroShotImageClassification", _prepare, keep=tuple(SCORES), summary=_own,
    auto_processor="AutoProcessor", new_head=False, couples_rows=True,
)  # fmt: skip
