"""A wrapper that makes a model a function from named tensors to its loss, for torch.export.

torch.export keeps the order and the names of a forward's named arguments, but not of ``**kwargs``. So the wrapper's
forward is generated for the names of a batch.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

MODEL = "model"
"""The wrapper's attribute for the model, with which every name in the captured graph begins."""


class NoLossError(ValueError):
    """An error for a model whose output has no scalar loss, or lacks a field to keep."""


class LossOnly(torch.nn.Module):
    """A model with a forward that names its tensors and returns ``(loss, *kept)``.

    Args:
        names: the names of the tensors of a batch.
        loss: (output, batch) -> scalar mean loss; None: the model returns the loss, as a scalar, as ``loss`` of a
            mapping or an object, or as the first item of a tuple.
        keep: fields of the output that are returned beside the loss, such as ``logits``.
        forward: (model, batch) -> the output with its loss, in place of the model's own forward; None: the model's.

    Raises ValueError for a name that an argument cannot have.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        names: Sequence[str],
        *,
        loss: Callable[[object, Mapping[str, Tensor]], Tensor] | None = None,
        keep: Sequence[str] = (),
        forward: Callable[[torch.nn.Module, Mapping[str, Tensor]], object] | None = None,
    ) -> None:
        super().__init__()
        for name in names:
            if not name.isidentifier() or keyword.iskeyword(name) or name == "self":
                raise ValueError(f"a batch has a tensor called {name!r}; give it a name that an argument can have")
        self.model, self._loss, self._keep, self._forward = model, loss, tuple(keep), forward
        self._fixed = _fixed_arguments(model, {"use_cache": False, **({"return_loss": True} if loss is None else {})})
        arguments, pairs = ", ".join(names), ", ".join(f"{name}={name}" for name in names)
        namespace: dict[str, Callable] = {}
        exec(f"def forward(self, {arguments}): return self.loss_of(dict({pairs}))", namespace)
        self.forward = namespace["forward"].__get__(self)

    def loss_of(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        if self._forward is None:
            taken = batch if self._loss is None else _taken(self.model, batch)
            output = self.model(**taken, **self._fixed)
        else:
            output = self._forward(self.model, batch)
        loss = _field(output, "loss") if self._loss is None else self._loss(output, batch)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise NoLossError(
                f"{type(self.model).__name__} returns no scalar loss for a batch of {', '.join(batch)}; add the labels "
                "that it needs, or give a loss"
            )
        kept = tuple(_field(output, name) for name in self._keep)
        for name, tensor in zip(self._keep, kept, strict=True):
            if not isinstance(tensor, Tensor):
                raise NoLossError(f"{type(self.model).__name__} returns no tensor called {name}; leave it out of keep")
        return (loss, *kept)


def _field(output: object, name: str) -> object:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get(name)
    if isinstance(output, (tuple, list)) and not hasattr(output, name):
        return output[0] if output and name == "loss" else None
    return getattr(output, name, None)


def _fixed_arguments(model: torch.nn.Module, wanted: dict[str, object]) -> dict[str, object]:
    """The wanted arguments that the model's forward takes: no cache of keys and values, which only generation needs,
    and the contrastive loss, which CLIP and its kin return when they are asked."""
    return {name: value for name, value in wanted.items() if name in inspect.signature(model.forward).parameters}


def _taken(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a batch that the model's forward takes; the loss takes the others."""
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(batch)
    return {name: tensor for name, tensor in batch.items() if name in parameters}
