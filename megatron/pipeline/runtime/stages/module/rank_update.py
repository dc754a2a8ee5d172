"""Make the weight versions and the weight update of a rank from a weight policy.

Stages that step together share one `ModuleUpdate` and its versions. Under stale weights (FTPipe) each stage steps
separately and has its own.
"""

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
"""Stage of this rank -> name -> trained parameter. Two stages may share a parameter."""


def make_versions(weights: WeightPolicy, of_stage: OfStage, *, num_stages: int, first_version: int) -> dict[int, Any]:
    """Stage -> its weight versions; stages that step together share them."""
    if weights.refreshes:
        plain = partial(WeightVersions, window=1)
        make = partial(AheadVersions, ahead=weights.ahead) if weights.ahead else plain
        return {index: make(own, first_version=first_version) for index, own in of_stage.items()}
    if weights.predicts:
        return dict.fromkeys(of_stage, PredictedVersions(together(of_stage), first_version=first_version))
    window = max(weights.max_live_versions(index, num_stages) for index in of_stage)
    return dict.fromkeys(of_stage, WeightVersions(together(of_stage), window=window, first_version=first_version))


def steps_of(weights: WeightPolicy, of_stage: OfStage) -> dict[int, dict[str, nn.Parameter]]:
    """Key -> the parameters that one update steps. The key is a stage, or `TOGETHER` if all stages step together."""
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
    """Make the weight update of a rank. Collective over the job.

    Args:
        steps: the result of `steps_of`.
        versions: the result of `make_versions`.
        stepping: key of `steps` -> arguments `optimizer` and `scheduler` of its `ModuleUpdate`.
        weights: the weight policy.
        job_group, device: as for `ModuleUpdate`.
        counts, skips_unused: as for `ModuleUpdate`.
        options: further arguments of the `ModuleUpdate` of a rank whose stages step together; else ignored.

    Returns:
        The weight update for the engine, and the updates that step, by the keys of `steps`.
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
    """Name -> parameter over all stages. A parameter of several stages has the name of the first stage."""
    names = {parameter: name for own in reversed(of_stage.values()) for name, parameter in own.items()}
    return {name: parameter for own in of_stage.values() for name, parameter in own.items() if names[parameter] == name}


# --- stages that step separately


class StageUpdates(FrozenUpdate):
    """The update of a rank whose stages step separately, as under stale weights (FTPipe).

    The stages of the rank may be at different batches, so each has its own update. The report of a batch is for the
    whole rank. It is complete when all stages have stepped and the norms have been added up over the job.

    Args:
        updates: stage -> its update, made without groups, clipping and tied parameters.
        options: arguments of `FrozenUpdate`.
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
        """Complete the report of a batch that all stages have stepped. Called on the chain's thread."""
        norms, rates = zip(*(update.take_stepped(version) for update in self._updates.values()), strict=True)
        report = self._reports.pop(version)
        report.learning_rate = rates[0]
        report.skipped = not self._reduction.reduce_norm(report, sum(norms), stop_requests, losses)

    def begin_evaluation(self) -> None:
        self.show_newest()

    def show_newest(self) -> None:
        for update in self._updates.values():
            update.show_newest()
