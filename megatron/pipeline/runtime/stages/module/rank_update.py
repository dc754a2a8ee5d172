"""Weight versions and updates of a rank: one for all of its stages, or one for each where stages step alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.runtime.contract.stage import BatchInfo
from megatron.pipeline.runtime.stages.module.stage import Counts, by_microbatches
from megatron.pipeline.runtime.stages.module.update import FrozenUpdate, ModuleUpdate
from megatron.pipeline.runtime.update.versions import AheadVersions, WeightVersions
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions

TOGETHER = -1
"""The key of the update of a rank whose stages step together."""

OfStage = Mapping[int, Mapping[str, nn.Parameter]]
"""stage -> name -> parameter: those that are trained, of this rank's stages. Two stages may share one."""


def make_versions(weights: WeightPolicy, of_stage: OfStage, *, num_stages: int, first_version: int) -> dict[int, Any]:
    """stage -> its versions; stages that step together share them."""
    if weights.refreshes:
        plain = partial(WeightVersions, window=1)
        make = partial(AheadVersions, ahead=weights.ahead) if weights.ahead else plain
        return {index: make(own, first_version=first_version) for index, own in of_stage.items()}
    if weights.predicts:
        return dict.fromkeys(of_stage, PredictedVersions(together(of_stage), first_version=first_version))
    window = max(weights.max_live_versions(index, num_stages) for index in of_stage)
    return dict.fromkeys(of_stage, WeightVersions(together(of_stage), window=window, first_version=first_version))


def steps_of(weights: WeightPolicy, of_stage: OfStage) -> dict[int, dict[str, nn.Parameter]]:
    """The parameters that are stepped together: by stage or, where the rank steps as one, under `TOGETHER`."""
    if weights.refreshes:
        return {index: dict(own) for index, own in of_stage.items()}
    return {TOGETHER: together(of_stage)}


def make_updates(
    steps: Mapping[int, Mapping[str, nn.Parameter]],
    versions: Mapping[int, WeightVersions],
    stepping: Mapping[int, Mapping[str, Any]],
    *,
    weights: WeightPolicy,
    job_group: Any,
    device: torch.device | str,
    counts: Counts = by_microbatches,
    skips_unused: bool = False,
    **options: Any,
) -> tuple[ModuleUpdate | StageUpdates, dict[int, ModuleUpdate]]:
    """(the engine's weight update, the updates that step, by the keys of `steps_of`). Collective over the job.

    Args:
        steps: the result of `steps_of`.
        stepping: key -> `optimizer` and `scheduler` of an update.
        counts, skips_unused: as `ModuleUpdate` takes them.
        options: of `ModuleUpdate`, where the rank steps as one; stages that step by themselves have no use for them.
    """
    common = {
        "num_grad_buffers": weights.max_gradient_buffers, "device": device, "counts": counts,
        "skips_unused": skips_unused,
    }  # fmt: skip
    if TOGETHER not in steps:
        updates = {
            key: ModuleUpdate(own, versions=versions[key], **stepping[key], **common) for key, own in steps.items()
        }
        return StageUpdates(updates, job_group=job_group, device=device), updates
    (versions_of_rank,) = set(versions.values())
    update = ModuleUpdate(
        steps[TOGETHER], versions=versions_of_rank, job_group=job_group, **stepping[TOGETHER], **common, **options
    )
    return update, {TOGETHER: update}


def together(of_stage: OfStage) -> dict[str, nn.Parameter]:
    """The parameters of all stages, each once."""
    names = {parameter: name for own in reversed(of_stage.values()) for name, parameter in own.items()}
    return {name: parameter for own in of_stage.values() for name, parameter in own.items() if names[parameter] == name}


# --- where each stage steps by itself


class StageUpdates(FrozenUpdate):
    """An update for each stage: where weights are stale (FTPipe), stages of one rank are at different batches. The
    report of a batch concerns the rank: it is complete when all have stepped and the norms are added up over the job.

    `updates`: stage -> its update, made without groups, clipping or ties. `options`: of `FrozenUpdate`, since the rank
    itself steps nothing.
    """

    def __init__(self, updates: Mapping[int, ModuleUpdate], **options: Any) -> None:
        super().__init__(**options)
        self._updates = dict(updates)

    def of_stage(self, stage: int) -> ModuleUpdate:
        return self._updates[stage]

    def begin_batch(self, info: BatchInfo) -> None:
        super().begin_batch(info)
        for update in self._updates.values():
            update.begin_batch(info)

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
