"""The steps of torch's Adam, AdamW and SGD, for one block of a parameter.

A rule runs the operations of `torch.optim` in the same order and may write the results into other tensors than the
operands. An optimizer with `fused=True` has torch's fused kernel, which works in place, on copies of the operands. Both
have the bits of the optimizer's own step, if blocks begin at multiples of 16 elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

BlockStep = Callable[..., None]
"""A step of one block. The arguments are a list of four scratch tensors, a list of the tensors for the new parameter
and the new moments, the parameter, its gradient and its moments, all flat FP32 tensors of one size. The results may be
the operands, for a step in place, or the first scratch tensors in their order."""


class Rule(Protocol):
    """The step of one group of an optimizer, with the learning rate and the options that the group has at construction.

    Attributes:
        moments: names of the state tensors that the step reads, each of the parameter's shape.
        kernel: the name of the rule for `triton_step`.
    """

    moments: tuple[str, ...]
    kernel: str

    @staticmethod
    def covers(group: dict[str, Any]) -> bool:
        """Whether the rule supports the options of the group, on the devices of its parameters."""

    def block_step(self, state: dict[str, Any], factor: float | Tensor) -> BlockStep:
        """The next step of a parameter with this state; the step uses `factor` times the gradient."""

    def count(self, state: dict[str, Any]) -> None:
        """Count a step of a parameter in its state, as the optimizer does."""

    def numbers(self, state: dict[str, Any]) -> tuple[float, ...]:
        """The numbers of the next step of a parameter with this state for `triton_step`."""


class AdamRule:
    """Adam and AdamW. `decoupled`: whether weight decay is decoupled if the group has no option for it."""

    moments = ("exp_avg", "exp_avg_sq")
    kernel = "adam"

    def __init__(self, group: dict[str, Any], *, decoupled: bool) -> None:
        self._lr, self._eps, self._weight_decay = group["lr"], group["eps"], group["weight_decay"]
        self._beta1, self._beta2 = group["betas"]
        self._decoupled = group.get("decoupled_weight_decay", decoupled)  # AdamW has had the key since torch 2.7
        self._shrink = 1 - self._lr * self._weight_decay if self._decoupled and self._weight_decay else None
        self._penalty = None if self._decoupled or not self._weight_decay else self._weight_decay

    @staticmethod
    def covers(group: dict[str, Any]) -> bool:
        return _is_plain_adam(group) and not group["fused"]

    def _sizes(self, state: dict[str, Any]) -> tuple[float, float]:
        """lr / (1 - beta1^t) and sqrt(1 - beta2^t) for the next step t of a parameter."""
        count = float(state["step"] + 1)
        return self._lr / (1 - self._beta1**count), (1 - self._beta2**count) ** 0.5

    def block_step(self, state: dict[str, Any], factor: float | Tensor) -> BlockStep:
        length, correction = self._sizes(state)
        scale, beta2, bias, eps = map(_scalar, (factor, self._beta2, correction, self._eps))
        shrink = None if self._shrink is None else _scalar(self._shrink)
        is_scaled = isinstance(factor, Tensor) or factor != 1.0

        def step(scratch: list[Tensor], results: list[Tensor], p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
            gradient, _, size, _ = scratch
            result, mean, square = results
            if is_scaled:
                g = torch.mul(g, scale, out=gradient)
            if self._penalty is not None:
                g = torch.add(g, p, alpha=self._penalty, out=gradient)
            torch.lerp(m, g, 1 - self._beta1, out=mean)
            torch.mul(v, beta2, out=square).addcmul_(g, g, value=1 - self._beta2)
            torch.sqrt(square, out=size).div_(bias).add_(eps)
            start = p if shrink is None else torch.mul(p, shrink, out=result)
            torch.addcdiv(start, mean, size, value=-length, out=result)

        return step

    def count(self, state: dict[str, Any]) -> None:
        state["step"] += 1

    def numbers(self, state: dict[str, Any]) -> tuple[float, ...]:
        length, correction = self._sizes(state)
        kept = 1.0 if self._shrink is None else self._shrink
        return (
            self._penalty or 0.0, kept, 1 - self._beta1, self._beta2, 1 - self._beta2, correction, self._eps, -length,
        )  # fmt: skip


class FusedAdamRule(AdamRule):
    """Adam and AdamW with `fused=True`, on a CPU."""

    @staticmethod
    def covers(group: dict[str, Any]) -> bool:
        return _is_plain_adam(group) and _is_fused_on_cpu(group)

    def block_step(self, state: dict[str, Any], factor: float | Tensor) -> BlockStep:
        kernel = torch._fused_adamw_ if self._decoupled else torch._fused_adam_
        count, scale = _scalar(state["step"] + 1), _scalar(factor)
        is_scaled = isinstance(factor, Tensor) or factor != 1.0

        def step(scratch: list[Tensor], results: list[Tensor], p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
            if is_scaled:
                g = torch.mul(g, scale, out=scratch[3])
            result, mean, square = _copied(results, p, m, v)
            kernel(
                [result], [g], [mean], [square], [], [count], lr=self._lr, beta1=self._beta1, beta2=self._beta2,
                weight_decay=self._weight_decay, eps=self._eps, amsgrad=False, maximize=False,
            )  # fmt: skip

        return step


class SgdRule:
    """SGD, with momentum or without."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._lr, self._weight_decay = group["lr"], group["weight_decay"]
        self._momentum, self._nesterov = group["momentum"], group["nesterov"]
        self._dampening, self._taken = group["dampening"], 1 - group["dampening"]
        self.moments = ("momentum_buffer",) if self._momentum else ()
        self.kernel = ("nesterov" if self._nesterov else "momentum") if self._momentum else "sgd"

    @staticmethod
    def covers(group: dict[str, Any]) -> bool:
        return _is_plain_sgd(group) and not group["fused"]

    def block_step(self, state: dict[str, Any], factor: float | Tensor) -> BlockStep:
        scale, momentum = _scalar(factor), _scalar(self._momentum)
        is_scaled = isinstance(factor, Tensor) or factor != 1.0

        def step(scratch: list[Tensor], results: list[Tensor], p: Tensor, g: Tensor, *moments: Tensor) -> None:
            gradient = scratch[0]
            result, *means = results
            if is_scaled:
                g = torch.mul(g, scale, out=gradient)
            if self._weight_decay:
                g = torch.add(g, p, alpha=self._weight_decay, out=gradient)
            for moment, mean in zip(moments, means, strict=False):
                torch.mul(moment, momentum, out=mean).add_(g, alpha=self._taken)
                g = torch.add(g, mean, alpha=self._momentum, out=gradient) if self._nesterov else mean
            torch.add(p, g, alpha=-self._lr, out=result)

        return step

    def count(self, state: dict[str, Any]) -> None:
        """Do nothing: SGD counts no steps."""

    def numbers(self, state: dict[str, Any]) -> tuple[float, ...]:
        return self._weight_decay, self._momentum, self._taken, -self._lr


