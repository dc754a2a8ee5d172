"""The loss of a classifier on a microbatch, and what it reports."""

import argparse

import torch
from torch.nn.functional import cross_entropy

from megatron.trainer.report.metrics import CLASS_LOSS

ACCURACY = "accuracy"


def loss_names(args: argparse.Namespace) -> tuple[str, ...]:
    """What `classification_loss` reports."""
    return CLASS_LOSS, ACCURACY


def classification_loss(
    labels: torch.Tensor | None, counts: torch.Tensor | None, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Cross entropy in FP32, the mean over the samples that count.

    Args:
        labels: int64 [b], the classes; None on stages that have no loss, which do not call this.
        counts: float32 [b], 0 for a sample that only fills up an evaluation's last batch.
        logits: [b, classes].

    Returns (sum of losses, number of samples, {"loss", "accuracy": tensor [sum, samples]}), the last detached.
    """
    losses = cross_entropy(logits.float(), labels, reduction="none") * counts
    number, total = counts.sum(), losses.sum()
    hits = ((logits.argmax(dim=-1) == labels) * counts).sum()
    return total, number, {
        CLASS_LOSS: torch.stack([total.detach(), number]),
        ACCURACY: torch.stack([hits, number]),
    }  # fmt: skip
