"""The weight update of a rank of a captured model whose parameters are all frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.pipeline.runtime.contract.stage import BatchInfo
from megatron.pipeline.runtime.stages.module.update import FrozenUpdate
from megatron.pipeline.runtime.update.versions import WeightVersions


class FrozenRank(FrozenUpdate):
    """`FrozenUpdate` whose reports are those of the other ranks, since the first rank writes the log.

    Args:
        versions, optimizer: of no parameters, kept so that checkpoints of all ranks have one form.
        scheduler: of `optimizer`; it goes on, so layers that train again have the right learning rate.
        num_replicas: replicas of the pipeline.
        options: arguments of `FrozenUpdate`.
    """

    scales = None

    def __init__(
        self, *, versions: WeightVersions, optimizer: torch.optim.Optimizer, scheduler: Any, num_replicas: int,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        self.versions, self.optimizer, self.scheduler = versions, optimizer, scheduler
        self._num_replicas = num_replicas
        self._sizes: dict[int, int] = {}

    def begin_batch(self, info: BatchInfo) -> None:
        super().begin_batch(info)
        self._sizes[info.index + 1] = info.num_microbatches

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        report, size = self._reports.pop(version), self._sizes.pop(version)
        count = self._reduction.reduce_norm(report, 0.0, stop_requests, losses) / self._num_replicas
        report.grad_norm /= count / size or 1.0
        report.learning_rate = self.optimizer.param_groups[0]["lr"]
        report.skipped = report.overflow or not count
        if not report.skipped:
            self.scheduler.step()

    def show_newest(self) -> None:
        """Do nothing: the parameters always show the newest weights."""
