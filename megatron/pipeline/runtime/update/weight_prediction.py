"""Predictions of the weights that an optimizer will have some steps ahead, their versions, and their clipping.

Problem: a forward at stale weights has a loss that the weights of its backward do not have. The gradients in between
are not known yet.

Solution: each coming step is assumed to have the direction of the last one. With direction d, learning rates
l_1 ... l_h to come and decoupled weight decay c, the steps w <- (1 - l_j c) w - l_j d give

    w^ = w prod_j (1 - l_j c) - d sum_j l_j prod_{i>j} (1 - l_i c)

    SGD with momentum   d = v                             SpecTrain (Chen et al., 2018)
    Adam, AdamW         d = m^ / (sqrt(v^) + eps)         XPipe (Guan et al., 2019)

v is torch's momentum buffer: gradients that keep it constant make steps of v with Nesterov's momentum, too, and it
includes dampening and coupled weight decay. m^ and v^ are Adam's moments, corrected for their bias; with amsgrad v^ is
the largest so far. A parameter without state is predicted to stay.

`PredictedVersions`: computations use predictions alone, so no graph refers to the true weights, and a step changes them
in place: one set of tensors serves. An optimizer with FP32 masters has it already. For parameters that the optimizer
steps themselves it is a slot of its own, which no computation loads.

Clipping: a step clips by the norm of all gradients of its batch, which is unknown when the step is predicted: some
microbatches are to come, and other ranks hold the rest of the model. The factor of the step before is a guess, which
would not clip a sudden jump of the norm. So a prediction uses that factor, or a smaller one that a stage's own
gradients demand. Their norm is a part of the global one, so no step multiplies them by more than the largest norm
divided by theirs. The sum over a part f of a batch, times 1/f, is an estimate of these gradients whose norm is too
large: with signal S and noise N its square is S^2 + N^2/f, where that of the whole batch is S^2 + N^2. The norm times
the root of f is at most the latter, and equal to it where all is noise: so that is taken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.runtime.contract.tensors import as_real
from megatron.pipeline.runtime.update.optimizer_wrappers import settings_of
from megatron.pipeline.runtime.update.versions import Slot, WeightVersions

_Rule = Callable[[Mapping[str, Any], Mapping[str, Any], Tensor], bool]


class WeightPredictor:
    """Predicts the weights of `optimizer`, whose learning rates `scheduler` sets; None: rates are constant.

    Raises:
        ValueError: an optimizer whose state does not tell the direction of its steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, scheduler: Any = None) -> None:
        rule = _RULES.get(type(optimizer))
        if rule is None:
            raise ValueError(
                f"{type(optimizer).__name__} is not predicted: it keeps no mean of its gradients that says where its "
                "steps will go, or by a rule that is unknown here; use SGD with momentum, Adam or AdamW, or do without "
                "weight prediction"
            )
        if rule is _momentum and not all(group["momentum"] for group in optimizer.param_groups):
            raise ValueError(
                "SGD without momentum keeps nothing that says where its steps will go; give it a momentum, or do "
                "without weight prediction"
            )
        self._optimizer, self._scheduler, self._write_direction = optimizer, scheduler, rule

    @torch.no_grad()
    def predict(self, horizon: int, tensors: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Write the weights after the next `horizon` steps.

        Args:
            horizon: steps, 1 and more.
            tensors: (a parameter, its present weights, the target of the prediction), of one shape and dtype.
        """
        rates = learning_rates_to_come(self._optimizer, self._scheduler, horizon)
        group_of = {
            parameter: (group, *_factors(group, own, type(self._optimizer)))
            for group, own in zip(self._optimizer.param_groups, rates, strict=True)
            for parameter in group["params"]
        }
        for parameter, weights, target in tensors:
            group, kept, moved = group_of.get(parameter, ({}, 1.0, 0.0))
            state = self._optimizer.state.get(parameter, {})
            if (kept, moved) == (1.0, 0.0) or not self._write_direction(group, state, target):
                target.copy_(weights)
            else:
                target.mul_(-moved).add_(weights, alpha=kept)


def _factors(group: Mapping[str, Any], rates: Iterable[float], kind: type) -> tuple[float, float]:
    """The factors (of the weights, of the direction) in the formula above."""
    decoupled = group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
    decay = float(group["weight_decay"]) if decoupled else 0.0
    kept, moved = 1.0, 0.0
    for rate in rates:
        kept, moved = kept * (1.0 - rate * decay), moved * (1.0 - rate * decay) + rate
    return kept, moved


def _momentum(group: Mapping[str, Any], state: Mapping[str, Any], target: Tensor) -> bool:
    """Write SGD's direction into `target`; returns False if the parameter has no state yet."""
    buffer = state.get("momentum_buffer")
    if buffer is None:
        return False
    target.copy_(buffer)
    return True


def _moments(group: Mapping[str, Any], state: Mapping[str, Any], target: Tensor) -> bool:
    """Write Adam's direction into `target`; returns False if the parameter has no state yet."""
    if not state:
        return False
    num_steps = float(state["step"])
    first, second = (1.0 - float(beta) ** num_steps for beta in group["betas"])
    squares = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    target, mean, squares = as_real(target), as_real(state["exp_avg"]), as_real(squares)  # as torch steps complex ones
    torch.sqrt(squares, out=target)
    target.div_(second**0.5).add_(group["eps"])
    torch.div(mean, target, out=target)
    target.div_(first)
    return True


_RULES: Mapping[type, _Rule] = {
    torch.optim.SGD: _momentum,
    torch.optim.Adam: _moments,
    torch.optim.AdamW: _moments,
}


# --- the learning rates of the steps to come, asked of a scheduler that must not notice


def learning_rates_to_come(
    optimizer: torch.optim.Optimizer, scheduler: Any, horizon: int
) -> tuple[tuple[float, ...], ...]:
    """For each group of `optimizer`, the learning rates of its next `horizon` steps, the next one first.

    `scheduler`: a torch learning-rate scheduler over `optimizer` that steps behind each of its steps, or None. A copy
    of it steps ahead, over copies of the groups' options; so it may depend only on its own state, the groups and the
    step.
    """
    rates = [_rates(optimizer.param_groups)]
    if scheduler is None:
        return tuple(zip(*rates * horizon, strict=True))
    if horizon > 1:
        groups = SimpleNamespace(param_groups=[settings_of(group) for group in optimizer.param_groups], step=_no_step)
        groups._opt_called = True  # which a scheduler asks in order to warn
        ahead = copy.deepcopy(scheduler, {id(optimizer): groups})
        for _ in range(horizon - 1):
            ahead.step()
            rates.append(_rates(groups.param_groups))
    return tuple(zip(*rates, strict=True))


def _rates(groups: list[dict[str, Any]]) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in groups)


