"""Which loss scale a batch uses when the next batch has begun before it is stepped.

Under 2bw batch j starts before batch j-1 has been stepped, so it cannot use the scale that follows from it. Batch j is
scaled and unscaled with the scale after the STEP of batch j-2 (`delay` 2), under flush after that of batch j-1
(`delay` 1); the first batches use the initial scale. That choice must not depend on a drain, which executes steps
early, so the scales after the last steps are kept. Two batches in flight can overflow for one and the same too large
scale; such a pair lowers it once: a batch that overflowed with a scale above the current one changes nothing. The
scaler's tensors live on the host, because the thread that computes reads its scale at every step, and would otherwise
wait for the device.
"""

import torch

from megatron.core.optimizer.grad_scaler import MegatronGradScaler


class LossScales:
    """Loss scale per batch, around one of megatron.core's scalers (None: the scale is always 1)."""

    def __init__(self, scaler: MegatronGradScaler | None, *, delay: int) -> None:
        self._scaler = scaler
        _to_host(scaler)
        self._delay = delay
        self._after_step: dict[int, float] = {}
        self._before_first = self.current

    @property
    def current(self) -> float:
        """The scaler's scale now."""
        return 1.0 if self._scaler is None else float(self._scaler.scale.item())

    def of_batch(self, batch: int) -> float:
        """The scale of a batch that begins now."""
        return self._after_step.get(batch - self._delay, self._before_first)

    def step(self, batch: int, *, scale: float, overflow: bool) -> None:
        """Tell the scaler how `batch`, which used `scale`, fared; to be called in the order of the batches."""
        if self._scaler is None:
            return
        if overflow and scale > self.current:
            self._scaler._growth_tracker = 0
        else:
            self._scaler.update(overflow)
        self._after_step[batch] = self.current
        for old in [b for b in self._after_step if b <= batch - self._delay]:
            self._before_first = self._after_step.pop(old)

    def state_dict(self) -> dict:
        """What megatron.core's scaler does not hold: the scales after the last steps."""
        return {"after_step": dict(self._after_step), "before_first": self._before_first}

    def load_state_dict(self, state: dict | None) -> None:
        """Restore; None (a checkpoint without, or of another schedule): go on with the scaler's present scale. To be
        called whenever the scaler's own state was loaded, which puts it on the device.
        """
        _to_host(self._scaler)
        self._after_step = dict(state["after_step"]) if state else {}
        self._before_first = state["before_first"] if state else self.current


def _to_host(scaler: MegatronGradScaler | None) -> None:
    for name, value in vars(scaler).items() if scaler is not None else ():
        if isinstance(value, torch.Tensor):
            setattr(scaler, name, value.cpu())
