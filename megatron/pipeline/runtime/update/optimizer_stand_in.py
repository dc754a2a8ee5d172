"""A stand-in for an optimizer, which has other parameters, or some of them: it computes what the optimizer's own `step`
computes, and neither hooks nor learning-rate schedules see it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_THE_INSTANCE = ("step", "state", "param_groups", *HOOKS)
"""What a stand-in does not share; a learning-rate schedule replaces `step` of the one optimizer that it is for."""


def stand_in(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    *,
    shares_tables: bool,
) -> torch.optim.Optimizer:
    """An optimizer of the same kind with these groups and this state.

    `shares_tables`: what the optimizer keeps beside its state is its own, too, and not a copy.
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
    """The own step of a stand-in."""
    step = type(optimizer).step
    if hasattr(step, "hooked"):  # torch's wrapper, which calls the hooks of all optimizers
        step = step.__wrapped__
    step(optimizer)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what a group says beside its parameters."""
    said = list(group.items())  # at once: another thread's step may add a counter meanwhile
    return {key: copied(value) for key, value in said if key != "params"}


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
