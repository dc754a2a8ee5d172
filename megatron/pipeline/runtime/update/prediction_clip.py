"""By which factor a prediction clips the gradients that it reads.

Problem: a step clips by the norm of all gradients of its batch, which nobody knows when the step is predicted: some
microbatches are to come, and other ranks hold the rest of the model. The factor of the step before is a guess; where
the norm jumps, it lets the jump through whole.

Solution: that factor, or less where a stage's own gradients ask for less. Their norm is a part of the global one, so no
step multiplies them by more than the largest norm over theirs. What a part f of a batch adds up to, times 1/f, is an
estimate of them whose norm is too large: with signal S and noise N its square is S^2 + N^2/f, where that of the whole
batch is S^2 + N^2. The root of f times it is at most the latter, and equal where all is noise: so that is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor


def prediction_factor(
    part: float, squares: Tensor, *, last: float, largest: float, num_unread: int = 0, loss_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """The factor that makes a part of a batch's gradients an estimate of all of them, clipped.

    Args:
        part: of a replica's microbatches, above 0 and at most 1.
        squares: squared norm of what the part adds up to, a scalar in float64 on its device.
        last: by which the last step multiplied the gradients of its batch, at most 1.
        largest: norm that gradients are clipped to.
        num_unread: replicas that share the batch, beside the one that reads; 0 where the mean of all is read.
        loss_scale: of the batch.
        dtype: of the factor.

    Returns:
        A scalar of `dtype` on the device of `squares`, for which nobody has waited.
    """
    part_of_batch = part / (1 + num_unread)
    norm = squares.sqrt() * (part_of_batch**0.5 / (part * loss_scale))
    return norm.add_(1e-6).reciprocal_().mul_(largest).clamp_(max=last).div_(part * loss_scale).to(dtype)
