"""The weight updates of a rank's stages, each by itself: where weights are stale (FTPipe), stages of one rank are at
different batches.

Each stage has an update of its own, with its gradients, optimizer and scheduler. What concerns the rank is here: the
report of a batch, which is complete when all stages have stepped and the norms are added up over the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.stages.module.reduction import ModuleReduction
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate


class StageUpdates:
    """`updates`: stage -> its update, made without groups, clipping or ties. `job_group`: all ranks of the job, None
    for a single one; used from the thread of the reports, so nobody else may use it.
    """

    def __init__(
        self,
        updates: Mapping[int, ModuleUpdate],
        *,
        job_group: Any = None,
        loss_names: tuple[str, ...] = ("loss",),
        device: torch.device | str = "cpu",
    ) -> None:
        self._updates = dict(updates)
        self._reduction = ModuleReduction(job_group=job_group, loss_names=loss_names, device=torch.device(device))
        self._reports: dict[int, BatchReport] = {}  # by the version that the batch leads to
        self._reduction.warm_up()

    def of_stage(self, stage: int) -> ModuleUpdate:
        return self._updates[stage]

    def begin_batch(self, info: BatchInfo) -> None:
        self._reports[info.index + 1] = BatchReport(batch=info.index, num_samples=info.num_samples)
        for update in self._updates.values():
            update.begin_batch(info)

    def step(self, version: int) -> BatchReport:
        """All stages have stepped."""
        return self._reports[version]

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        """Chain thread, behind the steps: complete the report."""
        norms, rates = zip(*(update.take_stepped(version) for update in self._updates.values()), strict=True)
        report = self._reports.pop(version)
        report.learning_rate = rates[0]
        report.skipped = not self._reduction.reduce_norm(report, sum(norms), stop_requests, losses)

    def begin_evaluation(self) -> None:
        self.show_newest()

    def show_newest(self) -> None:
        for update in self._updates.values():
            update.show_newest()
