"""Optimizers around a torch optimizer: a stand-in with other parameters, gap-aware steps, FP32 masters.

`stand_in` makes an optimizer with other groups or state. Its step computes what the optimizer's own `step` computes,
and neither hooks nor learning-rate schedules see it.

`GapAware` (Barkai et al., 2020). A stale gradient belongs to weights that no longer exist. Dividing it by the number of
steps in between shrinks it too much where the steps were small. So each element of a gradient is divided by

    1 + |w - w_F| / C

w are the weights that the step changes, w_F those of the forward, predicted or not, and C is a running average of the
size of that element's steps: the gap is counted in steps of usual size. Of complex weights, the real and the imaginary
parts are elements. A batch of several microbatches has the gap of its first one, whose forward was the furthest behind.
A batch whose forward has the weights of its backward is stepped as the optimizer steps it, bit for bit.

`GapAwareMasters` and the other masters (Micikevicius et al., 2018). BF16 keeps 8 bits of a number, so a step below
1/512 of a weight is rounded away, and so are small gains of a moment with a decay of 0.999. Hence gradients are
converted to FP32, a torch optimizer steps FP32 masters, with its state in FP32, and the masters are copied into the
weights. Nothing is ever read back from the weights, so masters have to be saved. FP16, which would need a loss scale,
is not supported.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.runtime.contract.tensors import as_real

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_THE_INSTANCE = ("step", "state", "param_groups", *HOOKS)
"""Attributes that a stand-in does not share; a learning-rate schedule replaces `step` of its optimizer."""


def stand_in(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    *,
    shares_tables: bool,
) -> torch.optim.Optimizer:
    """An optimizer of the same type with these groups and this state.

    `shares_tables`: its other dicts and lists are the optimizer's own, not copies.
    """
    made = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key not in _OF_THE_INSTANCE:
            is_copied = isinstance(value, dict | list) and not shares_tables
            made.__dict__[key] = copy.copy(value) if is_copied else value
    for name in HOOKS:
        made.__dict__[name] = OrderedDict()
    made.param_groups = groups
    made.state = state
    return made


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Run a stand-in's step, without hooks."""
    step = type(optimizer).step
    if hasattr(step, "hooked"):  # torch's wrapper, which calls the hooks of all optimizers
        step = step.__wrapped__
    step(optimizer)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a group's options, without its parameters."""
    options = list(group.items())  # at once: another thread's step may add a counter meanwhile
    return {key: copied(value) for key, value in options if key != "params"}


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


SMOOTHING = 0.99
"""The share of the running average that is kept with each step."""

_AVERAGE = "step_average"


class GapAware:
    """Gap-aware steps of `optimizer`. A scheduler or a predictor takes `optimizer` itself.

    The average lies in the optimizer's state, so that a checkpoint has it. It also keeps a copy of the parameters for
    each batch between its forward and its step, and one more during a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._weights_of_forward: dict[int, dict[Tensor, Tensor]] = {}  # by batch

    @torch.no_grad()
    def remember(self, batch: int) -> None:
        """Keep the shown weights as those of the forward of `batch`, where its step changes other weights."""
        self._weights_of_forward[batch] = {each: each.detach().clone() for each in self._parameters()}

    @torch.no_grad()
    def step_of(self, batch: int) -> None:
        """Step with the gradients of `batch`; changes the gradients."""
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


class MasterWeights:
    """Steps `optimizer`, whose parameters are masters; a scheduler takes `optimizer` itself.

    `weight_of`: master -> its weight, of the same shape, whose `grad` a step reads. Each step writes the weights, which
    begin as the rounded masters; a checkpoint has to restore both.

    A step needs one more FP32 number an element, for the gradient.
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
        """Copy the weights' gradients to the masters, in FP32; a weight without a gradient is not stepped."""
        for master, weight in self.weight_of.items():
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype, copy=True)

    @torch.no_grad()
    def write(self) -> None:
        """Write the rounded masters into the weights, and drop the masters' gradients."""
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
        """The optimizer's state, and the masters in its order."""
        return {"optimizer": self.optimizer.state_dict(), "masters": [each.detach() for each in self._masters()]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`. Raises ValueError for masters of other number or shapes."""
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
    """`GapAware` over masters: the gap is that of the masters since the forward, since the weights are too coarse.

    For weights that are not predicted: a forward used the rounded masters.
    """

    def __init__(self, masters: MasterWeights) -> None:
        super().__init__(masters.optimizer)
        self._masters = masters

    def step_of(self, batch: int) -> None:
        """Step with the weights' gradients of `batch`, which are not changed."""
        self._masters.take_gradients()
        super().step_of(batch)
        self._masters.write()

    def state_dict(self) -> dict[str, Any]:
        return self._masters.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._masters.load_state_dict(state)
