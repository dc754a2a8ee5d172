"""A copy of what an optimizer's step changes, from which the step can be undone exactly.

A step that was taken before the norm of all gradients was known may turn out to be wrong. The inverse formula would
round differently, and cannot recover values from results that are not finite. So a rank copies weights, masters and
moments before such a step, and copies them back to undo it. The memory of the copy is allocated once and then reused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_Place = tuple[Any, ...]


class KeptState:
    """A copy of everything that a step changes on one rank.

    Args:
        parameters: the parameters of the model.
        optimizers: the optimizers of these parameters; their groups may have masters in place of the parameters.
        others: further objects whose attributes a step replaces: numbers, tensors, and dictionaries of these.
    """

    def __init__(
        self, parameters: Iterable[Parameter], optimizers: Sequence[torch.optim.Optimizer], others: Sequence[Any]
    ) -> None:
        self._parameters, self._optimizers = list(parameters), list(optimizers)
        self._others = [each for each in others if each is not None]
        self._copies: dict[_Place, Tensor] = {}  # kept from step to step
        self._taken: dict[_Place, Tensor] = {}  # the tensors that the last `take` copied
        self._numbers: list[dict[str, Any]] = []

    @torch.no_grad()
    def take(self) -> None:
        """Copy the state as it is now."""
        self._taken = self._tensors()
        for place, tensor in self._taken.items():
            if place not in self._copies:
                self._copies[place] = torch.empty_like(tensor)
            self._copies[place].copy_(tensor)
        self._numbers = [_attributes(each) for each in (*self._groups(), *self._others)]

    @torch.no_grad()
    def restore(self) -> None:
        """Bring back the state of the last copy."""
        for place, tensor in self._tensors().items():
            if place in self._taken:
                tensor.copy_(self._copies[place])
        for optimizer in self._optimizers:
            self._forget_new_state(optimizer)
        for each, numbers in zip((*self._groups(), *self._others), self._numbers, strict=True):
            (each if isinstance(each, dict) else vars(each)).update(copy.deepcopy(numbers))

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _tensors(self) -> dict[_Place, Tensor]:
        """Place -> tensor that a step changes in place."""
        tensors: dict[_Place, Tensor] = {(parameter,): parameter.data for parameter in self._parameters}
        for optimizer in self._optimizers:
            for parameter in _stepped(optimizer):
                tensors.setdefault((parameter,), parameter.data)
                for name, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        tensors[parameter, name] = value
        return tensors

    def _forget_new_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the state that an optimizer has made in its first step. Later steps only change it."""
        for parameter in _stepped(optimizer):
            state = optimizer.state.get(parameter, {})
            if any((parameter, name) not in self._taken for name, value in state.items() if isinstance(value, Tensor)):
                del optimizer.state[parameter]


def _stepped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _attributes(owner: Any) -> dict[str, Any]:
    """A copy of the numbers, the tensors and the dictionaries of numbers among the attributes or entries of `owner`."""
    values = owner if isinstance(owner, dict) else vars(owner)
    return {name: copy.deepcopy(value) for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(each, int | float) for each in value.values())
    return isinstance(value, int | float | Tensor)
