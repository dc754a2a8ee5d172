"""By which factor a prediction clips the gradients that it reads.

Problem: a step clips by the norm of all gradients of its batch, which nobody knows when the step is predicted: some
microbatches are to come, and other ranks hold the rest of the model. The factor of the step before is a guess; where
the norm jumps, it lets the jump through whole.

Solution: that factor, or less where a stage's own gradients ask for less. Their norm is a part of the global one, so no
step multiplies them by more than the largest norm over theirs. Of the microbatches that are known it is an estimate,
rather too large than too small, since their noise adds to it.
"""

from __future__ import annotations

from torch import Tensor


def clipped_share(share: float, squares: Tensor, *, last: float, largest: float) -> Tensor:
    """The factor on gradients that `share` makes an estimate of a batch's, clipped.

    Args:
        share: without clipping.
        squares: squared norm of the stage's gradients, a scalar in float64 on their device.
        last: by which the last step multiplied the gradients of its batch, at most 1.
        largest: norm that gradients are clipped to.

    Returns:
        A scalar in FP32 on the device of `squares`: share * min(last, largest / (norm of the estimate)).
    """
    norm = squares.sqrt() * share
    return norm.add_(1e-6).reciprocal_().mul_(largest).clamp_(max=last).mul_(share).float()
