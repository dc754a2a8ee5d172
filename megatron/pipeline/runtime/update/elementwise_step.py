"""The steps of torch's Adam, AdamW and SGD in one pass that leaves parameters, moments and gradients unchanged.

Problem: an optimizer's own `step` writes into its operands. A prediction needs only the stepped weights, but it would
have to copy all operands first.

Solution: run the operations of `torch.optim` in the same order and write the results into other tensors. On a CPU the
pass goes through each parameter in blocks that are so small that intermediate results stay in the cache, and has the
bits of torch; an optimizer with `fused=True` has torch's fused kernel step each block. On a CUDA device the pass is a
Triton kernel (`triton_step`). All arithmetic is FP32. Other optimizers, and most options of these three, are not
supported.

Where the optimizer's own step is due just before (`DueStep`), the pass takes it too: of each block first the true step,
in place, then the other one. So the operands are read from memory once for both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.runtime.update.elementwise_rules import RULES, BlockStep, Rule
from megatron.pipeline.runtime.update.muon import Muon

logger = logging.getLogger(__name__)

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

    def begin(self) -> tuple[BlockStep, list[Tensor]]:
        """Count the step. Return the step of a block, and the parameter, its gradient and its moments."""
        step = self.rule.block_step(self.operands.state, self.operands.factor)
        self.rule.count(self.operands.state)
        return step, _tensors(self.rule, self.operands)


class ElementwiseStep:
    """Takes the next step of the parameters of one group of an optimizer. This class does so on a CPU, in blocks.

    Attributes:
        takes_all: take the optimizer's own steps also where no prediction follows, so that the bits of a step do not
            depend on that. For a pass that rounds in other places than torch's kernels.
    """

    takes_all = False

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> ElementwiseStep | None:
        """The step of a group; None if the optimizer, an option, or a parameter's type or device is not supported."""
        is_adamws = isinstance(optimizer, Muon) and group["muon"] is None
        rules, options = RULES.get(torch.optim.AdamW if is_adamws else type(optimizer), ((), {}))
        rule = next((rule for rule in rules if rule.covers(group)), None)
        if rule is None:
            return None
        kinds = {(type(each) in _PLAIN, each.dtype, each.device.type) for each in group["params"]}
        [device] = [device for device in PASSES if kinds == {(True, torch.float32, device)}] or [None]
        takes = device and PASSES[device]()
        return takes and takes(rule(group, **options))

    def due(self, parameter: Tensor, gradient: Tensor, factor: float, state: dict[str, Any]) -> DueStep | None:
        """Return the optimizer's own step with `factor` times the gradient, for a later pass to take.

        None if no pass can take it: the gradient is not FP32, or `can_take` is False.
        """
        operands = Operands(parameter, gradient, factor, state, target=parameter)
        is_known = gradient.dtype is torch.float32 and self.can_take(operands)
        return DueStep(self._rule, operands) if is_known else None

    def can_take(self, each: Operands) -> bool:
        """Whether the state has FP32 moments (the optimizer's first step makes them) and all tensors are contiguous."""
        moments = [each.state.get(name) for name in self._rule.moments]
        return all(
            isinstance(moment, Tensor) and moment.dtype is torch.float32 and moment.shape == each.parameter.shape
            for moment in moments
        ) and all(tensor.is_contiguous() for tensor in (each.parameter, each.gradient, each.target, *moments))

    def warm_up(self, types: Iterable[tuple[torch.dtype, torch.dtype]], device: torch.device) -> None:
        """Load what is needed for gradients and targets of these types."""

    def take(self, stepped: list[Operands], where: list[Tensor | None]) -> None:
        """Write the stepped values of parameters into their targets, after the steps that are due.

        `where` has for each parameter a bool scalar tensor on the device, whether to step it, or None: step it.
        """
        scratch = _scratch()
        for each, steps in zip(stepped, where, strict=True):
            self._take(each, steps, scratch)

    def _take(self, each: Operands, steps: Tensor | None, scratch: list[Tensor]) -> None:
        take_due, operands_of_due = each.due.begin() if each.due is not None else (None, [])
        step = self._rule.block_step(each.state, each.factor)
        operands = _tensors(self._rule, each)
        is_direct = each.target.dtype is torch.float32 and steps is None
        for target, *tensors in _blocks(each.target, *operands, *operands_of_due):
            (p, g, *moments), of_due = tensors[: len(operands)], tensors[len(operands) :]
            parts = _parts(scratch, len(p))
            if take_due is not None:
                take_due(parts, [of_due[0], *of_due[2:]], *of_due)
            result = target if is_direct else parts[0]
            step(parts, [result, *parts[1:3]], p, g if g.dtype is torch.float32 else g.float(), *moments)
            if not is_direct:
                target.copy_(result if steps is None else torch.where(steps, result, p))

    @staticmethod
    def take_due(due: Iterable[DueStep]) -> None:
        """As the function `take_due`."""
        scratch = _scratch()
        for each in due:
            step, tensors = each.begin()
            for p, *others in _blocks(*tensors):
                step(_parts(scratch, len(p)), [p, *others[1:]], p, *others)


