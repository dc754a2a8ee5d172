"""The conversion of a run's state to entries of a store, and the restoration of a run from a store.

There are two stores: the files of a checkpoint, and the memory of the job's ranks while its degrees change. This module
has their common part, so that a run resumes from both in the same way.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.pipeline.runtime.stages.megatron.checkpointed_versions import (
    OlderVersions,
    SavedUpdate,
    older_versions,
)
from megatron.trainer.checkpoint.optimizer_state import (
    Anew,
    convert_loaded,
    convert_request,
    convert_step_counters,
    needs_conversion,
)
from megatron.trainer.checkpoint.state import (
    model_state,
    optimizer_state,
    regrouped,
    restore_random_state,
    trains_nothing,
    with_empty_groups,
    with_what_is_empty,
    without_parts,
)

logger = logging.getLogger(__name__)


class StateStore(Protocol):
    """A store of a run's state: a checkpoint opened for loading, or the ranks' memory."""

    common: dict
    """Entries that are the same for all ranks."""

    def holds(self, sharded: ShardedObject) -> bool: ...

    def holds_key(self, key: str) -> bool: ...

    def holds_prefix(self, prefix: str) -> bool: ...

    def load(self, state: ShardedStateDict) -> dict: ...


@dataclass(frozen=True)
class RunParts:
    """The parts of one rank that have state: its model chunks, wrapped or not, with optimizer, scheduler and update."""

    chunks: Sequence[torch.nn.Module]
    optimizer: MegatronOptimizer | None = None
    scheduler: object | None = None
    update: SavedUpdate | None = None

    def model_state(self, metadata: dict) -> dict[str, ShardedStateDict]:
        """The chunks' weights in the newest version. As a side effect the chunks' parameters show that version."""
        if self.update is not None:
            self.update.show_newest()
        return model_state(self.chunks, metadata)

    def other_versions(self, iteration: int) -> OlderVersions:
        """The weight versions that a run drained after `iteration` batches needs besides the newest one."""
        return older_versions(self.chunks, self.update, iteration)


def run_state(
    parts: RunParts, metadata: dict, *, iteration: int, random_state: ShardedObject | None, with_optimizer: bool = True
) -> dict:
    """The entries for a store of a run that is drained after `iteration` batches. The tensors are the run's own.

    Args:
        metadata: the sharding of the state (see `state`).
        random_state: the state of the random number generators; None leaves it out.
        with_optimizer: include optimizer and scheduler.
    """
    model = parts.model_state(metadata)
    state = {"pipeline": {"update": parts.update.state_dict() if parts.update else None}, **model}
    if parts.optimizer is not None and with_optimizer:
        state["optimizer"] = optimizer_state(parts.optimizer, model, metadata, is_loading=False)
        if parts.scheduler is not None:
            state["opt_param_scheduler"] = parts.scheduler.state_dict()
    if random_state is not None:
        state["rng_state"] = random_state
    if parts.update is not None:
        state |= parts.other_versions(iteration).to_save(model)
    return state


class Restoration:
    """The restoration of a run from a store: the store loads the entries of `request`, and `complete` applies them.

    Args:
        store: the store with the state.
        metadata: the sharding of the state.
        iteration: the number of batches after which the run resumes.
        random_state: the entry of the store's random state to load; None leaves the generators unchanged.
        with_optimizer: load optimizer and scheduler; otherwise the optimizer starts from the weights.
        new: names of parts of the model that are not loaded and keep their initial values.
        anew: reset the optimizer's moments and counter; masters and older versions that the store lacks become the
            weights (see `optimizer_state.Anew`). Only for a store that loads in place, and leaves tensors that it lacks
            unchanged.
    """

    def __init__(
        self,
        store: StateStore,
        parts: RunParts,
        metadata: dict,
        *,
        iteration: int,
        random_state: ShardedObject | None,
        with_optimizer: bool = True,
        new: Sequence[str] = (),
        anew: bool = False,
    ) -> None:
        self._parts, optimizer, self._new = parts, parts.optimizer, new
        self.model = without_parts(parts.model_state(metadata), new)
        self.request: ShardedStateDict = dict(self.model)
        self._with_optimizer = with_optimizer and optimizer is not None
        if self._with_optimizer:
            self.request["optimizer"] = optimizer_state(optimizer, self.model, metadata, is_loading=True)
            self._converts = needs_conversion(optimizer, store.common.get("optimizer"))
            if self._converts:
                self.request["optimizer"] = convert_request(self.request["optimizer"], store.holds_key)
        if random_state is not None and store.holds(random_state):
            self.request["rng_state"] = random_state
        elif random_state is not None:
            log_once("random number generators start from the seed: the checkpoint has none for these parallel degrees")
        if parts.update is not None:
            self._older = parts.other_versions(iteration)
            self.request |= self._older.to_load(self.model, store.holds_prefix)
        self._anew = Anew.of(self.request, self.model, store.holds_key) if anew else None

    def complete(self, state: dict) -> None:
        """Apply the loaded `state` to the run. Raises CheckpointError for another schedule of the learning rate."""
        parts, optimizer = self._parts, self._parts.optimizer
        if self._anew is not None:
            self._anew.complete(state)
        for entry, chunk in zip(self.model, parts.chunks, strict=True):
            _load_module(
                unwrap_model(chunk), state.get(entry, {}), new=self._new
            )  # an empty stage has no entry; the call finds missing tensors
        if parts.update is not None:
            self._older.restore(state)
            parts.update.restore_routers((state.get("pipeline") or {}).get("update"))
        if self._with_optimizer:
            loaded = state["optimizer"]
            if trains_nothing(optimizer):
                loaded = with_what_is_empty(loaded, optimizer)
            loaded = with_empty_groups(regrouped(loaded, optimizer), optimizer)
            if self._converts:
                loaded = convert_loaded(loaded, optimizer)
            convert_step_counters(loaded, optimizer)
            with torch.no_grad():  # some of megatron.core's formats copy into parameters
                optimizer.load_state_dict(loaded)
            if parts.scheduler is not None:
                _load_scheduler(parts.scheduler, state["opt_param_scheduler"])
            if parts.update is not None:
                parts.update.load_state_dict((state.get("pipeline") or {}).get("update"))
        elif optimizer is not None:
            optimizer.reload_model_params()
        if "rng_state" in self.request:
            restore_random_state(state["rng_state"])


def log_once(message: str) -> None:
    """Log a warning on rank 0."""
    if torch.distributed.get_rank() == 0:
        logger.warning(message)


def _load_scheduler(scheduler: object, state: dict) -> None:
    try:
        scheduler.load_state_dict(state)
    except AssertionError as error:  # megatron.core's error for other settings on the command line
        raise CheckpointError(
            f"the schedule of learning rate and weight decay is not the checkpoint's ({error}); pass "
            "--override-opt_param-scheduler to follow the command line or --use-checkpoint-opt_param-scheduler to "
            "follow the checkpoint"
        ) from error


def _load_module(module: torch.nn.Module, state: dict, *, new: Sequence[str]) -> None:
    """Load a module's state strictly, except for the parts `new` and Transformer Engine's extra states.

    A checkpoint of another implementation lacks extra states.
    """
    missing, unexpected = module.load_state_dict(state, strict=False)
    misfit = [key for key in [*missing, *unexpected] if not key.endswith("_extra_state")]
    misfit = [key for key in misfit if key.split(".")[0] not in new]
    assert not misfit, f"sharded state and module disagree about {misfit[:4]}"
