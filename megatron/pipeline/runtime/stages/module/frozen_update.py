"""The update of a rank whose stages are all frozen: its weights stay as they are, and batches pass through.

The rank takes part in the norm, which brings it the reports, and adds nothing to it. It does not wait for that: the
step of a batch comes first and makes a version that is the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.stages.module.reduction import ModuleReduction


class FrozenUpdate:
    """`job_group`: all ranks of the job, None for a single one; nobody else may use it. Its reports have a learning
    rate of 0.
    """

    def __init__(
        self, *, job_group: Any = None, loss_names: tuple[str, ...] = ("loss",), device: torch.device | str = "cpu"
    ) -> None:
        self._reduction = ModuleReduction(job_group=job_group, loss_names=loss_names, device=torch.device(device))
        self._reports: dict[int, BatchReport] = {}  # by the version that the batch leads to
        self._reduction.warm_up()

    def begin_batch(self, info: BatchInfo) -> None:
        self._reports[info.index + 1] = BatchReport(batch=info.index, num_samples=info.num_samples)

    def step(self, version: int) -> BatchReport:
        return self._reports[version]

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        self._reduction.reduce_norm(self._reports.pop(version), 0.0, stop_requests, losses)

    def begin_evaluation(self) -> None:
        """Its weights are always the newest."""
