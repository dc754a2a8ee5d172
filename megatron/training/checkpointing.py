"""Saving and loading training runs: the face of `megatron.training.checkpoint`.

    writer = CheckpointWriter(args.save)
    save_checkpoint(writer, args=args, position=position, chunks=..., optimizer=..., scheduler=..., update=...)
    writer.finish()                                                     # before the process ends
    position = load_checkpoint(args=args, chunks=..., optimizer=..., scheduler=..., update=...)

Both are collective over all ranks, and are called where the pipeline is drained. Format and directory layout are those
of Megatron-LM's torch_dist checkpoints. See docs/checkpoints.md.
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from megatron.pipeline.weights import WeightPolicy
from megatron.training.checkpoint import arguments, directory, optimizer_formats
from megatron.training.checkpoint.agreement import agreed, on_rank_zero
from megatron.training.checkpoint.errors import CheckpointError
from megatron.training.checkpoint.loader import CHECKSUMS_ENTRY, CheckpointReader, read_common_state
from megatron.training.checkpoint.older_versions import OlderVersions, WeightVersions
from megatron.training.checkpoint.predicted_version import PredictedVersion
from megatron.training.checkpoint.random_state import restore_random_state, sharded_random_state
from megatron.training.checkpoint.state import (
    FORMAT_VERSION,
    model_state,
    new_parts,
    optimizer_state,
    sharding_metadata,
    without_parts,
)
from megatron.training.checkpoint.writer import CheckpointWriter

__all__ = [
    "CheckpointError",
    "CheckpointPosition",
    "CheckpointWriter",
    "apply_checkpoint_arguments",
    "load_checkpoint",
    "save_checkpoint",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointPosition:
    """Where in the run a checkpoint stands. Everything counts over the whole run, from 0."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    num_floating_point_operations_so_far: float = 0.0


class WeightUpdate(Protocol):
    """What is asked of the pipeline's weight update beyond its optimizer."""

    versions: WeightVersions
    weights: WeightPolicy
    replicas_predict_apart: bool

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict | None) -> None: ...


def save_checkpoint(
    writer: CheckpointWriter,
    *,
    args: argparse.Namespace,
    position: CheckpointPosition,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None = None,
    scheduler: object | None = None,
    update: WeightUpdate | None = None,
    on_saved: Callable[[Path], None] | None = None,
) -> None:
    """Save the run, drained, as the checkpoint of `position.iteration`, and make it the latest.

    Args:
        args: honours `no_save_optim`, `no_save_rng`, `async_save`, `ckpt_fully_parallel_save`,
            `use_distributed_optimizer`; stored as 'args'.
        chunks: this rank's model chunks, wrapped or not; the newest weight version is stored as the model.
        update: under 2bw and the like its versions hold the older weights, which are stored too.
        on_saved: called on rank 0 with the checkpoint's directory once it is durable; with `async_save` later, from
            another thread.

    Raises:
        CheckpointError: on every rank, if any could not write (with `async_save`: from the next save or
            `writer.finish()`). Earlier checkpoints are untouched.
    """
    metadata = sharding_metadata(args)
    if update is not None:
        update.versions.show_newest()
    model = model_state(chunks, metadata)
    state = {
        "args": arguments.saved_arguments(
            args,
            iteration=position.iteration,
            consumed_train_samples=position.consumed_train_samples,
            consumed_valid_samples=position.consumed_valid_samples,
        ),
        "checkpoint_version": FORMAT_VERSION,
        "iteration": position.iteration,
        "num_floating_point_operations_so_far": position.num_floating_point_operations_so_far,
        "pipeline": {"update": update.state_dict() if update else None},
        CHECKSUMS_ENTRY: True,
        **model,
    }
    if optimizer is not None and not args.no_save_optim:
        state["optimizer"] = optimizer_state(optimizer, model, metadata, is_loading=False)
        if scheduler is not None:
            state["opt_param_scheduler"] = scheduler.state_dict()
    if not args.no_save_rng:
        state["rng_state"] = sharded_random_state()
    if update is not None:
        state |= _other_versions(chunks, update, position.iteration).to_save(model)
    writer.write(
        state,
        position.iteration,
        content_metadata=metadata,
        asynchronous=args.async_save,
        fully_parallel=args.ckpt_fully_parallel_save,
        on_saved=on_saved,
    )


