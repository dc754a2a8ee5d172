"""Weight updates over megatron.core that step before the norm is known, and undo the step if the norm proves it wrong.

Problem: a step waits for the norm of all gradients, although nearly always the norm clips nothing. To step without it,
the step must be undone exactly where it was wrong, and then be taken as if it had waited.

Solution: before the step the rank copies what the step changes (`KeptState`). The step reads the gradients and leaves
them as they are in their buffer. `validate` compares the coefficient that the norm gives with the coefficient that the
step has used. `roll_back` copies the state back and steps again from the same gradients.
"""

import torch

from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.stages.megatron.optimizers import is_distributed, named_parameters, optimizers_of
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
from megatron.pipeline.runtime.update.kept_state import KeptState


class MegatronOptimisticUpdate(MegatronWeightUpdate):
    """`OptimisticUpdate` of one rank, for weight policies that drain the pipeline after each batch.

    It does not support per-token loss (the divisor comes with the norm), an optimizer that replicas share, experts
    (their routers count tokens), or delayed scaling in FP8 (forwards that begin again have moved the scales on). The
    arguments are those of `MegatronWeightUpdate`.
    """

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        shares = self._owners is not None or is_distributed(self._inner)
        config = self.chunks[0].config
        moves_scales = bool(config.fp8) and config.fp8_recipe == "delayed"
        refused = self._per_token or shares or self.router_tokens or moves_scales
        assert self.weights.drains and not refused, "refused at the start"
        optimizers = [each.optimizer for each in optimizers_of(self._inner) if not each.is_stub_optimizer]
        parameters = named_parameters(self.chunks).values()
        others = (self.scheduler, self.scales, self._scaler)
        self.kept: KeptState | None = KeptState(parameters, optimizers, others)

    @torch.no_grad()
    def step(self, version: int, *, with_prediction: bool = False) -> BatchReport:
        """Make weight `version` as if nothing overflowed and the norm clipped nothing."""
        if self.kept is None:
            return super().step(version)
        batch = self._batches[version]
        self._prepare(batch)
        self.kept.take()
        batch.coefficient, batch.on_trial = 1.0 / batch.report.gradient_scale, True
        self._apply(batch, batch.coefficient)
        return batch.report

    def validate(self, version: int) -> bool:
        """Return whether the step to `version` was right. If so, give back the gradient buffer of its batch."""
        batch, report = self._batches[version], self._batches[version].report
        is_right = not (report.overflow or report.nan) and self._coefficient(batch) == batch.coefficient
        if is_right:
            self._gradients.give_back(batch.buffer)
            self._end(version)
        return is_right

    def roll_back(self, version: int) -> None:
        """Restore what the step to `version` has changed, and take the right step, or skip it after an overflow."""
        batch = self._batches[version]
        self.kept.restore()
        self.versions.reset(version - 1)
        batch.on_trial = False
        self._apply(batch, self._coefficient(batch))
        self._end(version)

    def _end(self, version: int) -> None:
        self._last_norm = self._batches.pop(version).report.grad_norm

    def give_up(self) -> None:
        """Take every step after its norm from now on, and free the copy."""
        self.kept = None
