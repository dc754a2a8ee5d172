"""Gap-aware steps: a gradient counts the less, the further the weights have moved since its loss (Barkai et al., 2020).

Problem: a stale gradient is right for weights that are no more. To shrink it by the number of steps in between shrinks
too much where the steps were small.

Solution: element by element, a gradient is divided by

    1 + |w - w_F| / C

w are the weights that the step changes, w_F those of the forward, predicted or not, and C is a running average of the
size of that element's steps. So the gap is counted in steps of usual size; of complex weights, the real and the
imaginary parts are elements. A batch of several microbatches has that of its first one, whose forward was the furthest
behind. A batch whose forward has the weights of its backward is stepped as the optimizer steps it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.runtime.contract.tensors import as_real

SMOOTHING = 0.99
"""The share of the running average that is kept with each step."""

_AVERAGE = "step_average"


class GapAware:
    """Steps `optimizer` so. A scheduler or a predictor is for `optimizer` itself.

    The average lies in the optimizer's state, so that a checkpoint has it. Besides, there is a copy of the parameters
    for each batch between its forward and its step, and one more while a step is taken.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._weights_of_forward: dict[int, dict[Tensor, Tensor]] = {}  # by batch

    @torch.no_grad()
    def remember(self, batch: int) -> None:
        """The parameters show the weights with which the forward of `batch` begins, which are not those of its step."""
        self._weights_of_forward[batch] = {each: each.detach().clone() for each in self._parameters()}

    @torch.no_grad()
    def step_of(self, batch: int) -> None:
        """Step with the gradients of `batch`, which are changed by that."""
        for parameter, before in self._weights_of_forward.pop(batch, {}).items():
            average = self.optimizer.state.get(parameter, {}).get(_AVERAGE)
            if parameter.grad is not None and average is not None:
                gap = as_real(before.sub_(parameter)).abs_().div_(average)
                gap.masked_fill_(average == 0, 0.0)  # an element that no step has moved
                as_real(parameter.grad).div_(gap.add_(1.0))
        stepped = {each: each.detach().clone() for each in self._parameters() if each.grad is not None}
        self.optimizer.step()
        for parameter, before in stepped.items():
            size = as_real(before.sub_(parameter)).abs_()
            state = self.optimizer.state[parameter]  # which the optimizer has filled by now
            if _AVERAGE in state:
                state[_AVERAGE].lerp_(size, 1.0 - SMOOTHING)
            else:
                state[_AVERAGE] = size

    def _parameters(self) -> Iterator[Tensor]:
        return (each for group in self.optimizer.param_groups for each in group["params"])

    # --- the optimizer's

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
