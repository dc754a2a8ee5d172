"""Where an optimizer will have taken its weights some steps ahead, judged by its state.

Problem: a forward at stale weights has a loss that the weights of its backward do not have. The gradients in between
are not known yet.

Solution: each step to come goes where the last one went. With direction d, learning rates l_1 ... l_h to come and
decoupled weight decay c, the steps w <- (1 - l_j c) w - l_j d come to

    w^ = w prod_j (1 - l_j c) - d sum_j l_j prod_{i>j} (1 - l_i c)

    SGD with momentum   d = v                             SpecTrain (Chen et al., 2018)
    Adam, AdamW         d = m^ / (sqrt(v^) + eps)         XPipe (Guan et al., 2019)

v is torch's momentum buffer: gradients that keep it as it is make steps of v with Nesterov's momentum, too, and
dampening and coupled weight decay are in it. m^ and v^ are Adam's moments, corrected for their bias; with amsgrad v^ is
the largest so far. What has no state yet stays where it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.runtime.contract.tensors import as_real
from megatron.pipeline.runtime.update.optimizer_stand_in import settings_of

_Rule = Callable[[Mapping[str, Any], Mapping[str, Any], Tensor], bool]


class WeightPredictor:
    """Predicts the weights of `optimizer`, whose learning rates `scheduler` sets; None: they stay.

    Raises:
        ValueError: an optimizer whose state does not say where its steps go.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, scheduler: Any = None) -> None:
        rule = _RULES.get(type(optimizer))
        if rule is None:
            raise ValueError(
                f"{type(optimizer).__name__} is not predicted: it keeps no mean of its gradients that says where its "
                "steps will go, or by a rule that is unknown here; use SGD with momentum, Adam or AdamW, or do without "
                "weight prediction"
            )
        if rule is _momentum and not all(group["momentum"] for group in optimizer.param_groups):
            raise ValueError(
                "SGD without momentum keeps nothing that says where its steps will go; give it a momentum, or do "
                "without weight prediction"
            )
        self._optimizer, self._scheduler, self._write_direction = optimizer, scheduler, rule

    @torch.no_grad()
    def predict(self, horizon: int, tensors: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Write where the next `horizon` steps lead.

        Args:
            horizon: steps, 1 and more.
            tensors: (a parameter, its weights now, what receives the prediction), of one shape and dtype.
        """
        rates = learning_rates_to_come(self._optimizer, self._scheduler, horizon)
        group_of = {
            parameter: (group, *_factors(group, own, type(self._optimizer)))
            for group, own in zip(self._optimizer.param_groups, rates, strict=True)
            for parameter in group["params"]
        }
        for parameter, weights, target in tensors:
            group, kept, moved = group_of.get(parameter, ({}, 1.0, 0.0))
            state = self._optimizer.state.get(parameter, {})
            if (kept, moved) == (1.0, 0.0) or not self._write_direction(group, state, target):
                target.copy_(weights)
            else:
                target.mul_(-moved).add_(weights, alpha=kept)


def _factors(group: Mapping[str, Any], rates: Iterable[float], kind: type) -> tuple[float, float]:
    """(of the weights, of the direction) in the formula above."""
    decoupled = group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
    decay = float(group["weight_decay"]) if decoupled else 0.0
    kept, moved = 1.0, 0.0
    for rate in rates:
        kept, moved = kept * (1.0 - rate * decay), moved * (1.0 - rate * decay) + rate
    return kept, moved


def _momentum(group: Mapping[str, Any], state: Mapping[str, Any], target: Tensor) -> bool:
    """Write the direction; False where there is none yet. So for Adam, too."""
    buffer = state.get("momentum_buffer")
    if buffer is None:
        return False
    target.copy_(buffer)
    return True


def _moments(group: Mapping[str, Any], state: Mapping[str, Any], target: Tensor) -> bool:
    if not state:
        return False
    num_steps = float(state["step"])
    first, second = (1.0 - float(beta) ** num_steps for beta in group["betas"])
    squares = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    target, mean, squares = as_real(target), as_real(state["exp_avg"]), as_real(squares)  # as torch steps complex ones
    torch.sqrt(squares, out=target)
    target.div_(second**0.5).add_(group["eps"])
    torch.div(mean, target, out=target)
    target.div_(first)
    return True


_RULES: Mapping[type, _Rule] = {
    torch.optim.SGD: _momentum,
    torch.optim.Adam: _moments,
    torch.optim.AdamW: _moments,
}


# --- the learning rates of the steps to come, asked of a scheduler that must not notice


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
        groups = SimpleNamespace(param_groups=[settings_of(group) for group in optimizer.param_groups], step=_no_step)
        groups._opt_called = True  # which a scheduler asks in order to warn
        ahead = copy.deepcopy(scheduler, {id(optimizer): groups})
        for _ in range(horizon - 1):
            ahead.step()
            rates.append(_rates(groups.param_groups))
    return tuple(zip(*rates, strict=True))


def _rates(groups: list[dict[str, Any]]) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in groups)


def _no_step() -> None:
    raise AssertionError("a scheduler does not step its optimizer")


_no_step._wrapped_by_lr_sched = True
