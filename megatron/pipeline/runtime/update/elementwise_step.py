"""The steps of torch's Adam, AdamW and SGD in one pass that leaves parameters, moments and gradients unchanged.

Problem: an optimizer's own `step` writes into its operands. A prediction needs only the stepped weights, but it would
have to copy all operands first.

Solution: run the operations of `torch.optim` in the same order and write the results into other tensors, which gives
the same bits. On a CPU the pass goes through each parameter in blocks that are so small that intermediate results stay
in the cache. On a CUDA device `torch._foreach_*` takes many parameters in one launch, as the optimizers do there. All
arithmetic is FP32. Other optimizers, and most options of these three, are not supported.

Where the optimizer's own step is due just before (`DueStep`), the pass on a CPU takes it too: of each block first the
true step, in place, then the other one. So the operands are read from memory once for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.pipeline.runtime.update.muon import Muon

BlockStep = Callable[..., None]
"""A step of one block. The arguments are a list of three scratch tensors, a list of the tensors for the new parameter
and the new moments, the parameter, its gradient and its moments, all flat FP32 tensors of one size. The results may be
the operands, for a step in place, or the scratch tensors in their order."""


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

    def count(self, state: dict[str, Any]) -> None:
        """Count a step of a parameter in its state, as the optimizer does."""

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
        is_scaled = isinstance(factor, Tensor) or factor != 1.0

        def step(scratch: list[Tensor], results: list[Tensor], p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
            gradient, _, size = scratch
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


BLOCK = 2**17
"""Elements of a block per thread. Nine FP32 blocks, of which three are scratch, take 4.5 MiB, which a core's share of a
third-level cache holds. Smaller blocks are slower, although they fit into the second level: a call of torch takes a
microsecond."""


@dataclass(frozen=True)
class Operands:
    """One parameter to step; the other tensors have as many elements.

    Attributes:
        parameter: a parameter of the optimizer.
        gradient: of any floating dtype; the step uses `factor` times the gradient.
        factor: a number or a scalar tensor on the device.
        state: the optimizer's state of the parameter.
        target: receives the stepped values; of any floating dtype.
        due: the optimizer's own step of the parameter, to be taken before this one; None: it has been taken.
    """

    parameter: Tensor
    gradient: Tensor
    factor: float | Tensor
    state: dict[str, Any]
    target: Tensor
    due: DueStep | None = None


@dataclass(frozen=True)
class DueStep:
    """The optimizer's own step of one parameter, not taken yet. It is taken in place.

    Attributes:
        rule: of the parameter's group at the time when the step became due.
        operands: the parameter is the target.
    """

    rule: Rule
    operands: Operands

    def take(self) -> None:
        """Step the parameter and its moments in place, and count the step."""
        scratch = _scratch()
        step, tensors = self.begin()
        for p, *others in _blocks(*tensors):
            step(_parts(scratch, len(p)), [p, *others[1:]], p, *others)

    def begin(self) -> tuple[BlockStep, list[Tensor]]:
        """Count the step. Return the step of a block, and the parameter, its gradient and its moments."""
        step = self.rule.block_step(self.operands.state, self.operands.factor)
        self.rule.count(self.operands.state)
        return step, _tensors(self.rule, self.operands)


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

    def due(self, parameter: Tensor, gradient: Tensor, factor: float, state: dict[str, Any]) -> DueStep | None:
        """The optimizer's own step with `factor` times the gradient, to be taken in blocks; None if it cannot be."""
        operands = Operands(parameter, gradient, factor, state, target=parameter)
        is_known = self._on_cpu and gradient.dtype is torch.float32 and self.can_take(operands)
        return DueStep(self._rule, operands) if is_known else None

    def can_take(self, each: Operands) -> bool:
        """Whether the state has FP32 moments (the optimizer's first step makes them) and all tensors are contiguous."""
        moments = [each.state.get(name) for name in self._rule.moments]
        return all(
            isinstance(moment, Tensor) and moment.dtype is torch.float32 and moment.shape == each.parameter.shape
            for moment in moments
        ) and all(tensor.is_contiguous() for tensor in (each.parameter, each.gradient, each.target, *moments))

    def take(self, chunk: list[Operands], where: list[Tensor | None]) -> None:
        """Write the stepped values of the parameters of a chunk into their targets, after the steps that are due.

        `where` has for each parameter a bool scalar tensor on the device, whether to step it, or None: step it.
        """
        if not self._on_cpu:
            self._take_at_once(chunk, where)
            return
        scratch = _scratch()
        for each, steps in zip(chunk, where, strict=True):
            self._take_in_blocks(each, steps, scratch)

    def _take_in_blocks(self, each: Operands, steps: Tensor | None, scratch: list[Tensor]) -> None:
        take_due, operands_of_due = each.due.begin() if each.due is not None else (None, [])
        step = self._rule.block_step(each.state, each.factor)
        operands = _tensors(self._rule, each)
        is_direct = each.target.dtype is torch.float32 and steps is None
        for target, *tensors in _blocks(each.target, *operands, *operands_of_due):
            (p, g, *moments), of_due = tensors[: len(operands)], tensors[len(operands) :]
            parts = _parts(scratch, len(p))
            if take_due is not None:
                take_due(parts, [p, *of_due[2:]], *of_due)
            result = target if is_direct else parts[0]
            step(parts, [result, *parts[1:]], p, g if g.dtype is torch.float32 else g.float(), *moments)
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


def _tensors(rule: Rule, each: Operands) -> list[Tensor]:
    return [each.parameter, each.gradient, *(each.state[name] for name in rule.moments)]


def _scratch() -> list[Tensor]:
    return [torch.empty(_block_size(), dtype=torch.float32) for _ in range(3)]


def _parts(scratch: list[Tensor], size: int) -> list[Tensor]:
    """The scratch tensors for a block of this size."""
    return scratch if size == len(scratch[0]) else [tensor[:size] for tensor in scratch]


def _block_size() -> int:
    return BLOCK * torch.get_num_threads()


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat blocks of the tensors: first the first block of each tensor, then the second block of each, and so on."""
    return zip(*(tensor.view(-1).split(_block_size()) for tensor in tensors), strict=True)
