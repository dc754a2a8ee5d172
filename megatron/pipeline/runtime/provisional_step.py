"""The step of an optimizer, taken on copies: where it would lead, while its parameters and its state stay as they are.

The rule is whatever the optimizer's own `step` computes, called on copies of the parameters and of their state with
another gradient. So a prediction equals the step to come bit for bit where the gradient does, for any optimizer whose
state belongs to its parameters or is a value of their group. Hooks and learning-rate schedules do not see it.
Parameters are copied some at a time, so that the copies take little memory.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Of the parameters that are copied at once; with the copies of Adam's moments and the gradients it is four times."""

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_THE_INSTANCE = ("step", "state", "param_groups", *_HOOKS)
"""What a stand-in does not share; a learning-rate schedule replaces `step` of the one optimizer that it is for."""


class ProvisionalStep:
    """Takes the steps of `optimizer` provisionally."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @torch.no_grad()
    def take(
        self,
        gradient_of: Callable[[Tensor], Tensor | None],
        write: Callable[[Tensor, Tensor], None],
        *,
        where: Callable[[Tensor], Tensor | None] = lambda parameter: None,
    ) -> None:
        """Step from where the optimizer's parameters are.

        Args:
            gradient_of: the gradient of one of them, of its dtype and shape, which is not changed; None: it is not
                stepped.
            write: is given a parameter and the value that the step leads to.
            where: of a parameter, a scalar on the device that says whether to step it; None: yes.
        """
        for group, parameters in self._chunks():
            copies = {}
            for parameter in parameters:
                moved = parameter.detach().clone()
                moved.grad = gradient_of(parameter)
                copies[parameter] = moved
            self._step(group, copies)
            for parameter, moved in copies.items():
                steps = where(parameter)
                write(parameter, moved if steps is None else torch.where(steps, moved, parameter))

    def _chunks(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """A group and some of its parameters at a time."""
        for group in self._optimizer.param_groups:
            chunk: list[Tensor] = []
            num_bytes = 0
            for parameter in group["params"]:
                chunk.append(parameter)
                num_bytes += parameter.nbytes
                if num_bytes >= CHUNK_BYTES:
                    yield group, chunk
                    chunk, num_bytes = [], 0
            if chunk:
                yield group, chunk

    def _step(self, group: dict[str, Any], copies: dict[Tensor, Tensor]) -> None:
        """The optimizer's own `step`, on a stand-in that has one group and a copy of its state."""
        optimizer = self._optimizer
        kind = type(optimizer)
        stand_in = object.__new__(kind)
        for key, value in vars(optimizer).items():
            if key not in _OF_THE_INSTANCE:
                stand_in.__dict__[key] = copy.copy(value) if isinstance(value, dict | list) else value
        for name in _HOOKS:
            stand_in.__dict__[name] = OrderedDict()
        values = {key: _copied(value) for key, value in group.items() if key != "params"}
        stand_in.param_groups = [{**values, "params": [*copies.values()]}]
        stand_in.state = defaultdict(dict)
        for parameter, moved in copies.items():
            if parameter in optimizer.state:
                stand_in.state[moved] = {key: _copied(value) for key, value in optimizer.state[parameter].items()}
        step = kind.step
        if hasattr(step, "hooked"):  # torch's wrapper, which calls the hooks of all optimizers
            step = step.__wrapped__
        step(stand_in)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


def is_scale_invariant(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a gradient many times as large would lead to about the same step: Adam's rule."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or "adam" in type(optimizer).__name__.lower()


def all_finite(tensors: Iterable[Tensor]) -> Tensor | None:
    """Whether no element of any of them is infinite or not a number: a scalar on their device, for which nobody has
    waited. None where there are no tensors.
    """
    norms = [torch.linalg.vector_norm(tensor, ord=float("inf"), dtype=torch.float32) for tensor in tensors]
    return torch.stack(norms).isfinite().all() if norms else None
