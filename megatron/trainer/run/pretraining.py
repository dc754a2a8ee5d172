"""`pretrain`: one training job on this rank, from checked flags to the last checkpoint."""

import argparse
import gc
import os
from collections.abc import Sequence
from datetime import timedelta

from megatron.pipeline import interrupt
from megatron.pipeline.runtime.failure import failure_guard
from megatron.pipeline.runtime.failure.agreement import agree_to_start, guarded
from megatron.pipeline.runtime.failure.errors import OnThisRank
from megatron.placement.hosts import this_process
from megatron.trainer.arguments import notes_on_overridden, resolve_platform, validate_args
from megatron.trainer.arguments.flags.parser import destinations
from megatron.trainer.arguments.flags.specification import Role
from megatron.trainer.arguments.platform import require_attention_environment, require_hardware_queues
from megatron.trainer.checkpoint.checkpoint import apply_checkpoint_arguments
from megatron.trainer.checkpoint.ownership import release_all
from megatron.trainer.plan.rank_mapping import RankAssignment, assign_rank
from megatron.trainer.ranks import StopSignal
from megatron.trainer.report.log import configure_logging
from megatron.trainer.run.assembly import assemble
from megatron.trainer.run.loop import run_to_the_end
from megatron.trainer.start_up import initialize
from megatron.trainer.start_up.program import TrainingProgram


def pretrain(
    args: argparse.Namespace,
    program: TrainingProgram,
    stop: StopSignal,
    *,
    started: float,
    notes: Sequence[str] | None,
) -> None:
    """Train as `args` say.

    Args:
        args: parsed.
        stop, started: SIGTERM as a stop request, and when the program started (`time.time()`).
        notes: what `validate_args` has said of `args`; None: that is still to do.

    Raises:
        SameEverywhere: an error that all ranks know; print it once.
        OnThisRank: this rank did not find the others.
    """
    configure_logging(args.logging_level)
    interrupt.before_exit.append(release_all)
    assignment, notes = _join_job(args, notes)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    host = this_process().host
    guard = failure_guard.guard(store_host=assignment.store_host, timeout=timeout, host=host, before_exit=release_all)
    with initialize.left_in_order(), guarded(guard):
        initialize.set_up(args)
        run = assemble(args, program)
        for line in (*assignment.lines, *(f"note: {note}" for note in notes)):
            run.reporter.say(line)
        # A collection that looks at all of this takes tenths of a second, and the pipeline waits for the rank.
        gc.collect()
        gc.freeze()
        run.is_kept_out_of_collections = True
        run_to_the_end(run, stop, started=started)


def _join_job(args: argparse.Namespace, notes: Sequence[str] | None) -> tuple[RankAssignment, Sequence[str] | None]:
    """Complete `args` and become a rank of the job; returns which, and notes for the log.

    A rank that finds a problem meets the others nevertheless, so that they end with it and know why.
    """
    problem = None
    try:
        notes = complete(args, notes)
    except ValueError as error:
        problem = str(error)
    try:
        rank, world_size, _ = initialize.environment_ranks()
        store = initialize.meet()
    except ValueError as error:
        raise OnThisRank(problem or str(error)) from error
    # Hosts load their programs at different speeds, however soon a transfer is to be given up later.
    timeout = max(timedelta(minutes=args.distributed_timeout_minutes), initialize.RENDEZVOUS_TIMEOUT)
    agree_to_start(store, rank=rank, world_size=world_size, problem=problem, timeout=timeout)
    assignment = assign_rank(args, store, rank=rank, world_size=world_size, timeout=timeout)
    initialize.join(args, store)
    return assignment, notes


def complete(args: argparse.Namespace, notes: Sequence[str] | None = None) -> list[str]:
    """Fill in what follows from the flags, from the checkpoint and from this machine. Returns notes for the log.

    Args:
        args: parsed.
        notes: what `validate_args` has said of `args`; None: they are validated here, with the checkpoint's arguments
            where `--use-checkpoint-args` asks for them.

    Raises ValueError.
    """
    if notes is None:
        rank, world_size, _ = initialize.environment_ranks()
        overridden = _take_over(args) if args.use_checkpoint_args else []
        notes = overridden + validate_args(args, world_size=world_size, rank=rank)
    notes = [*notes, *resolve_platform(args, initialize.this_platform())]
    if args.architecture != "vit":
        require_attention_environment(args, os.environ)
    initialize.choose_device(args)
    if args.distributed_backend == "nccl":
        require_hardware_queues(args, os.environ)
    return notes


def _take_over(args: argparse.Namespace) -> list[str]:
    """Put the checkpoint's arguments in the place of the command line's; returns notes on those that were given."""
    given = {name: getattr(args, name) for name in args.given if hasattr(args, name)}
    saved = apply_checkpoint_arguments(args)
    if args.use_mp_args_from_checkpoint_args:
        for name in (name for name in destinations(Role.DEGREES) if hasattr(saved, name)):
            setattr(args, name, getattr(saved, name))
    return notes_on_overridden(given, args)
