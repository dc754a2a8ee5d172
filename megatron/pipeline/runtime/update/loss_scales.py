"""The loss scales of FP16 gradients: the scale of each batch in flight, and the rule by which a scale changes.

FP16 has no numbers below 6e-8, so small gradients would be lost. Therefore a loss is multiplied by a scale before its
backward, and the gradients are divided by it in FP32. A scale that is too large makes gradients overflow: the step is
skipped, and the scale is lowered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class DynamicScaler:
    """The rule of torch.amp.GradScaler, with a smallest scale.

    Attributes:
        scale: the present scale.
        growth, backoff: the factors by which the scale changes.
        interval: the number of successive batches without an overflow after which the scale grows.
        least: the smallest scale.
    """

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    least: float = 1.0
    _growth_tracker: int = 0

    def update(self, overflow: bool) -> None:
        """Change the scale after a batch that used it. `overflow`: whether its gradients overflowed."""
        if overflow:
            self.scale, self._growth_tracker = max(self.scale * self.backoff, self.least), 0
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.interval:
            self._growth_tracker = 0
            if math.isfinite(self.scale * self.growth):
                self.scale *= self.growth

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "growth_tracker": self._growth_tracker}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale, self._growth_tracker = state["scale"], int(state["growth_tracker"])


class LossScales:
    """The loss scale of each batch, from a scaler: megatron.core's or `DynamicScaler`. Without a scaler it is always 1.

    Under 2bw batch j begins before the step of batch j-1, so it cannot use the scale after that step. Batch j uses the
    scale after the STEP of batch j-2 (`delay` 2); under flush it uses the scale after the STEP of batch j-1 (`delay`
    1). The first batches use the initial scale. A drain executes steps early but must not change the scale of a batch,
    so the scales after the last steps are stored.

    Two batches in flight may overflow because of the same scale, which must be lowered only once. So if a batch
    overflowed with a scale above the current one, the scale stays the same.

    The scaler's tensors are moved to the host, because the main thread reads the scale at every step and would
    otherwise wait for the device.
    """

    def __init__(self, scaler: Any, *, delay: int) -> None:
        self.scaler = scaler
        _to_host(scaler)
        self._delay = delay
        self._after_step: dict[int, float] = {}
        self._before_first = self.current

    @property
    def current(self) -> float:
        """The scaler's present scale."""
        return 1.0 if self.scaler is None else float(self.scaler.scale)

    def of_batch(self, batch: int) -> float:
        """The scale of a batch."""
        return self._after_step.get(batch - self._delay, self._before_first)

    def step(self, batch: int, *, scale: float, overflow: bool) -> None:
        """Update the scaler after `batch`, which used `scale`. To be called in the order of the batches."""
        if self.scaler is None:
            return
        if overflow and scale > self.current:
            self.scaler._growth_tracker = 0
        else:
            self.scaler.update(overflow)
        self._after_step[batch] = self.current
        for old in [b for b in self._after_step if b <= batch - self._delay]:
            self._before_first = self._after_step.pop(old)

    def state_dict(self) -> dict:
        """The scales after the last steps, which the state of the scaler does not contain."""
        return {"after_step": dict(self._after_step), "before_first": self._before_first}

    def load_state_dict(self, state: dict | None) -> None:
        """Restore the result of `state_dict`. None: batches use the present scale of the scaler.

        To be called after each load of the scaler's own state, which puts the scaler's tensors on the device.
        """
        _to_host(self.scaler)
        self._after_step = dict(state["after_step"]) if state else {}
        self._before_first = state["before_first"] if state else self.current


def _to_host(scaler: Any) -> None:
    for name, value in vars(scaler).items() if scaler is not None else ():
        if isinstance(value, torch.Tensor):
            setattr(scaler, name, value.cpu())
