"""The state of a rank from which a run continues exactly, as a dict of tensors and plain values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from megatron.pipeline.runtime.activations.saved_activations import RandomState
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions

_FORMAT = 1


def state_of(
    modules: Mapping[int, nn.Module],
    updates: Mapping[int, ModuleUpdate],
    *,
    description: Mapping[str, Any],
    progress: tuple[int, int],
    reports: list[BatchReport],
    device: torch.device,
) -> dict[str, Any]:
    """The state of a rank, with copies of its tensors on the CPU.

    Precondition: the rank is drained, and its modules show the newest weights.

    Args:
        description: the properties that must be equal when the run continues.
        progress: number of batches and of microbatches begun.
        reports: the reports that no call has returned yet.
    """
    random_state = RandomState.capture(device)
    return {
        "format": _FORMAT,
        "description": dict(description),
        "batches": progress[0],
        "microbatches": progress[1],
        "modules": {index: _copied(module.state_dict()) for index, module in modules.items()},
        "updates": {key: _state_of_update(update) for key, update in updates.items()},
        "random": {"cpu": random_state.cpu, "cuda": random_state.cuda},
        "reports": [asdict(report) for report in reports],
    }


def require_loadable(state: Any, description: Mapping[str, Any]) -> None:
    """Raise ValueError if a rank with the properties in `description` cannot continue from `state`."""
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        raise ValueError("this is no state of a Pipeline's rank; give what its state_dict returned")
    saved = state["description"]
    for name, value in description.items():
        if saved.get(name) != value:
            raise ValueError(
                f"the state was saved with {name} {saved.get(name)}, and this rank has {value}; load the state of this "
                "rank, of the same schedule"
            )


def load_state(
    state: Mapping[str, Any],
    modules: Mapping[int, nn.Module],
    updates: Mapping[int, ModuleUpdate],
    *,
    device: torch.device,
) -> tuple[tuple[int, int], list[BatchReport]]:
    """Load a state for which `require_loadable` has passed.

    Precondition: the rank is drained, and its modules show the newest weights.

    Returns:
        (batches begun, microbatches begun), and the reports that no call has returned yet.

    Raises:
        ValueError: the state does not fit the modules or the optimizers.
    """
    try:
        for index, module in modules.items():
            module.load_state_dict(state["modules"][index])
        for key, update in updates.items():
            _load_update(update, copy.deepcopy(state["updates"][key]))
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"the state does not fit this rank's modules or optimizer: {error}") from error
    random_state = state["random"]
    RandomState(random_state["cpu"].cpu(), None if device.type != "cuda" else random_state["cuda"]).restore(device)
    return (state["batches"], state["microbatches"]), [BatchReport(**each) for each in state["reports"]]


def _state_of_update(update: ModuleUpdate) -> dict[str, Any]:
    versions = update.versions
    # The modules' own state holds the newest version, unless the modules show a prediction.
    kept = versions.live() if isinstance(versions, PredictedVersions) else versions.live()[:-1]
    return {
        "newest": versions.newest,
        "versions": {version: _copied(versions.tensors(version)) for version in kept},
        "clip_factor": update.clip_factor,
        "mean_count": update.mean_count,
        "before": {name: _copied(tensor) for name, tensor in update.values_before_step().items()},
        "optimizer": _copied(update.optimizer.state_dict()),
        "scheduler": None if update.scheduler is None else _copied(update.scheduler.state_dict()),
    }


def _load_update(update: ModuleUpdate, state: dict[str, Any]) -> None:
    versions, newest = update.versions, state["newest"]
    if isinstance(versions, PredictedVersions):
        versions.restart(newest, state["versions"][newest])
    else:
        versions.restore({**state["versions"], newest: versions.newest_tensors()})
    update.restore_before_step(state.get("before", {}))
    update.clip_factor, update.mean_count = state["clip_factor"], state.get("mean_count", 1.0)
    update.optimizer.load_state_dict(state["optimizer"])
    if (update.scheduler is None) != (state["scheduler"] is None):
        raise ValueError("the state was saved with a learning-rate scheduler on one side only; give the same")
    if update.scheduler is not None:
        update.scheduler.load_state_dict(state["scheduler"])


def _copied(values: Any) -> Any:
    """A deep copy of `values`, with tensors on the CPU."""
    return tree_map(
        lambda each: each.detach().to("cpu", copy=True) if isinstance(each, Tensor) else copy.deepcopy(each), values
    )
