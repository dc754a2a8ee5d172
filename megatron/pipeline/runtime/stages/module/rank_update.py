"""Weight versions and updates of a rank's modules, as the weights of a schedule want them: one for all of its stages,
or, where each stage steps by itself, one for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.runtime.stages.module.losses import Counts, by_microbatches
from megatron.pipeline.runtime.stages.module.stage_updates import StageUpdates
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate
from megatron.pipeline.runtime.update.ahead_versions import AheadVersions
from megatron.pipeline.runtime.update.predicted_versions import PredictedVersions
from megatron.pipeline.runtime.update.versions import WeightVersions

TOGETHER = -1
"""The key of the update of a rank whose stages step together."""

OfStage = Mapping[int, Mapping[str, nn.Parameter]]
"""stage -> name -> parameter: those that are trained, of this rank's stages. Two stages may share one."""


def make_versions(weights: WeightPolicy, of_stage: OfStage, *, num_stages: int, first_version: int) -> dict[int, Any]:
    """stage -> its versions; stages that step together share them."""
    if weights.refreshes:
        plain = partial(WeightVersions, window=1)
        make = partial(AheadVersions, ahead=weights.ahead) if weights.looks_ahead else plain
        return {index: make(own, first_version=first_version) for index, own in of_stage.items()}
    if weights.predicts:
        return dict.fromkeys(of_stage, PredictedVersions(together(of_stage), first_version=first_version))
    window = max(weights.max_live_versions(index, num_stages) for index in of_stage)
    return dict.fromkeys(of_stage, WeightVersions(together(of_stage), window=window, first_version=first_version))


def steps_of(weights: WeightPolicy, of_stage: OfStage) -> dict[int, dict[str, nn.Parameter]]:
    """What is stepped together: the parameters by the stage or, where the rank steps as one, under `TOGETHER`."""
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
    """(what the engine takes, the updates that step, by the keys of `steps_of`). Collective over the job.

    Args:
        steps: of `steps_of`.
        stepping: key -> `optimizer` and `scheduler` of an update.
        counts, skips_unused: as `ModuleUpdate` takes them.
        options: of `ModuleUpdate`, where the rank steps as one.
    """
    common = {
        "num_grad_buffers": weights.max_gradient_buffers, "device": device, "counts": counts,
        "skips_unused": skips_unused,
    }  # fmt: skip
    if weights.refreshes:
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
    """Those of all stages, each once."""
    names = {parameter: name for own in reversed(of_stage.values()) for name, parameter in own.items()}
    return {name: parameter for own in of_stage.values() for name, parameter in own.items() if names[parameter] == name}
