"""Saving and loading training runs: the public functions of `megatron.trainer.checkpoint`.

    writer = CheckpointWriter(args.save)
    save_checkpoint(writer, RunParts(chunks, optimizer, scheduler, update), args=args, position=position)
    writer.finish()                                                     # before the process ends
    position = load_checkpoint(RunParts(chunks, optimizer, scheduler, update), args=args)

Both functions are collective: every rank must call them. Precondition: the pipeline is drained. Format and directory
layout are those of Megatron-LM's torch_dist checkpoints. See docs/checkpoints.md.
"""

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from megatron.pipeline.runtime.failure.agreement import agreed, on_rank_zero
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.checkpoint import arguments, directory
from megatron.trainer.checkpoint.loader import CHECKSUMS_ENTRY, CheckpointReader, read_common_state
from megatron.trainer.checkpoint.run_state import Restoration, RunParts, log_once, run_state
from megatron.trainer.checkpoint.state import (
    FORMAT_VERSION,
    loading_metadata,
    new_parts,
    sharded_random_state,
    sharding_metadata,
)
from megatron.trainer.checkpoint.writer import CheckpointWriter
from megatron.trainer.plan.arrangement import as_at_first

__all__ = [
    "CheckpointError",
    "CheckpointPosition",
    "CheckpointWriter",
    "load_checkpoint",
    "recorded_changes",
    "save_checkpoint",
    "with_checkpoint_arguments",
]


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
        changes: the history of changes to the pipeline, if it changes while it trains; plain numbers, the same on all
            ranks.
        on_saved: called on rank 0 with the checkpoint's directory once it is durable; with `async_save` later, from
            another thread.

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
    honoured.

    Args:
        body_only: do not load the parts of a chunk that its `new_parts` name, nor those of its `optional_parts` that
            the checkpoint lacks; the saved model may have another head.
        say: called on every rank with a line for each difference to the saved run: the pipeline program, the order of
            samples.

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
    with_optimizer = not starts_anew and not args.no_load_optim
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


def with_checkpoint_arguments(args: argparse.Namespace, *, further: Collection[str] = ()) -> argparse.Namespace:
    """--use-checkpoint-args: parsed arguments with the model's, and `further` ones, of the checkpoint of `args.load`.

    Not collective: every rank reads the file itself. Raises CheckpointError if there is no checkpoint.
    """
    location = directory.locate(args.load, step=args.ckpt_step) if args.load else None
    if location is None:
        raise CheckpointError(f"--use-checkpoint-args needs a checkpoint, and --load {args.load} holds none")
    saved = read_common_state(location).get("args")
    return arguments.with_saved_arguments(args, saved, location.path, further=further)


def _judge_what_is_left_over(reader: CheckpointReader, model: dict, strictness: str) -> None:
    """--dist-ckpt-strictness: log weights of the checkpoint that the model lacks, or raise CheckpointError for them."""
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
