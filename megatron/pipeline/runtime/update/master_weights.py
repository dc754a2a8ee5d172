"""FP32 masters of weights in less: the optimizer steps the masters, and the weights are what they round to.

Problem: BF16 keeps 8 bits of a number, so a step below 1/512 of a weight is rounded away, and so is what a moment with
a decay of 0.999 should gain.

Solution (Micikevicius et al., 2018): gradients in the weights' dtype are brought to FP32, a torch optimizer over the
masters, with its state in FP32, steps these, and they are copied into the weights. Nothing is ever read back from the
weights, so masters are to be saved. FP16 would need a loss scale besides, which is not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.runtime.update.gap_aware import GapAware


class MasterWeights:
    """Steps `optimizer`, which is over masters; a scheduler is for `optimizer` itself.

    `weight_of`: master -> the weight that it stands for, of its shape, whose `grad` a step reads. Weights are written
    with each step, and begin as their masters round; whoever restores a checkpoint restores both.

    Besides masters, a step takes another FP32 number an element, the gradient.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, weight_of: Mapping[Tensor, Tensor]) -> None:
        self.optimizer = optimizer
        self.weight_of = dict(weight_of)
        assert set(self._masters()) == set(self.weight_of), "the optimizer is over the masters, and over nothing else"

    @torch.no_grad()
    def step(self) -> None:
        """Step the masters with the weights' gradients, and write the weights."""
        self.take_gradients()
        self.optimizer.step()
        self.write()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Have the weights' gradients at the masters, in FP32; a weight without one is not stepped."""
        for master, weight in self.weight_of.items():
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype, copy=True)

    @torch.no_grad()
    def write(self) -> None:
        """The masters, rounded, into the weights; the masters' gradients are done with."""
        for master, weight in self.weight_of.items():
            weight.copy_(master)
            master.grad = None

    def _masters(self) -> Iterator[Tensor]:
        return (each for group in self.optimizer.param_groups for each in group["params"])

    # --- the optimizer's

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, and the masters in its order."""
        return {"optimizer": self.optimizer.state_dict(), "masters": [each.detach() for each in self._masters()]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for other masters than these."""
        own, given = list(self._masters()), state.get("masters", ())
        if [each.shape for each in own] != [each.shape for each in given]:
            raise ValueError(
                f"the checkpoint has {len(given)} FP32 masters, which are not the {len(own)} of these weights; go on "
                "with the precision and the model that it was made with"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        for master, value in zip(own, given, strict=True):
            master.copy_(value)


class GapAwareMasters(GapAware):
    """`GapAware` over masters: how far they have moved since the forward is counted in their own steps, which the
    weights are too coarse to tell.

    For weights that are not predicted: what a forward used is what its masters rounded to.
    """

    def __init__(self, masters: MasterWeights) -> None:
        super().__init__(masters.optimizer)
        self._masters = masters

    def step_of(self, batch: int) -> None:
        """Step with the weights' gradients of `batch`, which stay as they are."""
        self._masters.take_gradients()
        super().step_of(batch)
        self._masters.write()

    def state_dict(self) -> dict[str, Any]:
        return self._masters.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._masters.load_state_dict(state)