class FusedSgdRule(SgdRule):
    """SGD with `fused=True`, on a CPU."""

    @staticmethod
    def covers(group: dict[str, Any]) -> bool:
        return _is_plain_sgd(group) and _is_fused_on_cpu(group)

    def block_step(self, state: dict[str, Any], factor: float | Tensor) -> BlockStep:
        scale = _scalar(factor)
        is_scaled = isinstance(factor, Tensor) or factor != 1.0

        def step(scratch: list[Tensor], results: list[Tensor], p: Tensor, g: Tensor, *moments: Tensor) -> None:
            if is_scaled:
                g = torch.mul(g, scale, out=scratch[3])
            result, *means = _copied(results, p, *moments)
            torch._fused_sgd_(
                [result], [g], means, weight_decay=self._weight_decay, momentum=self._momentum, lr=self._lr,
                dampening=self._dampening, nesterov=self._nesterov, maximize=False, is_first_step=False,
            )  # fmt: skip

        return step


def _is_plain_adam(group: dict[str, Any]) -> bool:
    others = ("amsgrad", "maximize", "capturable", "differentiable")
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    return _are_numbers(*numbers) and not any(group[option] for option in others)


def _is_plain_sgd(group: dict[str, Any]) -> bool:
    numbers = (group["lr"], group["momentum"], group["dampening"], group["weight_decay"])
    return _are_numbers(*numbers) and not (group["maximize"] or group["differentiable"])


def _is_fused_on_cpu(group: dict[str, Any]) -> bool:
    return bool(group["fused"]) and all(each.device.type == "cpu" for each in group["params"])


def _copied(results: list[Tensor], *operands: Tensor) -> list[Tensor]:
    """The results with the values of the operands, for a kernel that works in place."""
    pairs = [*zip(results[: len(operands)], operands, strict=True)]
    return [operand if result is operand else result.copy_(operand) for result, operand in pairs]


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _scalar(value: float | Tensor) -> Tensor:
    """The value as an FP32 scalar tensor. torch would wrap a number in every call, which takes as long as the call."""
    return value.float() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)


RULES: dict[type[torch.optim.Optimizer], tuple[tuple[type[Rule], ...], dict[str, Any]]] = {
    torch.optim.Adam: ((AdamRule, FusedAdamRule), {"decoupled": False}),
    torch.optim.AdamW: ((AdamRule, FusedAdamRule), {"decoupled": True}),
    torch.optim.SGD: ((SgdRule, FusedSgdRule), {}),
}
"""The exact type of an optimizer -> its rules and their arguments. A subclass may step in another way."""
