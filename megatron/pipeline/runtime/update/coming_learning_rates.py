"""The learning rates of the steps to come, asked of a scheduler that must not notice."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from megatron.pipeline.runtime.update.optimizer_stand_in import settings_of


def learning_rates_to_come(
    optimizer: torch.optim.Optimizer, scheduler: Any, horizon: int
) -> tuple[tuple[float, ...], ...]:
    """For each group of `optimizer`, the learning rates of its next `horizon` steps, the next one first.

    `scheduler`: a torch learning-rate scheduler over `optimizer` that steps behind each of its steps, or None. A copy
    of it steps ahead, over copies of what the groups say; so whatever it depends on but its own state and the groups
    has to be a function of the step.
    """
    rates = [_rates(optimizer.param_groups)]
    if scheduler is None:
        return tuple(zip(*rates * horizon, strict=True))
    if horizon > 1:
        groups = SimpleNamespace(param_groups=[settings_of(group) for group in optimizer.param_groups], step=_step)
        groups._opt_called = True  # which a scheduler asks in order to warn
        ahead = copy.deepcopy(scheduler, {id(optimizer): groups})
        for _ in range(horizon - 1):
            ahead.step()
            rates.append(_rates(groups.param_groups))
    return tuple(zip(*rates, strict=True))


def _rates(groups: list[dict[str, Any]]) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in groups)


def _step() -> None:
    raise AssertionError("a scheduler does not step its optimizer")


_step._wrapped_by_lr_sched = True