def _no_step() -> None:
    raise AssertionError("a scheduler does not step its optimizer")


_no_step._wrapped_by_lr_sched = True


class PredictedVersions(WeightVersions):
    """`WeightVersions` of predicted weights; the parameters' present values are both the true weights and the first
    prediction.

    `stepped`: names of the parameters that the optimizer changes itself (default: all); the others have masters.
    `write_true`: writes the true weights of the others into the parameters as they are shown.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        first_version: int = 0,
        stepped: frozenset[str] | None = None,
        write_true: Callable[[], None] = lambda: None,
        make_slot: Callable[[], Slot] | None = None,
        on_switch: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(
            parameters, window=2, first_version=first_version, make_slot=make_slot, on_switch=on_switch
        )  # fmt: skip
        names = self._parameters if stepped is None else stepped
        self._true = {name: self._parameters[name].data.clone() for name in names}
        self._has_masters = len(self._true) < len(self._parameters)
        self._write_true = write_true
        self._true_slot: int | None = None  # where true weights were last written that have masters

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """A block in which the parameters that the optimizer changes show the true weights, so that it may step.

        As in `making`, the parameters' version counters are put back.
        """
        shown = {name: self._parameters[name].data for name in self._true}
        self._show_true()
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self._parameters.values())):
            yield
        for name, tensor in shown.items():
            self._parameters[name].data = tensor

    @contextmanager
    def predicting(self, version: int) -> Iterator[dict[str, Tensor]]:
        """A block that gets the tensors of the predicted weights of `version` and writes them."""
        tensors = self.prepare(version, copy=False)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self._parameters.values())):
            yield tensors

    def show_newest(self) -> None:
        """Show the true weights, for an evaluation or a checkpoint. Only while drained: it writes into the slot that
        is then free.
        """
        if self._shown_slot == _TRUE:
            return
        self._retire_before(self.newest)
        if self._has_masters:
            self._true_slot = self._free_slot()
            self._show(self._true_slot)
            with torch.no_grad():
                self._write_true()
        self._show_true()
        self._shown_slot = _TRUE

    def _show_true(self) -> None:
        for name, tensor in self._true.items():
            self._parameters[name].data = tensor

    def load(self, version: int) -> None:
        if self._shown_slot == _TRUE:
            self._show(self.slot_of(version))
        super().load(version)

    def restart(self, version: int, predicted: Mapping[str, Tensor] | None = None) -> None:
        """Restart from a checkpoint: the parameters show the true weights of `version`, which stay shown, and
        `predicted` is the prediction; None: the prediction equals the true weights.
        """
        slot = 1 if self._true_slot == 0 else 0
        while slot >= len(self._slots):
            self._slots.append(self._make_slot())
        with torch.no_grad():
            for name, tensor in self._slots[slot].items():
                tensor.copy_(self._parameters[name].data if predicted is None else predicted[name])
        self._table = {version: slot}
        self.newest = version

    def newest_tensors(self) -> dict[str, Tensor]:
        """name -> tensor of the true weights, which are shown then."""
        self.show_newest()
        return {name: parameter.data for name, parameter in self._parameters.items()}


_TRUE = -1
"""The slot number that stands for the true weights."""


def prediction_factor(
    part: float, squares: Tensor, *, last: float, largest: float, num_unread: int = 0, loss_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """The factor that makes a part of a batch's gradients an estimate of all of them, clipped.

    Args:
        part: share of a replica's microbatches, above 0 and at most 1.
        squares: squared norm of the part's sum, a float64 scalar on its device.
        last: factor by which the last step multiplied its gradients, at most 1.
        largest: norm to which gradients are clipped.
        num_unread: replicas whose gradients are not read; 0 where the mean over all is.
        loss_scale: that of the batch.
        dtype: that of the factor.

    Returns:
        A scalar of `dtype` on the device of `squares`, possibly still being computed.
    """
    part_of_batch = part / (1 + num_unread)
    norm = squares.sqrt() * (part_of_batch**0.5 / (part * loss_scale))
    return norm.add_(1e-6).reciprocal_().mul_(largest).clamp_(max=last).div_(part * loss_scale).to(dtype)