class TritonStep(ElementwiseStep):
    """The step on a GPU: one launch for all parameters with the same types."""

    takes_all = True

    def can_take(self, each: Operands) -> bool:
        known = _kernel().ELEMENT_TYPES
        return super().can_take(each) and each.gradient.dtype in known and each.target.dtype in known

    def warm_up(self, types: Iterable[tuple[torch.dtype, torch.dtype]], device: torch.device) -> None:
        known = _kernel().ELEMENT_TYPES
        own = (torch.float32, torch.float32)  # the optimizer's own step without a prediction
        for gradient, target in {own, *types}:
            if gradient in known and target in known:
                _kernel().warm_up(self._rule.kernel, gradient, target, device)

    def take(self, stepped: list[Operands], where: list[Tensor | None]) -> None:
        alike = [each.due if each.due and each.due.rule.kernel == self._rule.kernel else None for each in stepped]
        self.take_due([each.due for each, due in zip(stepped, alike, strict=True) if each.due is not due])
        rows = []
        for each, due, condition in zip(stepped, alike, where, strict=True):
            own = due and _begin_on_gpu(due)  # counts, so before the numbers of the next step
            ahead = _kernel().Step(each.gradient, each.factor, self._rule.numbers(each.state))
            rows.append(_row(self._rule, each, own=own, ahead=ahead, target=each.target, condition=condition))
        _kernel().take(rows)

    @staticmethod
    def take_due(due: Iterable[DueStep]) -> None:
        _kernel().take([_row(each.rule, each.operands, own=_begin_on_gpu(each)) for each in due])


def _begin_on_gpu(due: DueStep) -> Any:
    numbers = due.rule.numbers(due.operands.state)
    due.rule.count(due.operands.state)
    return _kernel().Step(due.operands.gradient, due.operands.factor, numbers)


def _row(rule: Rule, each: Operands, **steps: Any) -> Any:
    parameter, _, *moments = _tensors(rule, each)
    return _kernel().Row(rule.kernel, parameter, tuple(moments), **steps)


@cache
def _kernel() -> ModuleType:
    from megatron.pipeline.runtime.update import triton_step  # only where Triton is installed

    return triton_step


@cache
def _on_gpu() -> type[TritonStep] | None:
    if find_spec("triton") is None:
        logger.warning(
            "note: Triton is not installed, so predictions step copies of weights and moments; with it one kernel "
            "takes a step and the prediction behind it"
        )
        return None
    logger.info("note: Triton kernels take steps and predictions")
    return TritonStep


PASSES: dict[str, Callable[[], type[ElementwiseStep] | None]] = {"cpu": lambda: ElementwiseStep, "cuda": _on_gpu}
"""The type of a device -> what steps there; None: it is not installed."""


def take_due(due: Iterable[DueStep]) -> None:
    """Step parameters in place, with their moments, and count the steps. All are on devices of one type."""
    due = list(due)
    if due:
        PASSES[due[0].operands.parameter.device.type]().take_due(due)


_PLAIN = (Tensor, torch.nn.Parameter)


def _tensors(rule: Rule, each: Operands) -> list[Tensor]:
    return [each.parameter, each.gradient, *(each.state[name] for name in rule.moments)]


def _scratch() -> list[Tensor]:
    return [torch.empty(_block_size(), dtype=torch.float32) for _ in range(4)]


def _parts(scratch: list[Tensor], size: int) -> list[Tensor]:
    """The scratch tensors for a block of this size."""
    return scratch if size == len(scratch[0]) else [tensor[:size] for tensor in scratch]


def _block_size() -> int:
    return BLOCK * torch.get_num_threads()


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat blocks of the tensors: first the first block of each tensor, then the second block of each, and so on."""
    return zip(*(tensor.view(-1).split(_block_size()) for tensor in tensors), strict=True)
