"""The update of a rank whose megatron.core chunks are all frozen: weights do not change, and batches pass through.

The rank takes part in the norm, to which it adds nothing, because the norm brings the reports; it does not wait for it,
so the step of a batch comes before its norm. Learning rate and loss scale advance with the reports, as on every other
rank, since callers may ask the rank for them and its part of a checkpoint contains them.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.pipeline.program.weight_policies import FLUSH, WeightPolicy
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.stages.megatron.core_update import CoreUpdate
from megatron.pipeline.runtime.stages.megatron.reduction import warm_up_common


class _NoVersions:
    """Weight versions without weights, for checkpoints."""

    newest = 0

    def show_newest(self) -> None:
        """They are shown."""

    def newest_tensors(self) -> dict[str, Tensor]:
        return {}

    def slot_of(self, version: int) -> int:
        return 0

    def reset(self, *versions: int) -> None:
        """Nothing to forget."""

    def live(self) -> list[int]:
        return [0]

    def tensors(self, version: int) -> dict[str, Tensor]:
        return {}

    def restore(self, mapping: dict[int, dict[str, Tensor]]) -> None:
        """Nothing to restore."""


class MegatronFrozenUpdate(CoreUpdate):
    """`WeightUpdate` of a rank without trainable parameters.

    Args:
        chunks: the rank's, each wrapped in megatron.core's DDP.
        optimizer: megatron.core's, of no parameters; its groups have the learning rates.
        num_layers: of the model, where the norms of layers come with the reports; 0: they do not.
        scheduler, weights, loss_names, timeout, rank_metrics: as for `MegatronWeightUpdate`.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler | None = None,
        *,
        weights: WeightPolicy = FLUSH,
        num_layers: int = 0,
        loss_names: tuple[str, ...] = ("lm loss",),
        timeout: timedelta | None = None,
        rank_metrics: Mapping[str, Callable[[], float]] | None = None,
    ) -> None:
        super().__init__(optimizer, scheduler, weights=weights, loss_names=loss_names)
        self.chunks = chunks
        self._nothing = (0.0,) * num_layers
        self._connect(timeout, rank_metrics)
        self._reports: dict[int, BatchReport] = {}  # by the version that the batch leads to
        self.versions = _NoVersions()
        with torch.no_grad():
            warm_up_common(chunks, self._groups.world)

    def begin_batch(self, info: BatchInfo) -> None:
        """A batch begins; its loss scale is not known here yet, nor needed."""
        self._reports[info.index + 1] = BatchReport(batch=info.index, num_samples=info.num_samples)

    def step(self, version: int) -> BatchReport:
        """The report of the batch; `reduce_norm` completes it."""
        return self._reports[version]

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        """Complete the batch's report; advance learning rate and loss scale."""
        report = self._reports.pop(version)
        report.loss_scale = self._decisions.scales.of_batch(report.batch)
        self._decisions.complete(report, 0.0, stop_requests, losses, layers_squared=self._nothing)
        self._decisions.note(report)
        self._decisions.advance(report)
        self._last_norm = report.grad_norm

    def begin_evaluation(self) -> None:
        """Nothing to do: the weights are always the newest."""

    def show_newest(self) -> None:
        """They are shown."""
