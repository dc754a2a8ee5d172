"""Optimizers around a torch optimizer: a stand-in with other parameters, gap-aware steps, FP32 masters.

`stand_in` makes an optimizer of the same type with other groups and another state. It steps by the rule of the original
optimizer, and neither hooks nor learning-rate schedules see the step.

`GapAware` (Barkai et al., 2020). A stale gradient was computed at weights that have been stepped since. Dividing the
gradient by the number of these steps shrinks it too much if the steps were small. So each element of a gradient is
divided by

    1 + |w - w_F| / C

w are the weights before the step, w_F the weights of the forward, predicted or not, and C is a running average of the
size of the element's steps. So the gap is measured in steps of average size. The real and the imaginary part of a
complex weight are two elements. A batch of several microbatches has the gap of its first microbatch, whose forward was
the furthest behind. If the forward has the weights of the backward, the step equals the optimizer's step bit for bit.

`MasterWeights` and `GapAwareMasters` (Micikevicius et al., 2018). BF16 has 8 significant bits, so a step below 1/512 of
a weight is rounded away, and so is a small change of a moment with a decay of 0.999. Therefore gradients are converted
to FP32, a torch optimizer steps FP32 masters with its state in FP32, and the masters are copied into the weights.
Masters are never read back from the weights, so a checkpoint must hold the masters. FP16 needs a loss scale as well
(`loss_scales`); the gradients are divided by it in FP32.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from megatron.pipeline.runtime.contract.tensors import as_real

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_THE_INSTANCE = ("step", "state", "param_groups", *HOOKS)
"""The attributes that a stand-in does not copy. `step` is included because a scheduler sets it on the instance."""


def stand_in(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    *,
    shares_tables: bool,
) -> torch.optim.Optimizer:
    """An optimizer of the same type with these groups, this state and no hooks.

    `shares_tables`: the stand-in has the other dicts and lists of `optimizer` itself, not copies of them.
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
    """Run the step of a stand-in, without torch's global optimizer hooks."""
    step = type(optimizer).step
    if hasattr(step, "hooked"):  # torch's wrapper, which calls the hooks of all optimizers
        step = step.__wrapped__
    step(optimizer)


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a call of `step` runs more than the optimizer's own rule: a hook, or another `step` on the instance.

    A learning-rate scheduler puts a `step` on the instance that notes the call (`note_step`). Such a `step` does not
    count.
    """
    hooks = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks, *(getattr(optimizer, each) for each in HOOKS))
    step = vars(optimizer).get("step")
    is_other = step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step
    return any(hooks) or is_other


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark the optimizer as stepped. Learning-rate schedules warn if they advance before the first step."""
    optimizer._opt_called = True


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the options of a group, without its parameters."""
    options = list(group.items())  # at once: another thread's step may add a counter meanwhile
    return {key: copied(value) for key, value in options if key != "params"}


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


SMOOTHING = 0.99
"""The weight of the old value when a step updates the running average."""

_AVERAGE = "step_average"


class _Wrapper:
    """An optimizer around `optimizer`, with the same groups."""

    optimizer: torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _parameters(self) -> Iterator[Tensor]:
        return (each for group in self.param_groups for each in group["params"])


class GapAware(_Wrapper):
    """Gap-aware steps of `optimizer`. Schedulers and predictors get `optimizer` itself.

    The running average is in the optimizer's state, so that a checkpoint has it. More memory is needed for a copy of
    the parameters per batch between `remember` and its step, and for another copy during a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._weights_of_forward: dict[int, dict[Tensor, Tensor]] = {}  # by batch

    @torch.no_grad()
    def remember(self, batch: int) -> None:
        """Store a copy of the shown weights as the weights of the forward of `batch`.

        Without this call, `step_of` assumes that the forward had the weights that the step changes.
        """
        self._weights_of_forward[batch] = {each: each.detach().clone() for each in self._parameters()}

    @torch.no_grad()
    def step_of(self, batch: int) -> None:
        """Step with the gradients of `batch`. Divides the gradients in place."""
        for parameter, before in self._weights_of_forward.pop(batch, {}).items():
            average = self.optimizer.state.get(parameter, {}).get(_AVERAGE)
            if parameter.grad is not None and average is not None:
                gap = as_real(before.sub_(parameter)).abs_().div_(average)
                gap.masked_fill_(average == 0, 0.0)  # the element has not moved in any step
                as_real(parameter.grad).div_(gap.add_(1.0))
        stepped = {each: each.detach().clone() for each in self._parameters() if each.grad is not None}
        self.optimizer.step()
        for parameter, before in stepped.items():
            size = as_real(before.sub_(parameter)).abs_()
            state = self.optimizer.state[parameter]  # the optimizer's step has filled it
            if _AVERAGE in state:
                state[_AVERAGE].lerp_(size, 1.0 - SMOOTHING)
            else:
                state[_AVERAGE] = size

    # --- the interface of the optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class MasterWeights(_Wrapper):
    """Steps `optimizer`, whose parameters are FP32 masters of the weights. Schedulers get `optimizer` itself.

    Each step reads ``grad`` of the weights and writes the rounded masters into the weights. The weights must equal the
    rounded masters at first, also after a checkpoint was loaded. A step needs memory for one more FP32 number per
    element, for the gradient.

    Args:
        optimizer: an optimizer over the masters and no other parameters.
        weight_of: master -> weight of the same shape.

    Attributes:
        factor: multiplies the gradients of the next step, in FP32.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, weight_of: Mapping[Tensor, Tensor]) -> None:
        self.optimizer = optimizer
        self.weight_of = dict(weight_of)
        self.factor = 1.0
        assert set(self._parameters()) == set(self.weight_of), (
            "the optimizer is over the masters, and over nothing else"
        )

    @torch.no_grad()
    def step(self) -> None:
        """Step the masters with the weights' gradients, and write the weights."""
        self.take_gradients()
        self.optimizer.step()
        self.write()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Copy the gradients of the weights to the masters, in FP32. A weight without a gradient is not stepped."""
        for master, weight in self.weight_of.items():
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype, copy=True)
            if master.grad is not None and self.factor != 1.0:
                master.grad.mul_(self.factor)

    @torch.no_grad()
    def write(self) -> None:
        """Write the rounded masters into the weights, and drop the masters' gradients."""
        for master, weight in self.weight_of.items():
            weight.copy_(master)
            master.grad = None

    # --- the interface of the optimizer

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, and the masters in the order of its parameters."""
        return {"optimizer": self.optimizer.state_dict(), "masters": [each.detach() for each in self._parameters()]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            ValueError: the masters differ in number or shape.
        """
        own, given = list(self._parameters()), state.get("masters", ())
        if [each.shape for each in own] != [each.shape for each in given]:
            raise ValueError(
                f"the checkpoint has {len(given)} FP32 masters, which are not the {len(own)} of these weights; go on "
                "with the precision and the model that it was made with"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        for master, value in zip(own, given, strict=True):
            master.copy_(value)


class GapAwareMasters(GapAware):
    """`GapAware` over masters. The gap is the change of the masters since the forward, since weights are too coarse.

    Not for predicted weights: the forward is assumed to have used the rounded masters.
    """

    def __init__(self, masters: MasterWeights) -> None:
        super().__init__(masters.optimizer)
        self._masters = masters

    def step_of(self, batch: int) -> None:
        """Step with the gradients of the weights, which belong to `batch`. The gradients are not changed."""
        self._masters.take_gradients()
        super().step_of(batch)
        self._masters.write()

    def state_dict(self) -> dict[str, Any]:
        return self._masters.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._masters.load_state_dict(state)
