"""An evaluation: all samples forward through the drained pipeline, and metrics of what they gave."""

from __future__ import annotations

import math

import torch

from megatron.finetuning.assembly import BuiltPipeline
from megatron.finetuning.data.rows import Rows

CHUNK = 32
"""Microbatches that are under way together."""


def evaluate(pipeline: BuiltPipeline, rows: Rows, *, size: int) -> dict[str, float]:
    """Mean loss over all terms, perplexity where it is one of tokens, and the task's metrics; on every rank alike.

    Drained, collective. `size`: samples of a microbatch.
    """
    microbatches = [range(first, min(first + size, len(rows))) for first in range(0, len(rows), size)]
    for first in range(0, len(microbatches), CHUNK):
        chunk = microbatches[first : first + CHUNK]
        pipeline.feed.evaluate(rows, chunk)
        pipeline.engine.evaluate(len(chunk))
    losses, kept = pipeline.results.take()
    gathered: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, (losses, kept))
    found = [None]
    if torch.distributed.get_rank() == 0:
        found = [_found(rows, microbatches, gathered)]
    torch.distributed.broadcast_object_list(found)
    return found[0]


def _found(rows: Rows, microbatches: list[range], gathered: list) -> dict[str, float]:
    losses = next(of_rank for of_rank, _ in gathered if of_rank)
    terms = [rows.num_terms(each) for each in microbatches]
    loss = math.fsum(loss * count for loss, count in zip(losses, terms, strict=True) if count) / max(sum(terms), 1)
    predictions = {}
    for _, kept in gathered:
        for name, parts in kept.items():
            real = [part[: len(each)] for part, each in zip(parts, microbatches, strict=True)]
            predictions[name] = torch.cat(real)
    return {"loss": loss, **rows.metrics(predictions, loss)}
