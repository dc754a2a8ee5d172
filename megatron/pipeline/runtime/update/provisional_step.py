"""Provisional steps: the weights that an optimizer's step would give, without a change of parameters or state.

Problem: a computation needs the weights after the next step before the gradients of that step are complete.

Solution: `ProvisionalStep` takes the step with the gradients that are there and writes the result into other tensors.
If `elementwise_step` knows the optimizer's rule, the step is one pass. Otherwise the optimizer's own `step` runs on
copies of the parameters and of their state. This works for any optimizer whose state belongs to its parameters or is a
value of their group. A few parameters are copied at a time, so the copies take little memory. In both cases equal
gradients give the bits of the true step, and hooks and learning-rate schedules do not see the provisional step.

A provisional step reads what the true step before it has just read and written. So `step` can put off the optimizer's
own step where its rule is known. Then `take` takes both in one pass. On a GPU the pass takes all steps of such an
optimizer but its first, so that the bits of a step do not depend on what comes after it.

`PartialStep` is for a forward at stale weights, while the stage has gradients of a batch that is not complete. Their
sum holds 1/m of the gradient of each microbatch, where m is the number of microbatches of the batch. With n of them
done, m/n times the sum is an estimate for the whole batch. If there are FP32 masters, the step starts from the masters
and the result is rounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.runtime.update.elementwise_step import DueStep, ElementwiseStep, Operands, take_due
from megatron.pipeline.runtime.update.optimizer_wrappers import (
    GapAware,
    MasterWeights,
    copied,
    is_watched,
    note_step,
    settings_of,
    stand_in,
    take_step,
)

CHUNK_BYTES = 64 * 2**20
"""The bytes of the parameters that are stepped at once. With copies of gradients and Adam's moments it is four times
as much."""


class ProvisionalStep:
    """Takes provisional steps of an optimizer, and the optimizer's own steps that come directly before them.

    Args:
        types: pairs of the types of gradients and of targets that `take` will get; a GPU loads kernels for them.

    Attributes:
        due: parameter -> the optimizer's own step of it, which `step` has put off.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, types: Collection[tuple[torch.dtype, torch.dtype]] = ()
    ) -> None:
        self._optimizer = optimizer
        self.due: dict[Tensor, DueStep] = {}
        for group in optimizer.param_groups if types else ():
            elementwise = ElementwiseStep.of(optimizer, group)
            if elementwise is not None:
                elementwise.warm_up(types, group["params"][0].device)

    @torch.no_grad()
    def step(self, factor: float = 1.0, *, puts_off: bool) -> None:
        """Take the optimizer's own step, with `factor` times the gradients.

        `puts_off`: `take` is the next call, and takes the steps of the parameters for which `elementwise_step` can do
        that. They have the options that their groups have now, and read the present gradients, which must not change
        until then. A step that runs hooks is not put off. Steps that no pass takes multiply the gradients in place.
        """
        rest = []
        is_plain = not is_watched(self._optimizer) and _count_apart(self._optimizer)
        for group in self._optimizer.param_groups:
            due = self._due_steps(group, factor, puts_off=puts_off) if is_plain else None
            if due is None:
                rest.append(group)
            else:
                self.due.update(due)
        gradients = [each.grad for group in rest for each in group["params"] if each.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        if not self.due:
            self._optimizer.step()
            return
        note_step(self._optimizer)
        if gradients:
            take_step(stand_in(self._optimizer, rest, self._optimizer.state, shares_tables=True))
        if not puts_off:
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Take the steps that are due: no `take` follows."""
        due, self.due = self.due, {}
        take_due(due.values())

    def _due_steps(self, group: dict[str, Any], factor: float, *, puts_off: bool) -> dict[Tensor, DueStep] | None:
        """The steps of the group's parameters that have gradients; None if no pass takes them."""
        elementwise = ElementwiseStep.of(self._optimizer, group)
        if elementwise is None or not (puts_off or elementwise.takes_all):
            return None
        state = self._optimizer.state
        steps = {
            each: elementwise.due(each, each.grad, factor, state.get(each, {}))
            for each in group["params"]
            if each.grad is not None
        }
        return None if None in steps.values() else steps

    @torch.no_grad()
    def take(
        self,
        gradient_of: Callable[[Tensor], tuple[Tensor, float | Tensor] | None],
        target_of: Callable[[Tensor], Tensor],
        *,
        where: Callable[[Tensor], Tensor | None] = lambda parameter: None,
    ) -> None:
        """Write the values that the parameters would have after the optimizer's next step. Make the steps that are due.

        Args:
            gradient_of: parameter -> (gradient, factor); the step uses the product. The gradient has as many elements
                as the parameter and any floating or complex dtype. It is not changed. The factor is a number or a
                real scalar tensor on the device. None in place of the pair: the parameter is not stepped.
            target_of: parameter -> tensor of as many elements that receives the result; not the parameter's memory.
            where: parameter -> bool scalar tensor on the device: whether to step the parameter; None: step it.
        """
        for group in self._optimizer.param_groups:
            elementwise = ElementwiseStep.of(self._optimizer, group)
            in_pass, on_copies, unchanged, due_alone = [], [], [], []
            for parameter in group["params"]:
                gradient, due = gradient_of(parameter), self.due.get(parameter)
                state = self._optimizer.state.get(parameter, {})
                each = None if gradient is None else Operands(parameter, *gradient, state, target_of(parameter), due)
                if each is not None and elementwise is not None and elementwise.can_take(each):
                    in_pass.append(each)
                    continue
                (unchanged if each is None else on_copies).append(each or parameter)
                if due is not None:
                    due_alone.append(due)
            for parameter in group["params"]:
                self.due.pop(parameter, None)
            take_due(due_alone)
            for parameter in unchanged:
                _write(target_of(parameter), parameter)
            if in_pass:
                elementwise.take(in_pass, [where(each.parameter) for each in in_pass])
            for chunk in _chunks(on_copies):
                self._take_on_copies(group, chunk, [where(each.parameter) for each in chunk])
        assert not self.due, "each parameter with a due step is one of the optimizer's"

    def _take_on_copies(self, group: dict[str, Any], chunk: list[Operands], where: list[Tensor | None]) -> None:
        copies = {}
        for each in chunk:
            moved = each.parameter.detach().clone()
            moved.grad = (each.gradient.to(moved.dtype) * each.factor).view_as(moved)
            copies[each.parameter] = moved
        self._step(group, copies)
        for each, steps in zip(chunk, where, strict=True):
            moved = copies[each.parameter]
            _write(each.target, moved if steps is None else torch.where(steps, moved, each.parameter))

    def _step(self, group: dict[str, Any], copies: dict[Tensor, Tensor]) -> None:
        """Run the optimizer's own `step` on a stand-in with one group of `copies` and a copy of their state."""
        state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for parameter, moved in copies.items():
            if parameter in self._optimizer.state:
                state[moved] = {key: copied(value) for key, value in self._optimizer.state[parameter].items()}
        groups = [{**settings_of(group), "params": [*copies.values()]}]
        take_step(stand_in(self._optimizer, groups, state, shares_tables=False))


class LastUpdate:
    """The last update of an optimizer's parameters, to be taken once more: error feedback (docs/error_feedback.md).

    Attributes:
        before: parameter -> its value before its last step; empty if that step was skipped.
        is_known: there is an update to take again.
    """

    def __init__(self) -> None:
        self.before: dict[Tensor, Tensor] = {}
        self.is_known = False

    @torch.no_grad()
    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Keep copies of the parameters, which are about to be stepped."""
        self.before = {parameter: parameter.detach().clone() for parameter in parameters}
        self.is_known = True

    @torch.no_grad()
    def write(self, parameter: Tensor, target: Tensor) -> None:
        """Write the parameter with its last update taken again into `target`, of any shape and floating dtype.

        That is 2 new - old, or the parameter itself if its last step was skipped.
        """
        before = self.before.get(parameter)
        _write(target, parameter if before is None else again(before, parameter))

    def end(self) -> None:
        """Forget the update, which was taken again."""
        self.before, self.is_known = {}, False


def again(before: Tensor, after: Tensor) -> Tensor:
    """What comes of `after` if the update from `before` to it is taken once more."""
    return torch.lerp(before, after, 2.0)


def _count_apart(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each parameter counts its steps in a tensor of its own.

    If parameters share one, as after some loads of megatron.core's distributed optimizer, torch's step counts all of
    them before anything is predicted.
    """
    counts = [id(state["step"]) for state in optimizer.state.values() if "step" in state]
    return len(counts) == len(set(counts))


def _chunks(stepped: Iterable[Operands]) -> Iterator[list[Operands]]:
    """Cut what is stepped into chunks with about `CHUNK_BYTES` bytes of parameters."""
    chunk: list[Operands] = []
    num_bytes = 0
    for each in stepped:
        chunk.append(each)
        num_bytes += each.parameter.nbytes
        if num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _write(target: Tensor, value: Tensor) -> None:
    target.view_as(value).copy_(value)


def is_scale_invariant(optimizer: torch.optim.Optimizer) -> bool:
    """Whether scaling the gradient would hardly change the step, as under Adam's rule."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or "adam" in type(optimizer).__name__.lower()


class PartialStep:
    """Takes provisional steps with a part of a batch.

    Args:
        optimizer: the optimizer that makes the true steps.
        parameters: name -> parameter; they show the true weights when a step is taken.

    Raises:
        ValueError: `optimizer` is a `GapAware`. Its gap is known only when a batch is complete.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | MasterWeights | GapAware, parameters: Mapping[str, Tensor]
    ) -> None:
        if isinstance(optimizer, GapAware):
            raise ValueError(
                "gap-aware steps are not taken provisionally: how far weights have moved is known when a batch is "
                "complete; use the plain optimizer, or weights stale"
            )
        self._name_of = {parameter: name for name, parameter in parameters.items()}
        if isinstance(optimizer, MasterWeights):
            self._name_of = {master: self._name_of[weight] for master, weight in optimizer.weight_of.items()}
            optimizer = optimizer.optimizer
        self._provisional = ProvisionalStep(optimizer, {(each.dtype, each.dtype) for each in parameters.values()})
        stepped = {self._name_of[each] for group in optimizer.param_groups for each in group["params"]}
        self._fixed = {name: parameter for name, parameter in parameters.items() if name not in stepped}

    @torch.no_grad()
    def take(self, gradients: Mapping[str, Tensor], factor: float, targets: Mapping[str, Tensor]) -> None:
        """Write the stepped weights into `targets`.

        Args:
            gradients: name -> the sum of the gradients so far; not changed.
            factor: multiplies the gradients.
            targets: name -> tensor of the parameter's shape and dtype, which does not share memory with a parameter.
        """
        for name, parameter in self._fixed.items():
            targets[name].copy_(parameter)
        self._provisional.take(
            lambda parameter: (gradients[self._name_of[parameter]], factor),
            lambda parameter: targets[self._name_of[parameter]],
        )