def load_checkpoint(
    *,
    args: argparse.Namespace,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None = None,
    scheduler: object | None = None,
    update: WeightUpdate | None = None,
    body_only: bool = False,
) -> CheckpointPosition | None:
    """Load the checkpoint of `args.load` into model, optimizer, scheduler, generators and weight versions.

    Degrees of tensor, pipeline and data parallelism may differ from those it was saved with. Honours `ckpt_step`,
    `finetune` (weights only, the run starts at 0), `no_load_optim`, `no_load_rng`, `ckpt_fully_parallel_load`.

    Args:
        body_only: leave the parts of a chunk that its `new_parts` name as they are, and those of its `optional_parts`
            that the checkpoint lacks; the model there may have another head.

    Returns:
        Where to go on; None if the directory holds no checkpoint at all (the run then starts from its initial weights).

    Raises:
        CheckpointError: on every rank: damaged, missing, or of another model. Nothing falls back to an older one.
    """
    location = on_rank_zero(lambda: directory.locate(args.load, step=args.ckpt_step))
    if location is None:
        return None
    with agreed():
        common = read_common_state(location)
        arguments.check_same_model(args, common.get("args"), location.path, body_only=body_only)
    reader = CheckpointReader(location)
    starts_anew = args.finetune or location.is_release
    position = CheckpointPosition() if starts_anew else _position(common)
    metadata = {**sharding_metadata(args), **(common.get("content_metadata") or {})}
    if update is not None:
        update.versions.show_newest()
    model = model_state(chunks, metadata)
    new = new_parts(chunks, reader.holds_prefix) if body_only else ()
    if new:
        model = without_parts(model, new)
        _log_once(f"not from checkpoint {location.path}, but as they were drawn: {', '.join(new)}")
    _judge_what_is_left_over(reader, model, args.dist_ckpt_strictness)
    request: dict = dict(model)
    with_optimizer = optimizer is not None and not starts_anew and not args.no_load_optim
    if with_optimizer:
        request["optimizer"] = optimizer_state(optimizer, model, metadata, is_loading=True)
        if converts := optimizer_formats.needs_conversion(optimizer, common.get("optimizer")):
            request["optimizer"] = optimizer_formats.convert_request(request["optimizer"], reader.holds_key)
    random_state = sharded_random_state()
    with_random = not starts_anew and not args.no_load_rng
    if with_random and reader.holds(random_state):
        request["rng_state"] = random_state
    elif with_random:
        _log_once("random number generators start from the seed: the checkpoint has none for these parallel degrees")
    if update is not None:
        older = _other_versions(chunks, update, position.iteration)
        request |= older.to_load(model, reader.holds_prefix)
    state = reader.load(request, fully_parallel=args.ckpt_fully_parallel_load)
    for entry, chunk in zip(model, chunks, strict=True):
        _load_module(
            unwrap_model(chunk), state.get(entry, {}), new=new
        )  # a stage may be empty; what is missing is found
    if update is not None:
        older.restore(state)
    if with_optimizer:
        loaded = state["optimizer"]
        if converts:
            loaded = optimizer_formats.convert_loaded(loaded, optimizer)
        optimizer_formats.convert_step_counters(loaded, optimizer)
        with torch.no_grad():  # some of megatron.core's formats copy into parameters
            optimizer.load_state_dict(loaded)
        if scheduler is not None:
            _load_scheduler(scheduler, state["opt_param_scheduler"])
        if update is not None:
            update.load_state_dict((state.get("pipeline") or {}).get("update"))
    elif optimizer is not None:
        optimizer.reload_model_params()
    if "rng_state" in request:
        restore_random_state(state["rng_state"])
    return position


def _other_versions(chunks: Sequence[torch.nn.Module], update: WeightUpdate, iteration: int) -> OlderVersions:
    """What a drained run needs besides the newest weights."""
    if update.weights.predicts:
        return PredictedVersion(
            chunks, update.versions, update.weights, iteration, apart=update.replicas_predict_apart
        )  # fmt: skip
    return OlderVersions(chunks, update.versions, update.weights, iteration)


def apply_checkpoint_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """--use-checkpoint-args: take the model's arguments from the checkpoint of `args.load`, before anything is built.

    Not collective; every rank reads for itself. Returns all arguments that the checkpoint holds. Raises CheckpointError
    where there is no checkpoint to take them from.
    """
    location = directory.locate(args.load, step=args.ckpt_step) if args.load else None
    if location is None:
        raise CheckpointError(f"--use-checkpoint-args needs a checkpoint, and --load {args.load} holds none")
    saved = read_common_state(location).get("args")
    arguments.apply_saved_arguments(args, saved, location.path)
    return saved


def _judge_what_is_left_over(reader: CheckpointReader, model: dict, strictness: str) -> None:
    """--dist-ckpt-strictness: weights of the checkpoint that the model has no place for are logged, or an error."""
    if not strictness.startswith(("log_", "raise_")):
        return
    left_over = reader.left_over(model)
    if not left_over:
        return
    shown = ", ".join(left_over[:8]) + (f" and {len(left_over) - 8} more" if len(left_over) > 8 else "")
    line = f"checkpoint {reader.location.path} holds weights that the model has no place for: {shown}"
    if strictness.startswith("raise_"):
        raise CheckpointError(f"{line}; leave out --dist-ckpt-strictness {strictness} to load without them")
    _log_once(line)


def _position(common: dict) -> CheckpointPosition:
    saved = common.get("args")
    return CheckpointPosition(
        iteration=common["iteration"],
        consumed_train_samples=getattr(saved, "consumed_train_samples", 0),
        consumed_valid_samples=getattr(saved, "consumed_valid_samples", 0),
        num_floating_point_operations_so_far=common.get("num_floating_point_operations_so_far", 0.0),
    )


def _load_scheduler(scheduler: object, state: dict) -> None:
    try:
        scheduler.load_state_dict(state)
    except AssertionError as error:  # how megatron.core reports other settings on the command line
        raise CheckpointError(
            f"the schedule of learning rate and weight decay is not the checkpoint's ({error}); pass "
            "--override-opt_param-scheduler to follow the command line or --use-checkpoint-opt_param-scheduler to "
            "follow the checkpoint"
        ) from error


def _load_module(module: torch.nn.Module, state: dict, *, new: Sequence[str]) -> None:
    """Strict, but for `new` parts, and Transformer Engine's extra states, which a checkpoint of another implementation
    lacks."""
    missing, unexpected = module.load_state_dict(state, strict=False)
    misfit = [key for key in [*missing, *unexpected] if not key.endswith("_extra_state")]
    misfit = [key for key in misfit if key.split(".")[0] not in new]
    assert not misfit, f"sharded state and module disagree about {misfit[:4]}"


def _log_once(message: str) -> None:
    if torch.distributed.get_rank() == 0:
        logger.warning(message)
