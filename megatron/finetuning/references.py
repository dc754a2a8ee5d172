"""The log-probabilities of a preference's answers in the reference model, which is the model that a run begins with.

They are computed before the first step, by evaluation forwards of the pipeline itself. A run that goes on from a
checkpoint computes them again before it reads the checkpoint: the same forwards of the same weights.
"""

from __future__ import annotations

from megatron.finetuning.assembly import BuiltPipeline
from megatron.finetuning.data.preference import LOG_PROBABILITIES, Pairs
from megatron.finetuning.samples import Data
from megatron.finetuning.trainer import forward, in_order


def set_references(pipeline: BuiltPipeline, data: Data, *, size: int) -> int:
    """Set the references of all pairs. Returns the number of pairs; 0 for another task.

    Collective: every rank must call it, before a step and before a checkpoint is read. `size`: rows of a microbatch.
    """
    found = [rows for rows in (data.training, data.validation) if isinstance(rows, Pairs)]
    for rows in found:
        _, kept = forward(pipeline, rows, in_order(rows, size))
        rows.reference = kept[LOG_PROBABILITIES]
    return sum(map(len, found))
