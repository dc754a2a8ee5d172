"""The steps of torch's Adam, AdamW and SGD in one pass that leaves parameters, moments and gradients unchanged.

Problem: an optimizer's own `step` writes into its operands. A prediction needs only the stepped weights, but it would
have to copy all operands first.

Solution: run the operations of `torch.optim` in the same order and write the results into other tensors, which gives
the same bits. On a CPU the pass goes through each parameter in blocks that are so small that intermediate results stay
in the cache. On a CUDA device `torch._foreach_*` takes many parameters in one launch, as the optimizers do there. All
arithmetic is FP32. Other optimizers, and most options of these three, are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.pipeline.runtime.update.muon import Muon

BlockStep = Callable[..., None]
"""A step of one block. The arguments are a list of three scratch tensors, the tensor for the result, the parameter, its
gradient and its moments, all flat FP32 tensors of one size. The result may be the first scratch tensor."""


class Rule(Protocol):
    """The step of one group of an optimizer, with the learning rate and the options that the group has at construction.

    Attributes:
        moments: names of the state tensors that the step reads, each of the parameter's shape.
    """

    moments: tuple[str, ...]

    @staticmethod
    def covers(group: dict[str, Any]) -> bool:
        """Whether the rule supports the options of the group."""

    def block_step(self, state: dict[str, Any], factor: float | Tensor) -> BlockStep:
        """The next step of a parameter with this state; the step uses `factor` times the gradient."""

    def steps(self, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Any]]) -> list[Tensor]:
        """The values of the parameters after the step. The tensors in `gradients` may be overwritten."""


class AdamRule:
    """Adam and AdamW. `decoupled`: whether weight decay is decoupled if the group has no option for it."""

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
        """lr / (1 - beta1^t) and sqrt(1 - beta2^t) for the next step t of a parameter."""
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
    """The value as an FP32 scalar tensor. torch would wrap a number in every call, which takes as long as the call."""
    return value.float() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)


BLOCK = 2**16
"""Elements of a block per thread. Three FP32 scratch blocks and the operands fit into 2 MiB of cache."""


@dataclass(frozen=True)
class Operands:
    """One parameter to step; the other tensors have as many elements.

    Attributes:
        parameter: a parameter of the optimizer.
        gradient: of any floating dtype; the step uses `factor` times the gradient.
        factor: a number or a scalar tensor on the device.
        state: the optimizer's state of the parameter.
        target: receives the stepped values; of any floating dtype.
    """

    parameter: Tensor
    gradient: Tensor
    factor: float | Tensor
    state: dict[str, Any]
    target: Tensor


RULES: dict[type[torch.optim.Optimizer], tuple[type[Rule], dict[str, Any]]] = {
    torch.optim.Adam: (AdamRule, {"decoupled": False}),
    torch.optim.AdamW: (AdamRule, {"decoupled": True}),
    torch.optim.SGD: (SgdRule, {}),
}
"""The exact type of an optimizer -> its rule and the arguments of the rule. A subclass may step in another way."""


class ElementwiseStep:
    """Takes the next step of the parameters of one group of an optimizer.

    Args:
        rule: the rule of the group.
        on_cpu: step in blocks; else all parameters of a chunk at once.
    """

    def __init__(self, rule: Rule, *, on_cpu: bool) -> None:
        self._rule = rule
        self._on_cpu = on_cpu

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> ElementwiseStep | None:
        """The step of a group; None if the optimizer, an option, or a parameter's type or device is not supported."""
        is_adamws = isinstance(optimizer, Muon) and group["muon"] is None
        rule, options = RULES.get(torch.optim.AdamW if is_adamws else type(optimizer), (None, {}))
        if rule is None or not rule.covers(group):
            return None
        kinds = {(type(each) in _PLAIN, each.dtype, each.device.type) for each in group["params"]}
        if kinds == {(True, torch.float32, "cpu")}:
            return cls(rule(group, **options), on_cpu=True)
        if kinds == {(True, torch.float32, "cuda")} and group["foreach"] is not False:
            return cls(rule(group, **options), on_cpu=False)
        return None

    def can_take(self, each: Operands) -> bool:
        """Whether the state has FP32 moments (the optimizer's first step makes them) and all tensors are contiguous."""
        moments = [each.state.get(name) for name in self._rule.moments]
        return all(
            isinstance(moment, Tensor) and moment.dtype is torch.float32 and moment.shape == each.parameter.shape
            for moment in moments
        ) and all(tensor.is_contiguous() for tensor in (each.parameter, each.gradient, each.target, *moments))

    def take(self, chunk: list[Operands], where: list[Tensor | None]) -> None:
        """Write the stepped values of the parameters of a chunk into their targets.

        `where` has for each parameter a bool scalar tensor on the device, whether to step it, or None: step it.
        """
        if not self._on_cpu:
            self._take_at_once(chunk, where)
            return
        scratch = [torch.empty(_block_size(), dtype=torch.float32) for _ in range(3)]
        for each, steps in zip(chunk, where, strict=True):
            self._take_in_blocks(each, steps, scratch)

    def _take_in_blocks(self, each: Operands, steps: Tensor | None, scratch: list[Tensor]) -> None:
        step = self._rule.block_step(each.state, each.factor)
        tensors = (each.parameter, each.gradient, *(each.state[name] for name in self._rule.moments))
        is_direct = each.target.dtype is torch.float32 and steps is None
        for target, p, g, *moments in _blocks(each.target, *tensors):
            parts = scratch if len(p) == len(scratch[0]) else [tensor[: len(p)] for tensor in scratch]
            result = target if is_direct else parts[0]
            step(parts, result, p, g if g.dtype is torch.float32 else g.float(), *moments)
            if not is_direct:
                target.copy_(result if steps is None else torch.where(steps, result, p))

    def _take_at_once(self, chunk: list[Operands], where: list[Tensor | None]) -> None:
        parameters = [each.parameter for each in chunk]
        gradients = [each.gradient.float().view_as(each.parameter) for each in chunk]
        gradients = _multiplied(gradients, [each.factor for each in chunk])
        values = self._rule.steps(parameters, gradients, [each.state for each in chunk])
        for each, value, steps in zip(chunk, values, where, strict=True):
            each.target.view_as(value).copy_(value if steps is None else torch.where(steps, value, each.parameter))


_PLAIN = (Tensor, torch.nn.Parameter)


def _multiplied(gradients: list[Tensor], factors: list[float | Tensor]) -> list[Tensor]:
    """Each tensor times its factor, with one launch for all tensors that have the same factor."""
    result = list(gradients)
    for factor in {id(factor): factor for factor in factors}.values():
        places = [place for place, each in enumerate(factors) if each is factor]
        scale = factor.float() if isinstance(factor, Tensor) else factor
        products = torch._foreach_mul([gradients[place] for place in places], scale)
        for place, product in zip(places, products, strict=True):
            result[place] = product
    return result


def _block_size() -> int:
    return BLOCK * torch.get_num_threads()


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat blocks of the tensors: first the first block of each tensor, then the second block of each, and so on."""
    return zip(*(tensor.view(-1).split(_block_size()) for tensor in tensors), strict=True)
