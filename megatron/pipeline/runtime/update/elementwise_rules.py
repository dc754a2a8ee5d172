"""What the steps of torch's Adam, AdamW and SGD do to each element, with results in tensors of their own.

The operations of `torch.optim` in their order, so that results are the same bit for bit: for a block of one parameter,
which is what the optimizers do on a CPU to each parameter, and for many parameters at once by `torch._foreach_*`, which
is what they do on a CUDA device. Neither changes a parameter, a moment or a gradient. Everything is FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

BlockStep = Callable[..., None]
"""Called with three tensors of scratch, the tensor for the result, the parameter, its gradient and its moments: one
block of each, flat and of one size. The result may be the first of the scratch."""


class Rule(Protocol):
    """How an optimizer steps one of its groups, whose learning rate and other numbers are those of the making.

    `moments`: names of what it keeps for a parameter, each of the parameter's shape.
    """

    moments: tuple[str, ...]

    @staticmethod
    def covers(group: dict[str, Any]) -> bool:
        """Whether the options of the group are known here."""

    def block_step(self, state: dict[str, Any], factor: float | Tensor) -> BlockStep:
        """The next step of the parameter that has this state, with `factor` times the gradient."""

    def steps(self, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Any]]) -> list[Tensor]:
        """The next values of the parameters; `gradients` are scratch afterwards."""


class AdamRule:
    """Adam and AdamW, which differ by whether weight decay is `decoupled` where the group does not say."""

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, group: dict[str, Any], *, decoupled: bool) -> None:
        self._lr, self._eps, self._weight_decay = group["lr"], group["eps"], group["weight_decay"]
        self._beta1, self._beta2 = group["betas"]
        decoupled = group.get("decoupled_weight_decay", decoupled)  # AdamW has had the key since torch 2.7
        self._shrink = 1 - self._lr * self._weight_decay if decoupled and self._weight_decay else None
        self._penalty = None if decoupled or not self._weight_decay else self._weight_decay

    @staticmethod
    def covers(group: dict[str, Any]) -> bool:
        others = ("amsgrad", "maximize", "capturable", "differentiable", "fused")
        return _are_numbers(group["lr"], *group["betas"], group["eps"], group["weight_decay"]) and not any(
            group[option] for option in others
        )

    def _sizes(self, state: dict[str, Any]) -> tuple[float, float]:
        """The length of a parameter's next step, and the root of the bias of the second moment."""
        count = float(state["step"] + 1)
        return self._lr / (1 - self._beta1**count), (1 - self._beta2**count) ** 0.5

    def block_step(self, state: dict[str, Any], factor: float | Tensor) -> BlockStep:
        length, correction = self._sizes(state)
        scale, beta2, bias, eps = map(_scalar, (factor, self._beta2, correction, self._eps))
        shrink = None if self._shrink is None else _scalar(self._shrink)

        def step(scratch: list[Tensor], result: Tensor, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
            gradient, mean, size = scratch
            torch.mul(g, scale, out=gradient)
            if self._penalty is not None:
                gradient.add_(p, alpha=self._penalty)
            torch.lerp(m, gradient, 1 - self._beta1, out=mean)
            torch.mul(v, beta2, out=size).addcmul_(gradient, gradient, value=1 - self._beta2)
            size.sqrt_().div_(bias).add_(eps)
            start = p if shrink is None else torch.mul(p, shrink, out=result)
            torch.addcdiv(start, mean, size, value=-length, out=result)

        return step

    def steps(self, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Any]]) -> list[Tensor]:
        lengths, corrections = zip(*map(self._sizes, states), strict=True)
        if self._penalty is not None:
            torch._foreach_add_(gradients, parameters, alpha=self._penalty)
        means = torch._foreach_lerp([state["exp_avg"] for state in states], gradients, 1 - self._beta1)
        sizes = torch._foreach_mul([state["exp_avg_sq"] for state in states], self._beta2)
        torch._foreach_addcmul_(sizes, gradients, gradients, 1 - self._beta2)
        torch._foreach_sqrt_(sizes)
        torch._foreach_div_(sizes, list(corrections))
        torch._foreach_add_(sizes, self._eps)
        factors = [-length for length in lengths]
        if self._shrink is None:
            return torch._foreach_addcdiv(parameters, means, sizes, factors)
        values = torch._foreach_mul(parameters, self._shrink)
        torch._foreach_addcdiv_(values, means, sizes, factors)
        return values


class SgdRule:
    """SGD, with momentum or without."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._lr, self._weight_decay = group["lr"], group["weight_decay"]
        self._momentum, self._nesterov = group["momentum"], group["nesterov"]
        self._taken = 1 - group["dampening"]
        self.moments = ("momentum_buffer",) if self._momentum else ()

    @staticmethod
    def covers(group: dict[str, Any]) -> bool:
        numbers = (group["lr"], group["momentum"], group["dampening"], group["weight_decay"])
        return _are_numbers(*numbers) and not (group["maximize"] or group["differentiable"] or group["fused"])

    def block_step(self, state: dict[str, Any], factor: float | Tensor) -> BlockStep:
        scale, momentum = _scalar(factor), _scalar(self._momentum)

        def step(scratch: list[Tensor], result: Tensor, p: Tensor, g: Tensor, *moments: Tensor) -> None:
            gradient, mean, _ = scratch
            direction = torch.mul(g, scale, out=gradient)
            if self._weight_decay:
                gradient.add_(p, alpha=self._weight_decay)
            for moment in moments:
                torch.mul(moment, momentum, out=mean).add_(gradient, alpha=self._taken)
                direction = gradient.add_(mean, alpha=self._momentum) if self._nesterov else mean
            torch.add(p, direction, alpha=-self._lr, out=result)

        return step

    def steps(self, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Any]]) -> list[Tensor]:
        directions = gradients
        if self._weight_decay:
            torch._foreach_add_(gradients, parameters, alpha=self._weight_decay)
        for moment in self.moments:
            means = torch._foreach_mul([state[moment] for state in states], self._momentum)
            torch._foreach_add_(means, gradients, alpha=self._taken)
            if self._nesterov:
                torch._foreach_add_(gradients, means, alpha=self._momentum)
            else:
                directions = means
        return torch._foreach_add(parameters, directions, alpha=-self._lr)


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _scalar(value: float | Tensor) -> Tensor:
    """The value in a tensor: a number is wrapped anew in each call, which takes about as long as the call itself."""
    return value.float() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
