"""Saving and loading training runs: the public functions of `megatron.trainer.checkpoint`.

    writer = CheckpointWriter(args.save)
    save_checkpoint(writer, RunParts(chunks, optimizer, scheduler, update), args=args, position=position)
    writer.finish()                                                     # before the process ends
    position = load_checkpoint(RunParts(chunks, optimizer, scheduler, update), args=args)

Both functions are collective: every rank must call them. The pipeline must be drained. Format and directory layout are
those of Megatron-LM's torch_dist checkpoints. See docs/checkpoints.md.

There are two stores of a run's state: the files of a checkpoint, and the memory of the job's ranks while its degrees
change. `run_state` and `Restoration` serve both, so a run resumes from either in the same way.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from megatron.pipeline.runtime.failure.agreement import agreed, on_rank_zero
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.pipeline.runtime.stages.megatron.checkpointed_versions import OlderVersions, SavedUpdate, older_versions
from megatron.pipeline.runtime.stages.megatron.optimizers import optimizers_of
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.flags.specification import Arguments
from megatron.trainer.checkpoint import arguments, directory
from megatron.trainer.checkpoint.loader import CHECKSUMS_ENTRY, CheckpointReader, read_common_state
from megatron.trainer.checkpoint.optimizer_state import (
    Anew,
    convert_loaded,
    convert_request,
    convert_step_counters,
    needs_conversion,
    require_same_groups,
)
from megatron.trainer.checkpoint.state import (
    FORMAT_VERSION,
    loading_metadata,
    model_state,
    new_parts,
    optimizer_state,
    regrouped,
    restore_random_state,
    sharded_random_state,
    sharding_metadata,
    trains_nothing,
    with_empty_groups,
    with_what_is_empty,
    without_parts,
)
from megatron.trainer.checkpoint.writer import CheckpointWriter
from megatron.trainer.plan.arrangement import as_at_first

# --- a run's state as entries of a store, and the restoration of a run from them --------------------------------------


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
    """The parts of one rank that have state: its model chunks (wrapped or not), optimizer, scheduler and update."""

    chunks: Sequence[torch.nn.Module]
    optimizer: MegatronOptimizer | None = None
    scheduler: object | None = None
    update: SavedUpdate | None = None

    def model_state(self, metadata: dict) -> dict[str, ShardedStateDict]:
        """The weights of the chunks in their newest version.

        As a side effect the parameters are set to that version.
        """
        if self.update is not None:
            self.update.show_newest()
        return model_state(self.chunks, metadata)

    def other_versions(self, iteration: int) -> OlderVersions:
        """The weight versions that a run drained after `iteration` batches needs besides the newest one."""
        return older_versions(self.chunks, self.update, iteration)


def run_state(
    parts: RunParts, metadata: dict, *, iteration: int, random_state: ShardedObject | None, with_optimizer: bool = True
) -> dict:
    """The entries that store a run which is drained after `iteration` batches. The tensors are the run's own.

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
        anew: reset the optimizer's moments and counter. Master weights and older versions that the store lacks are set
            to the weights (see `optimizer_state.Anew`). Only for a store that loads in place and leaves tensors that it
            lacks unchanged.
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
            require_same_groups(self.request["optimizer"], store.common.get("optimizer"), optimizer)
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
        """Apply the loaded `state` to the run. Raises CheckpointError for another learning rate schedule."""
        parts, optimizer = self._parts, self._parts.optimizer
        if self._anew is not None:
            self._anew.complete(state)
        for entry, chunk in zip(self.model, parts.chunks, strict=True):
            # an empty stage has no entry
            _load_module(unwrap_model(chunk), state.get(entry, {}), new=self._new)
        of_update = (state.get("pipeline") or {}).get("update")
        if parts.update is not None:
            self._older.restore(state)
            parts.update.restore_routers(of_update)
        if self._with_optimizer:
            loaded = state["optimizer"]
            if trains_nothing(optimizer):
                loaded = with_what_is_empty(loaded, optimizer)
            loaded = with_empty_groups(regrouped(loaded, optimizer), optimizer)
            if self._converts:
                loaded = convert_loaded(loaded, optimizer)
            convert_step_counters(loaded, optimizer)
            bounds, own = _bounds_of_rates(optimizer), _settings_of_steps(optimizer)
            with torch.no_grad():  # some of megatron.core's formats copy into parameters
                optimizer.load_state_dict(loaded)
            for flags, value in _settings_of_steps(optimizer).items():
                if value != own[flags]:
                    log_once(
                        f"{flags}: the optimizer goes on with {value}, the checkpoint's, and not with {own[flags]}; "
                        "--no-load-optim begins with the latter and no moments"
                    )
            if parts.scheduler is not None:
                _load_scheduler(parts.scheduler, state["opt_param_scheduler"], optimizer, bounds)
            if parts.update is not None:
                parts.update.load_state_dict(of_update)
        elif optimizer is not None:
            optimizer.reload_model_params()
        if "rng_state" in self.request:
            restore_random_state(state["rng_state"])


def log_once(message: str) -> None:
    """Log a warning on rank 0."""
    if torch.distributed.get_rank() == 0:
        logger.warning(message)


