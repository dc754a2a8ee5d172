"""The loss of a microbatch, a mean or a sum with its count, and what the losses of a batch add up to.

A batch's gradient is the mean over all that its sums count, on all replicas. Their total is known when the last
microbatch is through, so backwards begin with sums, as with means that count 1: divided by the number of microbatches.
Whoever steps with the gradients divides them by the mean count of a microbatch (`ModuleUpdate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Loss = Tensor | tuple[Tensor, Tensor | float]
"""A scalar: the mean over a microbatch; or (the sum, how many it counts)."""

Counts = Callable[[int, int], float]
"""(batch, n) -> what the losses of its first n microbatches count, the mean over the replicas."""


def by_microbatches(batch: int, num_microbatches: int) -> float:
    """The `Counts` of means."""
    return float(num_microbatches)


def sum_and_count(loss: Loss) -> tuple[Tensor, Tensor | float]:
    """A mean is a sum that counts 1."""
    return loss if isinstance(loss, tuple) else (loss, 1.0)


class BatchLosses:
    """Sums by batch, in float64 where the losses are: nobody waits for them until they are taken."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor | float]] = {}

    def add(self, batch: int, loss: Loss) -> None:
        total, count = sum_and_count(loss)
        sums = self._sums.get(batch) or (torch.zeros((), dtype=torch.float64, device=total.device), 0.0)
        counted = count.detach().double() if isinstance(count, Tensor) else count
        self._sums[batch] = sums[0] + total.detach(), sums[1] + counted

    def take(self, batch: int) -> tuple[float, float]:
        """(the sum, the count) of all microbatches, which are forgotten. Raises ValueError for what is no count."""
        total, count = self._sums.pop(batch)
        if not 0 <= (number := float(count)) < math.inf:
            raise ValueError(
                f"the losses of batch {batch} count {number:g}; return (sum, count) with a count from 0 on"
            )
        return total.item(), number
