"""The squared norm of gradients, where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron.pipeline.runtime.contract.tensors import as_real


def norm_squared(gradients: Iterable[Tensor], *, device: torch.device) -> Tensor:
    """Sum of squares of all elements: a scalar in float64 on `device`, for which nobody has waited.

    One norm per tensor, as of `norms_of`. Not finite if any element is not; 0 of nothing.
    """
    return sum_of_squares(norms_of(gradients), device=device)


def norms_of(gradients: Iterable[Tensor]) -> Sequence[Tensor]:
    """The norm of each: scalars where they are, in FP32, or in float64 where one of the tensors is as wide."""
    tensors = [as_real(each) for each in gradients]
    is_wide = any(each.dtype is torch.float64 for each in tensors)
    return torch._foreach_norm(tensors, 2, dtype=torch.float64 if is_wide else torch.float32) if tensors else []


def norm_of(gradient: Tensor) -> Tensor:
    """The norm of one: a scalar in float64 where it is."""
    return torch.linalg.vector_norm(as_real(gradient), dtype=torch.float64)


def sum_of_squares(norms: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """The squared norm of what has these norms: a scalar in float64 on `device`."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(list(norms)).double().square().sum()
