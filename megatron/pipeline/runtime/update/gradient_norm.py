"""The squared norm of gradients, where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def norm_squared(gradients: Iterable[Tensor], *, device: torch.device) -> Tensor:
    """Sum of squares of all elements: a scalar in float64 on `device`, for which nobody has waited.

    One FP32 norm per tensor. Not finite if any element is not; 0 of nothing.
    """
    return sum_of_squares(norms_of(gradients), device=device)


def norms_of(gradients: Iterable[Tensor]) -> Sequence[Tensor]:
    """The norm of each: FP32 scalars where they are."""
    tensors = list(gradients)
    return torch._foreach_norm(tensors, 2, dtype=torch.float32) if tensors else []


def sum_of_squares(norms: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """The squared norm of what has these norms: a scalar in float64 on `device`."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(list(norms)).double().square().sum()
