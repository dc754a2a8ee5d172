"""The weight update of a rank whose megatron.core chunks are all frozen.

The weights never change, but the rank takes part in the reduction of the norm, with a norm of 0, because the reports
come with it. The rank does not wait for the norm: the step of a batch may come before its norm. Learning rate and loss
scale advance with the reports, as on every other rank, since callers may read them on this rank and its part of a
checkpoint contains them.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta

from torch import Tensor

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.pipeline.program.weight_policies import FLUSH, WeightPolicy
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.copied_stages import CopyRanks
from megatron.pipeline.runtime.stages.megatron.base_update import BaseUpdate
from megatron.pipeline.runtime.stages.megatron.checkpointed_versions import SavedVersions
from megatron.pipeline.runtime.stages.megatron.reduction import warm_up_common


class _NoVersions(SavedVersions):
    """The interface of weight versions for checkpoints, without weights. Inherited methods do nothing."""

    newest = 0

    def newest_tensors(self) -> dict[str, Tensor]:
        return {}

    def slot_of(self, version: int) -> int:
        return 0

    def live(self) -> list[int]:
        return [0]

    def tensors(self, version: int) -> dict[str, Tensor]:
        return {}


class MegatronFrozenUpdate(BaseUpdate):
    """`WeightUpdate` of a rank without trainable parameters.

    Args:
        chunks: the model chunks of the rank, each wrapped in megatron.core's DDP.
        optimizer: megatron.core's optimizer without parameters; its groups have the learning rates.
        num_layers: the number of layers of the model, if reports have the norms of layers; else 0.
        scheduler, weights, loss_names, timeout, rank_metrics, copies: as for `MegatronWeightUpdate`.
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
        copies: CopyRanks | None = None,
    ) -> None:
        super().__init__(optimizer, scheduler, chunks, weights=weights, loss_names=loss_names)
        self.chunks = chunks
        self._nothing = (0.0,) * num_layers
        self._connect(timeout, rank_metrics, copies)
        self._reports: dict[int, BatchReport] = {}  # key: the version that the batch's step makes
        self.versions = _NoVersions()
        warm_up_common(chunks, self._groups)

    def regroup(self, copies: CopyRanks | None) -> None:
        """As `MegatronWeightUpdate.regroup`."""
        assert not self._reports
        self._regroup(copies)
        warm_up_common(self.chunks, self._groups)

    def begin_batch(self, info: BatchInfo) -> None:
        """Begin a report. Its loss scale is not known yet on this rank, and not needed before the norm."""
        self._reports[info.index + 1] = BatchReport(batch=info.index, num_samples=info.num_samples)

    def step(self, version: int) -> BatchReport:
        """Return the report of the batch, which `reduce_norm` completes."""
        return self._reports[version]

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        """Complete the batch's report, and advance learning rate and loss scale."""
        report = self._reports.pop(version)
        report.loss_scale = self.scales.of_batch(report.batch)
        self._complete(report, 0.0, stop_requests, losses, layers_squared=self._nothing)
        self._note(report)
        self._advance(report)
        self._last_norm = report.grad_norm

    def begin_evaluation(self) -> None:
        """Do nothing: the parameters always show the newest weights."""

    def show_newest(self) -> None:
        """Do nothing: the parameters always show the newest weights."""
