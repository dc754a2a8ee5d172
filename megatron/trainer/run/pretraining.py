"""`pretrain`: one training job on this rank, from checked flags to the last checkpoint."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron.pipeline import interrupt
from megatron.pipeline.placement.topology import this_process
from megatron.pipeline.runtime.failure import failure_guard
from megatron.pipeline.runtime.failure.agreement import agree_to_start, guarded
from megatron.pipeline.runtime.failure.errors import JobHasEnded, OnThisRank, is_ended_with_node
from megatron.trainer.arguments import notes_on_overridden, resolve_platform, validate_args
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.flags.parallel import AUTO
from megatron.trainer.arguments.flags.parser import destinations
from megatron.trainer.arguments.flags.specification import Role
from megatron.trainer.arguments.platform import require_attention_environment, require_hardware_queues
from megatron.trainer.checkpoint.checkpoint import with_checkpoint_arguments
from megatron.trainer.checkpoint.ownership import release_all
from megatron.trainer.plan.arrangement import RankAssignment, assign_rank
from megatron.trainer.ranks import StopSignal
from megatron.trainer.report.log import configure_logging
from megatron.trainer.run.assembly import assemble, assemble_alone
from megatron.trainer.run.loop import run_to_the_end
from megatron.trainer.start_up import initialize
from megatron.trainer.start_up.run import TrainingProgram

if TYPE_CHECKING:
    from megatron.trainer.run.lost_ranks import LostRanks


def pretrain(
    args: argparse.Namespace,
    program: TrainingProgram,
    stop: StopSignal,
    *,
    started: float,
    notes: Sequence[str] | None,
) -> None:
    """Run the training job that `args` describe.

    Args:
        args: the parsed flags.
        stop: notes SIGTERM as a stop request.
        started: when the program started (`time.time()`).
        notes: the notes that `validate_args` returned for `args`; None: `args` are not validated yet.

    Raises:
        SameEverywhere: an error that all ranks know; print it once.
        OnThisRank: this rank did not find the others.
    """
    configure_logging(args.logging_level)
    interrupt.before_exit.append(release_all)
    if args.go_on_without_lost_ranks:
        stop.means_loss = is_ended_with_node
    args, assignment, notes, lost_ranks = _join_job(args, notes)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    host = this_process().host
    guard = failure_guard.guard(store_host=assignment.store_host, timeout=timeout, host=host, before_exit=release_all)
    if lost_ranks is not None:
        guard = nullcontext()  # an error ends this rank alone, and the other ranks notice
    with initialize.left_in_order(), guarded(guard):
        if lost_ranks is not None and not lost_ranks.has_state:
            try:
                run = assemble_alone(args, program, lost_ranks.membership)
            except ValueError as error:  # the other ranks do not know of the error
                raise OnThisRank(str(error)) from error
            try:
                lost_ranks.come_back(run)
            except JobHasEnded as end:
                lost_ranks.membership.leave()
                sys.stdout.write(f"{end}\n")
                return
        elif lost_ranks is not None:
            run = lost_ranks.build(program)
        else:
            run = assemble(initialize.set_up(args), program)
        proved = () if lost_ranks is None else lost_ranks.proved.lines
        for line in (*assignment.lines, *proved, *(f"note: {note}" for note in notes)):
            run.reporter.say(line)
        # A later collection that traverses all these objects would take tenths of a second while the pipeline waits.
        gc.collect()
        gc.freeze()
        run.is_kept_out_of_collections = True
        if lost_ranks is not None and run.writer is not None:
            run.writer.interrupted = lambda: lost_ranks.membership.alarm is not None
        run_to_the_end(run, stop, started=started, lost_ranks=lost_ranks)
        if lost_ranks is not None:
            lost_ranks.membership.leave()


def _join_job(
    args: argparse.Namespace, notes: Sequence[str] | None
) -> tuple[TrainConfig, RankAssignment, Sequence[str], LostRanks | None]:
    """Become a rank of the job.

    Returns the run's configuration, this process's rank, notes for the log, and the object that handles lost ranks
    (None without `--go-on-without-lost-ranks`).

    A rank with a problem still meets the others, so that they end too and know the reason.
    """
    problem = job = None
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    # Hosts load their programs at different speeds, even if the later timeout of transfers is short.
    patience = max(timeout, initialize.RENDEZVOUS_TIMEOUT)
    made_here = args.pipeline_schedule == AUTO
    try:
        if not made_here:
            args, notes = complete(args, notes)
    except ValueError as error:
        problem = str(error)
    try:
        rank, world_size, _ = initialize.environment_ranks()
        if args.go_on_without_lost_ranks:
            from megatron.pipeline.runtime.failure.membership import takes_in  # other runs start without this module

            job = initialize.running_job(partial(takes_in, timeout=args.failure_timeout))
        store = initialize.rendezvous() if job is None else job
    except ValueError as error:
        raise OnThisRank(problem or str(error)) from error
    if made_here:
        try:
            args, notes = complete(args, program_over=(store, patience))
        except ValueError as error:
            problem = str(error)
    comes_back = job is not None
    if not comes_back:
        agree_to_start(store, rank=rank, world_size=world_size, problem=problem, timeout=patience)
    elif problem is not None:
        raise OnThisRank(problem)
    assignment = assign_rank(args, store, rank=rank, world_size=world_size, timeout=patience)
    lost_ranks = None
    if args.go_on_without_lost_ranks:
        from megatron.trainer.run.lost_ranks import LostRanks  # other runs start without this module

        lost_ranks = LostRanks(args, store, rank=assignment.rank, world_size=world_size, is_new=comes_back)
        if comes_back:
            initialize.be_alone(args, rank=assignment.rank)
            notes = ()
    else:
        initialize.join_process_group(store, args.distributed_backend, timeout)
    return replace(args, rank=assignment.rank), assignment, notes, lost_ranks


def complete(
    args: argparse.Namespace,
    notes: Sequence[str] | None = None,
    *,
    program_over: tuple[torch.distributed.Store, timedelta] | None = None,
) -> tuple[TrainConfig, list[str]]:
    """The run's configuration, completed from the flags, the checkpoint and this machine, and notes for the log.

    Args:
        args: the parsed flags.
        notes: the notes that `validate_args` returned for `args`; None: validate them here, with the checkpoint's
            arguments if `--use-checkpoint-args` is given.
        program_over: the store through which rank 0 shares the program of `--pipeline-schedule auto`, and how long to
            wait for it.

    Raises ValueError.
    """
    if notes is None:
        rank, world_size, _ = initialize.environment_ranks()
        args, overridden = _take_over(args) if args.use_checkpoint_args else (args, [])
        if program_over is not None:
            from megatron.trainer.plan import auto_program  # other runs start without the planner

            store, patience = program_over
            make = partial(
                auto_program.make, args, world_size=world_size, platform=initialize.this_platform(),
                settled=lambda like: initialize.on_this_device(TrainConfig.of(like)),
            )  # fmt: skip
            args = auto_program.shared(args, store, rank=rank, patience=patience, make_it=make)
            overridden = [*overridden, *args.made_program.lines]
        notes = overridden + validate_args(args, world_size=world_size, rank=rank)
    notes = [*notes, *resolve_platform(args, initialize.this_platform())]
    args = TrainConfig.of(args)
    if args.architecture != "vit":
        require_attention_environment(args, os.environ)
    args = initialize.on_this_device(args)
    if args.distributed_backend == "nccl":
        require_hardware_queues(args, os.environ)
    return args, notes


def _take_over(args: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """Replace arguments by the checkpoint's; also return notes on replaced arguments that the command line gave."""
    given = {name: getattr(args, name) for name in args.given if hasattr(args, name)}
    degrees = destinations(Role.DEGREES) if args.use_mp_args_from_checkpoint_args else ()
    args = with_checkpoint_arguments(args, further=degrees)
    return args, notes_on_overridden(given, args)
