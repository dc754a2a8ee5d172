"""Predictions of an optimizer's weights some steps ahead, the versions of predicted weights, and their clipping.

Problem: a forward uses older weights than its backward. The steps between the two are not known yet, because their
gradients are not known.

Solution: assume that each coming step has the direction of the last step. With direction d, learning rates l_1 ... l_h
of the coming steps and decoupled weight decay c, the steps w <- (1 - l_j c) w - l_j d give

    w^ = w prod_j (1 - l_j c) - d sum_j l_j prod_{i>j} (1 - l_i c)

    SGD with momentum   d = v                             SpecTrain (Chen et al., 2018)
    Adam, AdamW         d = m^ / (sqrt(v^) + eps)         XPipe (Guan et al., 2019)

v is torch's momentum buffer, which includes dampening and coupled weight decay. With Nesterov's momentum a step also
has the direction v as long as the buffer is constant. m^ and v^ are Adam's moments, corrected for their bias; with
amsgrad v^ is the largest second moment so far. A parameter without state is predicted to stay the same.

`PredictedVersions` holds predicted weights and the true weights. Computations use only predictions, so no graph refers
to the true weights, a step may change them in place, and one set of them is enough. If the optimizer has FP32 masters,
the masters are that set. Parameters that the optimizer steps directly get a set of tensors that no computation loads.

Clipping: a step clips by the norm of all gradients of its batch. This norm is unknown when the step is predicted,
because some microbatches are still to come and other ranks hold the rest of the model. The factor of the last step is a
guess, which would not clip a sudden jump of the norm. The gradients of the stage give an upper bound: their norm is at
most the global norm, so a step multiplies them by at most the largest allowed norm divided by theirs. A prediction uses
the smaller of the guess and the bound. For the bound, the norm of the stage's gradients is estimated from a part f of
the batch. The sum over this part times 1/f has too large a norm: with signal S and noise N its square is S^2 + N^2/f,
but the square of the whole batch's norm is S^2 + N^2. So the estimate is multiplied by the root of f: the square is
then f S^2 + N^2, at most that of the whole batch, and equal to it where there is only noise.
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
from megatron.pipeline.runtime.update.gradients import CLIP_EPSILON
from megatron.pipeline.runtime.update.optimizer_wrappers import settings_of
from megatron.pipeline.runtime.update.versions import Slot, WeightVersions, overwriting

_Rule = Callable[[Mapping[str, Any], Mapping[str, Any], Tensor], bool]


class WeightPredictor:
    """Predicts the weights of an optimizer.

    Args:
        optimizer: SGD with momentum, Adam or AdamW of torch.
        scheduler: the learning-rate scheduler of `optimizer`; None: learning rates are constant.

    Raises:
        ValueError: another optimizer, or SGD without momentum.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, scheduler: Any = None) -> None:
        rule = _RULES.get(type(optimizer))
        if rule is None:
            raise ValueError(
                f"{type(optimizer).__name__} is not predicted: it keeps no mean of its gradients, or its rule is not "
                "known here; use SGD with momentum, Adam or AdamW, or leave weight prediction out"
            )
        if rule is _momentum and not all(group["momentum"] for group in optimizer.param_groups):
            raise ValueError(
                "SGD without momentum keeps no mean of its gradients to predict from; give it a momentum, or leave "
                "weight prediction out"
            )
        self._optimizer, self._scheduler, self._write_direction = optimizer, scheduler, rule

    @torch.no_grad()
    def predict(self, horizon: int, tensors: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Write the weights that are predicted after the next `horizon` steps.

        Args:
            horizon: the number of steps, at least 1.
            tensors: (parameter, its present weights, the tensor to write), of the same shape and dtype.
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
    """The factors of w and of d in the formula for w^."""
    decoupled = group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
    decay = float(group["weight_decay"]) if decoupled else 0.0
    kept, moved = 1.0, 0.0
    for rate in rates:
        kept, moved = kept * (1.0 - rate * decay), moved * (1.0 - rate * decay) + rate
    return kept, moved


def _momentum(group: Mapping[str, Any], state: Mapping[str, Any], target: Tensor) -> bool:
    """Write the direction of SGD into `target`. Return False if the parameter has no state yet."""
    buffer = state.get("momentum_buffer")
    if buffer is None:
        return False
    target.copy_(buffer)
    return True


def _moments(group: Mapping[str, Any], state: Mapping[str, Any], target: Tensor) -> bool:
    """Write the direction of Adam into `target`. Return False if the parameter has no state yet."""
    if not state:
        return False
    num_steps = float(state["step"])
    first, second = (1.0 - float(beta) ** num_steps for beta in group["betas"])
    squares = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    target, mean, squares = as_real(target), as_real(state["exp_avg"]), as_real(squares)  # as in torch's step
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


# --- the learning rates of the coming steps, read without changing the scheduler


def learning_rates_to_come(
    optimizer: torch.optim.Optimizer, scheduler: Any, horizon: int
) -> tuple[tuple[float, ...], ...]:
    """For each group of `optimizer`, the learning rates of the next `horizon` steps, the next step first.

    `scheduler` is a torch learning-rate scheduler that steps after each step of `optimizer`, or None. A copy of the
    scheduler steps ahead on copies of the groups' options. So its rates may depend only on its own state, the options
    of the groups and the number of steps.
    """
    rates = [_rates(optimizer.param_groups)]
    if scheduler is None:
        return tuple(zip(*rates * horizon, strict=True))
    if horizon > 1:
        groups = SimpleNamespace(param_groups=[settings_of(group) for group in optimizer.param_groups], step=_no_step)
        groups._opt_called = True  # a scheduler warns without it
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
    """`WeightVersions` of predicted weights, with a window of 2, and the true weights.

    At first the values of the parameters are both the true weights and the prediction of `first_version`.

    Args:
        stepped: names of the parameters that the optimizer steps directly; the others have masters. Default: all.
        write_true: writes the masters into the tensors that their parameters show.
        exchanges: with `write_true` replicas exchange true weights, also those that the optimizer steps directly.
        parameters, first_version, make_slot, on_switch: as for `WeightVersions`.

    Attributes:
        upcoming: if predictions repeat the last update, a function that returns the next prediction, which a drained
            run already knows: name -> tensor, or None if it equals the true weights. The call is collective over
            replicas that share out the optimizer's state. None: predictions read gradients.
        restored: the upcoming prediction of a checkpoint, until it is made; else None.
    """

    upcoming: Callable[[], Slot | None] | None = None
    restored: Slot | None = None

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        first_version: int = 0,
        stepped: frozenset[str] | None = None,
        write_true: Callable[[], None] = lambda: None,
        exchanges: bool = False,
        make_slot: Callable[[], Slot] | None = None,
        on_switch: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(parameters, window=2, first_version=first_version, make_slot=make_slot, on_switch=on_switch)
        names = self._parameters if stepped is None else stepped
        self._true = {name: self._parameters[name].data.clone() for name in names}
        self._has_masters = len(self._true) < len(self._parameters) or exchanges
        self._write_true = write_true
        self._true_slot: int | None = None  # the slot into which masters were written last

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """Run a block in which the parameters that the optimizer steps directly show the true weights."""
        shown = {name: self._parameters[name].data for name in self._true}
        self._show_true()
        with overwriting(self._parameters):
            yield
        for name, tensor in shown.items():
            self._parameters[name].data = tensor

    @contextmanager
    def predicting(self, version: int) -> Iterator[dict[str, Tensor]]:
        """Run a block that writes the predicted weights of `version`. Yields name -> tensor to write.

        If the block fails, because a replica is lost that has a part of them, the version is forgotten.
        """
        with self.making(version, copy=False) as target:
            try:
                yield target
            except Exception:
                self._forget_newest()
                raise

    def show_newest(self) -> None:
        """Show the true weights, for an evaluation or a checkpoint.

        Call it only while drained: the masters are written into a slot that only then is free.
        """
        if self._shown_slot == _TRUE:
            return
        self._retire_before(self.newest)
        if self._has_masters:
            self._true_slot = self._free_slot()
            self._show(self._true_slot)
            with torch.no_grad():
                for name, tensor in self._true.items():  # for an exchange
                    self._parameters[name].data.copy_(tensor)
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

    def restart(
        self, version: int, predicted: Mapping[str, Tensor] | None = None, *, upcoming: Slot | None = None
    ) -> None:
        """Restart from a checkpoint. The parameters show the true weights of `version`, before the call and after it.

        `predicted` has the predicted weights by name; None: they equal the true weights. `upcoming`: the next
        prediction after `predicted`, if it is known.
        """
        self.restored = upcoming
        slot = 1 if self._true_slot == 0 else 0
        while slot >= len(self._slots):
            self._slots.append(self._make_slot())
        with torch.no_grad():
            for name, tensor in self._slots[slot].items():
                tensor.copy_(self._parameters[name].data if predicted is None else predicted[name])
        self._table = {version: slot}
        self.newest = version

    def go_back_to(self, version: int) -> None:
        """Forget the prediction of the version after `version`, if there is one: its batch is computed again.

        A prediction that takes the last update again does not follow from gradients, and stays as `restored`.
        """
        if self.newest > version:
            made = self._forget_newest()
            assert self.newest == version in self._table, "a rank predicts a version after the step to the one before"
            if self.upcoming is not None:
                self.restored = {name: tensor.clone() for name, tensor in self._slots[made].items()}

    def _forget_newest(self) -> int:
        """Forget the newest version; return its slot."""
        slot = self._table.pop(self.newest)
        self.newest -= 1
        return slot

    def keep_for_move(self) -> None:
        """Show the true weights, and keep the upcoming prediction, so that both can be handed over without others.

        Call it only while drained. Collective over replicas that share out the optimizer's state.
        """
        true = self.newest_tensors()
        if self.upcoming is not None:
            self.restored = self.upcoming() or {name: tensor.clone() for name, tensor in true.items()}

    @property
    def is_kept_for_move(self) -> bool:
        return self._shown_slot == _TRUE and (self.upcoming is None or self.restored is not None)

    def newest_tensors(self) -> dict[str, Tensor]:
        """Show the true weights, and return their tensors by name."""
        self.show_newest()
        return {name: parameter.data for name, parameter in self._parameters.items()}


_TRUE = -1
"""The value of `_shown_slot` while the true weights are shown."""


def prediction_factor(
    part: float, squares: Tensor, *, last: float, largest: float, num_unread: int = 0, loss_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """The factor that turns the sum of a part of a batch's gradients into a clipped estimate of the whole sum.

    Args:
        part: the share of the replica's microbatches in the sum, above 0 and at most 1.
        squares: the squared norm of the sum, a float64 scalar tensor.
        last: the factor by which the last step clipped its gradients, at most 1.
        largest: the norm to which gradients are clipped.
        num_unread: the number of replicas whose gradients are not read; 0 where the sum is the mean over all replicas.
        loss_scale: the loss scale of the batch, by which the sum is multiplied.
        dtype: the dtype of the result.

    Returns:
        A scalar of `dtype` on the device of `squares`, possibly still being computed.
    """
    part_of_batch = part / (1 + num_unread)
    norm = squares.sqrt() * (part_of_batch**0.5 / (part * loss_scale))
    return norm.add_(CLIP_EPSILON).reciprocal_().mul_(largest).clamp_(max=last).div_(part * loss_scale).to(dtype)
