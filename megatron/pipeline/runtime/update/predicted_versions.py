"""Weight versions under a policy that predicts: two predicted ones, and the true weights.

Computations use predictions alone, so no graph refers to the true weights, and a step changes them in place: they need
one set of tensors, never a new one. An optimizer with FP32 masters keeps them already. For parameters that it steps
themselves they are a slot of their own, which nobody loads for a computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.pipeline.runtime.update.versions import Slot, WeightVersions


class PredictedVersions(WeightVersions):
    """As `WeightVersions`, of predicted weights; the parameters' values now are both the true weights and the first
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
        """A block in which the predicted weights of `version`, the tensors that it is given, are written."""
        tensors = self.prepare(version, copy=False)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self._parameters.values())):
            yield tensors

    def show_newest(self) -> None:
        """Show the true weights, for an evaluation or a checkpoint. Only drained: it writes into the slot that no
        version lives in then.
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
        """Take what a checkpoint holds: the parameters show the true weights of `version`, which stay shown, and
        `predicted` is its prediction. None: the true weights are.
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
"""Stands in place of a slot's number where true weights are shown."""
