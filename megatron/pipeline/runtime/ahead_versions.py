"""One weight version, and a prediction of one to come.

The prediction is a set of weights of its own. It is made when a forward first asks for it, and serves until one with
another version or horizon is asked for: a batch's forwards share it. Nobody computes a gradient at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.pipeline.runtime.versions import Slot, WeightVersions
from megatron.pipeline.runtime.weight_predictor import WeightPredictor


class AheadVersions(WeightVersions):
    """As `WeightVersions` with a window of 1, and `load_ahead`, before which `predict_with` gives the predictor."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        first_version: int = 0,
        make_slot: Callable[[], Slot] | None = None,
        on_switch: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(parameters, window=1, first_version=first_version, make_slot=make_slot, on_switch=on_switch)
        self._predictor: WeightPredictor | None = None
        self._made: tuple[int, int] | None = None  # version and horizon of the prediction that there is
        self.num_predictions = 0

    def predict_with(self, predictor: WeightPredictor) -> None:
        self._predictor = predictor

    def load_ahead(self, version: int, horizon: int) -> None:
        """Show the weights of `version`, the newest, predicted `horizon` steps ahead (1 and more).

        Raises ValueError where `version` is not alive.
        """
        assert self._predictor is not None, "an update gives the predictor"
        weights = self._slots[self.slot_of(version)]
        if self._made != (version, horizon):
            if len(self._slots) == 1:
                self._slots.append(self._make_slot())
            target = self._slots[_PREDICTION]
            named = self._parameters.items()
            self._predictor.predict(horizon, [(each, weights[name], target[name]) for name, each in named])
            self._made = version, horizon
            self.num_predictions += 1
        if self._shown_slot != _PREDICTION:
            self._show(_PREDICTION)

    def restore(self, mapping: Mapping[int, Mapping[str, Tensor]]) -> None:
        self._made = None
        super().restore(mapping)

    def reset(self, *versions: int) -> None:
        assert self._shown_slot != _PREDICTION, "what is shown are no weights"
        self._made = None
        super().reset(*versions)


_PREDICTION = 1
"""Its slot: the weights live in the first one, where optimizers step in place."""
