"""The steps of torch's Adam, AdamW and SGD in one pass that leaves parameters, moments and gradients as they are.

Problem: where `step` itself has to be called, its operands are copied first, since it writes into them. A prediction
wants the stepped weights alone.

Solution: the same operations in the same order, so the same bits, into other tensors. On a CPU block by block, so small
that what lies between the operations stays in the cache: memory is read for the parameter, the moments and the gradient
and written for the result. On a CUDA device launches are what to save, so `torch._foreach_*` takes many parameters at
once, as the optimizer does there. The rule of any other optimizer, and most options of these, are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.runtime.update.elementwise_rules import AdamRule, Rule, SgdRule

BLOCK = 2**16
"""Elements of a block, of each thread: three blocks of FP32 scratch and the operands fit into 2 MiB of cache."""


@dataclass(frozen=True)
class Operands:
    """One parameter to step; all tensors have its number of elements.

    `parameter`: one of the optimizer's, and `state` what that keeps for it. `gradient`: of any floating dtype; the step
    is taken with `factor` times it, a number or a scalar on the device. `target`: receives the stepped values, of
    any floating dtype.
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
"""By the exact type of an optimizer, since a subclass may step as it likes: its rule, and what that is made with."""


class ElementwiseStep:
    """Takes the next step of one group of an optimizer, whose learning rate and other numbers are as they are now."""

    def __init__(self, rule: Rule, *, on_cpu: bool) -> None:
        self._rule = rule
        self._on_cpu = on_cpu

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> ElementwiseStep | None:
        """None: the optimizer's rule is not known, or an option of the group, or a kind of its parameters."""
        rule, options = RULES.get(type(optimizer), (None, {}))
        if rule is None or not rule.covers(group):
            return None
        kinds = {(type(each) in _PLAIN, each.dtype, each.device.type) for each in group["params"]}
        if kinds == {(True, torch.float32, "cpu")}:
            return cls(rule(group, **options), on_cpu=True)
        if kinds == {(True, torch.float32, "cuda")} and group["foreach"] is not False:
            return cls(rule(group, **options), on_cpu=False)
        return None

    def can_take(self, each: Operands) -> bool:
        """Whether the state is there, which the first step makes, and tensors are laid out as for all others."""
        moments = [each.state.get(name) for name in self._rule.moments]
        return all(
            isinstance(moment, Tensor) and moment.dtype is torch.float32 and moment.shape == each.parameter.shape
            for moment in moments
        ) and all(tensor.is_contiguous() for tensor in (each.parameter, each.gradient, each.target, *moments))

    def take(self, chunk: list[Operands], where: list[Tensor | None]) -> None:
        """Write the stepped values of the parameters of a chunk into their targets.

        `where`: for each, a scalar on the device that says whether to step it; None: yes.
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
    """Each times its factor, in one launch for all that share one."""
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
    """The tensors block by block, flat."""
    return zip(*(tensor.view(-1).split(_block_size()) for tensor in tensors), strict=True)
