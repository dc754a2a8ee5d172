"""The squared norm of gradients, where they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def norm_squared(gradients: Iterable[Tensor], *, device: torch.device) -> Tensor:
    """Sum of squares of all elements: a scalar in float64 on `device`, for which nobody has waited.

    One FP32 norm per tensor. Not finite if any element is not; 0 of nothing.
    """
    tensors = list(gradients)
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).double().square().sum()