def _groups(optimizer: MegatronOptimizer) -> list[dict]:
    return [group for each in optimizers_of(optimizer) for group in each.param_groups]


_OF_STEPS = {"betas": "--adam-beta1 --adam-beta2", "eps": "--adam-eps", "momentum": "--sgd-momentum"}
"""Settings of a step that megatron.core's optimizers restore with their state -> the flags that give them."""


def _settings_of_steps(optimizer: MegatronOptimizer) -> dict[str, str]:
    """Flags -> the values that the optimizer has for them; all groups of parameters have the same."""
    return {
        flags: " ".join(map(str, value)) if isinstance(value := group[name], (list, tuple)) else str(value)
        for group in _groups(optimizer)
        for name, flags in _OF_STEPS.items()
        if name in group
    }


def _bounds_of_rates(optimizer: MegatronOptimizer) -> list[dict[str, float]]:
    """The largest and the smallest learning rate of each group, as the scheduler reads them."""
    return [{name: group[name] for name in ("max_lr", "min_lr")} for group in _groups(optimizer)]


def _load_scheduler(
    scheduler: object, state: dict, optimizer: MegatronOptimizer, bounds: list[dict[str, float]]
) -> None:
    """Load the scheduler's state.

    megatron.core loads the bounds of learning rates with the groups of parameters, whatever the flags say. `bounds`:
    those of this run.
    """
    groups = _groups(optimizer)
    if scheduler.override_opt_param_scheduler:
        for group, own in zip(groups, bounds, strict=True):
            group.update(own)
    scheduler.num_steps = 0  # megatron.core adds the loaded number to it
    try:
        scheduler.load_state_dict(state)
    except AssertionError as error:  # megatron.core's error for other settings on the command line
        raise _other_schedule(error) from error
    if scheduler.use_checkpoint_opt_param_scheduler:
        return
    for group, own in zip(groups, bounds, strict=True):
        loaded = {name: group.get(name, value) for name, value in own.items()}  # none in an older checkpoint
        if loaded != own:
            raise _other_schedule(f"a group of parameters has {loaded} there, and {own} here")


def _other_schedule(difference: object) -> CheckpointError:
    return CheckpointError(
        f"the schedule of learning rate and weight decay is not the checkpoint's ({difference}); pass "
        "--override-opt_param-scheduler to follow the command line or --use-checkpoint-opt_param-scheduler to "
        "follow the checkpoint"
    )


def _load_module(module: torch.nn.Module, state: dict, *, new: Sequence[str]) -> None:
    """Load a module's state strictly, except for the parts in `new` and Transformer Engine's extra states.

    A checkpoint of another transformer implementation lacks extra states.
    """
    missing, unexpected = module.load_state_dict(state, strict=False)
    misfit = [key for key in [*missing, *unexpected] if not key.endswith("_extra_state")]
    misfit = [key for key in misfit if key.split(".")[0] not in new]
    assert not misfit, f"sharded state and module disagree about {misfit[:4]}"


