"""Gradient buffers: where the gradients of a batch are summed up.

Problem: without flushes the first backwards of batch j+1 run while the gradients of batch j are still being reduced and
clipped, so the two must not share memory.

Solution: flat buffers, one tensor per dtype, with a view per parameter. ``param.grad`` is pointed at the views of a
free buffer before a batch's first backward; autograd adds into them in place. The flat tensor is what the replicas
all-reduce.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import torch
from torch import Tensor

from megatron.pipeline.runtime.update.gradient_norm import norm_of


class GradientBuffer:
    """One set of gradients: `flat` holds one tensor per dtype, `views` name -> its part in the parameter's shape."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.flat: list[Tensor] = []
        self.views: dict[str, Tensor] = {}
        self.written: set[str] = set()  # those that a backward has added to, where that is noted
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, parameter in parameters.items():
            by_dtype.setdefault(parameter.dtype, []).append(name)
        for dtype, names in by_dtype.items():
            device = parameters[names[0]].device
            flat = torch.zeros(sum(parameters[name].numel() for name in names), dtype=dtype, device=device)
            parts = flat.split([parameters[name].numel() for name in names])
            self.views.update({name: part.view_as(parameters[name]) for name, part in zip(names, parts, strict=True)})
            self.flat.append(flat)

    def zero(self) -> None:
        self.written.clear()
        for flat in self.flat:
            flat.zero_()

    def untouched(self) -> list[str]:
        """The names of those that no backward was seen to write, and that hold nothing."""
        rest = (name for name in self.views if name not in self.written)
        return [name for name in rest if not self.views[name].count_nonzero()]

    def norm_squared(self, *, leave_out: frozenset[str] = frozenset()) -> Tensor:
        """Sum of squares in float64, a scalar on the device: nobody has waited for it."""
        norms = [norm_of(view) for name, view in self.views.items() if name not in leave_out]
        return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)

    def scale(self, factor: float) -> None:
        for flat in self.flat:
            flat.mul_(factor)

    def divide(self, divisor: float) -> None:
        for flat in self.flat:
            flat.div_(divisor)


class GradientBuffers:
    """A fixed number of buffers that are taken and given back. `notes_writes`: note which gradients are `written`."""

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], *, num_buffers: int, notes_writes: bool = False
    ) -> None:
        self._parameters = dict(parameters)
        self._free = [GradientBuffer(self._parameters) for _ in range(num_buffers)]
        self._shown: GradientBuffer | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))
            for name, parameter in (self._parameters.items() if notes_writes else ())
        ]

    def _note(self, name: str, parameter: torch.nn.Parameter) -> None:
        if self._shown is not None:
            self._shown.written.add(name)

    def take(self) -> GradientBuffer:
        """A free buffer, zeroed, with every parameter's ``grad`` pointed at it."""
        assert self._free, "every gradient buffer still waits for its step: the program needs more gradient buffers"
        buffer = self._free.pop()
        buffer.zero()
        self.show(buffer)
        return buffer

    def show(self, buffer: GradientBuffer | None, *, without: Collection[str] = ()) -> None:
        """Point every parameter's ``grad`` at a buffer. `without`: of these there is none."""
        self._shown = buffer
        for name, parameter in self._parameters.items():
            parameter.grad = None if buffer is None or name in without else buffer.views[name]

    def give_back(self, buffer: GradientBuffer) -> None:
        self._free.append(buffer)

    def close(self) -> None:
        """Nothing is noted any more, and no parameter has a gradient."""
        self.show(None)
        while self._hooks:
            self._hooks.pop().remove()