# --- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointPosition:
    """The position of a checkpoint in its run. All numbers are counted over the whole run, from 0."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    num_floating_point_operations_so_far: float = 0.0


def save_checkpoint(
    writer: CheckpointWriter,
    parts: RunParts,
    *,
    args: TrainConfig,
    position: CheckpointPosition,
    changes: dict | None = None,
    on_saved: Callable[[Path], None] | None = None,
) -> None:
    """Save a drained run as the checkpoint of `position.iteration`, and make it the latest.

    Args:
        args: stored as 'args'. The flags `no_save_optim`, `no_save_rng`, `async_save`, `ckpt_fully_parallel_save` and
            `use_distributed_optimizer` are honoured.
        parts: this rank's parts. The newest weight version is stored as the model; the older versions that policies
            such as 2bw need are stored, too.
        changes: the history of changes to the pipeline, if it may change during training; plain numbers, the same on
            all ranks.
        on_saved: called on rank 0 with the checkpoint's directory once the checkpoint is durable; with `async_save`
            later, from another thread.

    Raises:
        CheckpointError: on every rank, if any rank could not write (with `async_save`: from the next save or
            `writer.finish()`). Earlier checkpoints are untouched.
    """
    writer.finish()  # an asynchronous save uses the group over which frozen ranks get the optimizer's common state
    metadata = sharding_metadata(args)
    state = {
        "args": arguments.saved_arguments(
            args,
            iteration=position.iteration,
            consumed_train_samples=position.consumed_train_samples,
            consumed_valid_samples=position.consumed_valid_samples,
            **({} if getattr(args, "arrangement", None) is None else as_at_first(args)),
        ),
        "checkpoint_version": FORMAT_VERSION,
        "iteration": position.iteration,
        "num_floating_point_operations_so_far": position.num_floating_point_operations_so_far,
        "changes": changes,
        CHECKSUMS_ENTRY: True,
        **run_state(
            parts,
            metadata,
            iteration=position.iteration,
            random_state=None if args.no_save_rng else sharded_random_state(),
            with_optimizer=not args.no_save_optim,
        ),
    }
    writer.write(
        state,
        position.iteration,
        content_metadata=metadata,
        asynchronous=args.async_save,
        fully_parallel=args.ckpt_fully_parallel_save,
        on_saved=on_saved,
    )


def recorded_changes(args: TrainConfig) -> dict | None:
    """The `changes` in the checkpoint that `load_checkpoint` would load to resume a run; None if there are none.

    Collective: every rank must call it.
    """
    if args.load is None or args.finetune:
        return None

    def read() -> dict | None:
        location = directory.locate(args.load, step=args.ckpt_step)
        if location is None or location.is_release:
            return None
        return read_common_state(location).get("changes")

    return on_rank_zero(read)


def load_checkpoint(
    parts: RunParts, *, args: TrainConfig, body_only: bool = False, say: Callable[[str], None] = log_once
) -> CheckpointPosition | None:
    """Load the checkpoint of `args.load` into model, optimizer, scheduler, random generators and weight versions.

    The degrees of tensor, pipeline and data parallelism may differ from those of the save. The flags `ckpt_step`,
    `finetune` (weights only; the run starts at 0), `no_load_optim`, `no_load_rng` and `ckpt_fully_parallel_load` are
    honoured. With `skip_train` neither optimizer nor schedule is loaded, as no step is taken.

    Args:
        body_only: do not load the parts of a chunk that its `new_parts` name, nor those of its `optional_parts` that
            the checkpoint lacks; the saved model may have another head.
        say: called on every rank with a line for each difference from the saved run, such as the pipeline program or
            the order of samples.

    Returns:
        The position at which to resume; None if the directory has no checkpoint, so that the run starts from its
        initial weights.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged, missing, or of another model. No older checkpoint
            is loaded instead.
    """
    location = on_rank_zero(lambda: directory.locate(args.load, step=args.ckpt_step))
    if location is None:
        return None
    with agreed():
        common = read_common_state(location)
        arguments.check_same_model(args, common.get("args"), location.path, body_only=body_only)
    reader = CheckpointReader(location, common=common, fully_parallel=args.ckpt_fully_parallel_load)
    starts_anew = args.finetune or location.is_release
    if not location.is_named:
        say(f"{location.root / directory.TRACKER} is missing; taken is the only checkpoint, {location.path}")
    for line in () if starts_anew else arguments.what_changes(args, common.get("args")):
        say(f"checkpoint {location.path} {line}")
    with_optimizer = not (starts_anew or args.no_load_optim or args.skip_train)
    if with_optimizer:
        arguments.require_same_masters(args, common.get("args"), location.path)
    position = CheckpointPosition() if starts_anew else _position(common)
    new = new_parts(parts.chunks, reader.holds_prefix) if body_only else ()
    if new:
        log_once(f"not from checkpoint {location.path}, but as they were drawn: {', '.join(new)}")
    restoration = Restoration(
        reader,
        parts,
        loading_metadata(args, common.get("content_metadata")),
        iteration=position.iteration,
        random_state=None if starts_anew or args.no_load_rng else sharded_random_state(),
        with_optimizer=with_optimizer,
        new=new,
    )
    reader.respell(restoration.request)
    _judge_what_is_left_over(reader, restoration.model, args.dist_ckpt_strictness)
    restoration.complete(reader.load(restoration.request))
    return position


def with_checkpoint_arguments(args: Arguments, *, further: Collection[str] = ()) -> Arguments:
    """Take the model's arguments, and those named in `further`, from the checkpoint, for --use-checkpoint-args.

    Not collective: every rank reads the file itself. Raises CheckpointError if `args.load` has no checkpoint.
    """
    location = directory.locate(args.load, step=args.ckpt_step) if args.load else None
    if location is None:
        raise CheckpointError(f"--use-checkpoint-args needs a checkpoint, and --load {args.load} holds none")
    saved = read_common_state(location).get("args")
    return arguments.with_saved_arguments(args, saved, location.path, further=further)


def _judge_what_is_left_over(reader: CheckpointReader, model: dict, strictness: str) -> None:
    """Log the checkpoint's weights that the model lacks, or raise CheckpointError, as --dist-ckpt-strictness says."""
    if strictness.startswith(("ignore_", "return_")):
        return
    left_over = reader.left_over(model)
    if not left_over:
        return
    shown = ", ".join(left_over[:8]) + (f" and {len(left_over) - 8} more" if len(left_over) > 8 else "")
    line = f"checkpoint {reader.location.path} holds weights that the model has no place for: {shown}"
    if strictness.startswith("raise_"):
        raise CheckpointError(f"{line}; leave out --dist-ckpt-strictness {strictness} to load without them")
    log_once(line)


def _position(common: dict) -> CheckpointPosition:
    saved = common.get("args")
    return CheckpointPosition(
        iteration=common["iteration"],
        consumed_train_samples=getattr(saved, "consumed_train_samples", 0),
        consumed_valid_samples=getattr(saved, "consumed_valid_samples", 0),
        num_floating_point_operations_so_far=common.get("num_floating_point_operations_so_far", 0.0),
    )
