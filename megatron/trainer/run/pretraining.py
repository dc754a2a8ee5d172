"""`pretrain`: one training job on this rank, from checked flags to the last checkpoint.

A run is put together in the order in which errors are cheap: tokenizer, data, model, optimizer, checkpoint, stage,
engine. Directories and files are tried before the model is built, and the checkpoint is read before the first sample.
What the loop needs is one record.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron import backend
from megatron.documents import counted
from megatron.pipeline import interrupt
from megatron.pipeline.placement.topology import this_process
from megatron.pipeline.runtime.failure import failure_guard
from megatron.pipeline.runtime.failure.agreement import agree_to_start, agreed, guarded
from megatron.pipeline.runtime.failure.errors import OnThisRank
from megatron.pipeline.runtime.stages.megatron.optimizers import is_dense
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.pipeline.start_up import late_weights
from megatron.trainer.arguments import notes_on_overridden, resolve_platform, validate_args
from megatron.trainer.arguments.flags.config import (
    TrainConfig,
    choice_of,
    num_expert_replicas,
    num_replicas,
    schedule_text,
)
from megatron.trainer.arguments.flags.model import CLASSIFIERS
from megatron.trainer.arguments.flags.parallel import AUTO
from megatron.trainer.arguments.flags.parser import destinations
from megatron.trainer.arguments.flags.specification import Role, name_of
from megatron.trainer.arguments.platform import require_attention_environment, require_hardware_queues
from megatron.trainer.arguments.rules.data import split_shares
from megatron.trainer.changes.decisions import ChangeDecisions
from megatron.trainer.changes.prefix_cache import PrefixCache, require_cache
from megatron.trainer.checkpoint.checkpoint import CheckpointPosition, load_checkpoint, with_checkpoint_arguments
from megatron.trainer.checkpoint.hugging_face import load_hugging_face
from megatron.trainer.checkpoint.ownership import OwnerMark, release_all
from megatron.trainer.checkpoint.writer import CheckpointWriter
from megatron.trainer.data.datasets import SPLITS
from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size, require_known_tokens, vocab_size
from megatron.trainer.plan.arrangement import RankAssignment, assign_rank, iterations_to_the_end
from megatron.trainer.ranks import StopSignal
from megatron.trainer.report.log import Reporter, configure_logging
from megatron.trainer.report.metrics import flops_per_sample
from megatron.trainer.run.loop import run_to_the_end
from megatron.trainer.start_up import initialize
from megatron.trainer.start_up.initialize import prepare_outputs
from megatron.trainer.start_up.optimizer import choose_kernel
from megatron.trainer.start_up.run import (
    ModelAndOptimizer,
    Run,
    TrainingProgram,
    build_engine,
    setup_model_and_optimizer,
)

if TYPE_CHECKING:
    from megatron.trainer.run.lost_ranks import LostRanks

# --- a run is put together --------------------------------------------------------------------------------------------


def assemble(args: TrainConfig, program: TrainingProgram) -> Run:
    """Build a run of `program` on this rank. Collective. Raises ValueError for what the user can mend.

    `args`: completed; process groups are up.
    """
    owner_mark = prepare_outputs(args)
    try:
        _require_one_program(args)
        made = args.made_program
        if made is not None and not made.measures and args.save is not None and args.rank == 0:
            from megatron.trainer.plan import auto_program

            auto_program.keep(made, Path(args.save))
        return _build(args, program, owner_mark)
    except BaseException:
        if owner_mark is not None:
            owner_mark.release()
        raise


def _build(args: TrainConfig, program: TrainingProgram, owner_mark: OwnerMark | None) -> Run:
    tokenizer = None if args.architecture == "vit" else build_tokenizer(args)
    args = replace(args, padded_vocab_size=0 if tokenizer is None else padded_vocab_size(args, tokenizer))
    if args.load_hf is not None:
        require_known_tokens(args, tokenizer)
    if args.activation_cache is not None:
        with agreed():
            require_cache(args)
    reporter = Reporter(args)
    datasets = program.datasets_provider(args, tokenizer)
    args = replace(args, has_split=datasets.has_split, data_digest=datasets.digest)
    if args.freeze_watch_validation is not None and not args.has_split[1]:
        raise ValueError(
            f"--freeze-watch-validation {args.freeze_watch_validation:g} looks at evaluations, and there are no "
            "validation data; give some, or leave this out"
        )
    for note in (*datasets.notes, *without_data(args)):
        reporter.say(f"note: {note}")
    began = time.perf_counter()
    built = setup_model_and_optimizer(args, program)
    seconds_of_setup = time.perf_counter() - began
    position = _load(args, built, reporter) or CheckpointPosition()
    args = replace(args, train_iters=iterations_to_the_end(
        args, iteration=position.iteration, consumed_samples=position.consumed_train_samples
    ))  # fmt: skip
    decisions = ChangeDecisions(args) if args.changes else None
    if decisions is not None and args.recorded_changes is not None:
        decisions.load_state_dict(args.recorded_changes)
    choose_kernel(built.optimizer, args.optimizer_kernel)  # what was loaded has the kernel that it was saved with
    if args.redundant_optimizer:
        built.update.keep_copy()
    args.batch_sizes.check_from(position.consumed_train_samples)
    began = time.perf_counter()
    engine = build_engine(args, built, position)
    if decisions is not None:  # a change does the same again
        decisions.expect_change(seconds_of_setup + time.perf_counter() - began)
    _describe(args, reporter, built.stages, position)
    cache = None
    if args.activation_cache is not None:
        with agreed():
            cache = PrefixCache(args, datasets.parts[0])
        cache.serve(args, built.stages)
    reporter.args = args
    return Run(
        args, program, built, engine, reporter,
        CheckpointWriter(args.save, owner_mark=owner_mark) if args.save is not None else None,
        datasets.parts, 0 if tokenizer is None else vocab_size(args, tokenizer), decisions, cache,
        iteration=position.iteration, consumed_samples=position.consumed_train_samples,
        consumed_valid_samples=position.consumed_valid_samples,
        flops=position.num_floating_point_operations_so_far,
        saved_iteration=position.iteration if position.iteration else None,
    )  # fmt: skip


def _require_one_program(args: TrainConfig) -> None:
    """Raises ValueError where ranks have read different programs, each on its own host."""
    if args.program is None:
        return
    found: list[str] = [""] * args.world_size
    torch.distributed.all_gather_object(found, args.program.short_hash)
    if len(set(found)) > 1:
        other = next(rank for rank, digits in enumerate(found) if digits != found[0])
        raise ValueError(
            f"--pipeline-program {args.pipeline_program} is another program on rank {other} (sha256 {found[other]}) "
            f"than on rank 0 ({found[0]}); give all hosts the same file"
        )


def _load(args: TrainConfig, built: ModelAndOptimizer, reporter: Reporter) -> CheckpointPosition | None:
    """Load `--load`, or where that holds nothing the weights of `--pretrained-checkpoint` or `--load-hf`; a
    classifier's head is new."""
    position = None
    if args.load is not None:
        position = load_checkpoint(built, args=args, say=reporter.say)
        if position is None and args.exit_on_missing_checkpoint:
            raise ValueError(f"--load {args.load} holds no checkpoint, and --exit-on-missing-checkpoint is given")
    if position is None and args.pretrained_checkpoint is not None:
        pretrained = replace(args, load=args.pretrained_checkpoint, finetune=True, ckpt_step=None)
        position = load_checkpoint(built, args=pretrained, body_only=args.architecture in CLASSIFIERS)
        if position is None:
            raise ValueError(f"--pretrained-checkpoint {args.pretrained_checkpoint} holds no checkpoint")
        but = " but for the head" if args.architecture in CLASSIFIERS else ""
        reporter.say(f"loaded the weights of {args.pretrained_checkpoint}{but}; starting from iteration 0")
    elif position is None and args.load_hf is not None:
        load_hugging_face(built, args=args)
        reporter.say(f"loaded the weights of {args.load_hf}; starting from iteration 0")
    elif position is not None:
        reporter.say(f"loaded {args.load}; starting from iteration {position.iteration}")
    elif args.load is not None:
        reporter.say(f"--load {args.load} holds no checkpoint yet: starting from iteration 0")
    return position


def without_data(args: TrainConfig) -> list[str]:
    """Notes on evaluations that the run would make, and has no data for (`has_split`).

    Raises ValueError where the flags ask for evaluations by name, and nobody has said that there are no data for them.
    """
    if not args.eval_iters:
        return []
    if args.skip_train and not any(args.has_split[1:]):
        raise ValueError(f"--skip-train evaluates, and there are no validation or test data; {_remedy(args)}")
    notes, asks = [], [name for name in ("eval_interval", "eval_iters") if name in args.given]
    for index in (1, 2):
        is_meant = args.split is not None and split_shares(args.split)[index] > 0
        if args.has_split[index] or not (is_meant or (index == 1 and asks)):
            continue
        what = f"there are no {SPLITS[index]} data"
        if index == 1 and is_meant and asks:
            flags = " ".join(f"{name_of(name)} {getattr(args, name)}" for name in asks)
            raise ValueError(f"{flags}: {what}, so nothing is evaluated; {_remedy(args)}, or give --eval-iters 0")
        few = f": --split {args.split} leaves them no document" if is_meant else ""
        notes.append(f"{what}{few}, so {'the run evaluates nothing' if index == 1 else 'nothing is tested at the end'}")
    return notes


def _remedy(args: TrainConfig) -> str:
    return "give --valid-data-path" if args.split is None else f"give more text, or another --split than {args.split}"


def _describe(args: TrainConfig, reporter: Reporter, stages: list[MegatronStage], position: CheckpointPosition) -> None:
    gathered = [None] * args.world_size
    torch.distributed.all_gather_object(gathered, [(stage.index, _num_parameters(args, stage)) for stage in stages])
    totals: dict[int, float] = {}
    for index, count in (pair for pairs in gathered for pair in pairs):
        totals[index] = totals.get(index, 0) + count
    parts = ", ".join(f"{totals[index] / 1e6:.3g}" for index in sorted(totals))
    num_microbatches = args.batch_sizes.num_microbatches(position.consumed_train_samples)
    context = f" x context {args.context_parallel_size}" if args.context_parallel_size > 1 else ""
    predictions = late_weights.description(args.schedule, choice_of(args).name, num_microbatches)
    reporter.say(
        f"{counted(args.world_size, 'rank')} on {backend.device().type} ({args.distributed_backend}): tensor "
        f"{args.tensor_model_parallel_size} x pipeline {args.pipeline_model_parallel_size} x data "
        f"{args.data_parallel_size}{context}, {schedule_text(args)}, "
        f"{counted(num_microbatches, 'microbatch')} of {args.micro_batch_size} a batch\n"
        + (f"{predictions}\n" if predictions else "")
        + f"parameters per stage (millions): {parts}; {flops_per_sample(args) / 1e9:.3g} GFLOP per sample"
    )


def _num_parameters(args: TrainConfig, stage: MegatronStage) -> float:
    """This rank's share of a stage's parameters: the shares of all ranks add up to the stage."""
    return sum(
        param.nelement() / (num_replicas(args) if is_dense(param) else num_expert_replicas(args))
        for param in stage.model.parameters()
    )


# --- the job ----------------------------------------------------------------------------------------------------------


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
    args, assignment, notes, lost_ranks = _join_job(args, notes)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    host = this_process().host
    guard = failure_guard.guard(store_host=assignment.store_host, timeout=timeout, host=host, before_exit=release_all)
    if lost_ranks is not None:
        guard = nullcontext()  # an error ends this rank alone, and the others notice
    with initialize.left_in_order(), guarded(guard):
        run = assemble(initialize.set_up(args), program)
        for line in (*assignment.lines, *(f"note: {note}" for note in notes)):
            run.reporter.say(line)
        # A collection that looks at all of this takes tenths of a second, and the pipeline waits for the rank.
        gc.collect()
        gc.freeze()
        run.is_kept_out_of_collections = True
        if lost_ranks is not None:
            lost_ranks.membership.accept_losses()
        run_to_the_end(run, stop, started=started, lost_ranks=lost_ranks)
        if lost_ranks is not None:
            lost_ranks.membership.leave()


def _join_job(
    args: argparse.Namespace, notes: Sequence[str] | None
) -> tuple[TrainConfig, RankAssignment, Sequence[str], LostRanks | None]:
    """Become a rank of the job; returns the run's configuration, which rank this is, notes for the log, and what goes
    on without lost ranks.

    A rank that finds a problem meets the others nevertheless, so that they end with it and know why.
    """
    problem = None
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    # Hosts load their programs at different speeds, however soon a transfer is to be given up later.
    patience = max(timeout, initialize.RENDEZVOUS_TIMEOUT)
    made_here = args.pipeline_schedule == AUTO
    try:
        if not made_here:
            args, notes = complete(args, notes)
    except ValueError as error:
        problem = str(error)
    try:
        rank, world_size, _ = initialize.environment_ranks()
        store = initialize.rendezvous()
    except ValueError as error:
        raise OnThisRank(problem or str(error)) from error
    if made_here:
        try:
            args, notes = complete(args, program_over=(store, patience))
        except ValueError as error:
            problem = str(error)
    agree_to_start(store, rank=rank, world_size=world_size, problem=problem, timeout=patience)
    assignment = assign_rank(args, store, rank=rank, world_size=world_size, timeout=patience)
    lost_ranks = None
    if args.go_on_without_lost_ranks:
        from megatron.trainer.run.lost_ranks import (
            LostRanks,
        )  # membership and survivors, which other runs start without

        lost_ranks = LostRanks(args, store, rank=assignment.rank, world_size=world_size)
        store = lost_ranks.membership.store()
    initialize.join_process_group(store, args.distributed_backend, timeout)
    return replace(args, rank=assignment.rank), assignment, notes, lost_ranks


def complete(
    args: argparse.Namespace,
    notes: Sequence[str] | None = None,
    *,
    program_over: tuple[torch.distributed.Store, timedelta] | None = None,
) -> tuple[TrainConfig, list[str]]:
    """The run's configuration, with what follows from the flags, from the checkpoint and from this machine, and notes
    for the log.

    Args:
        args: parsed.
        notes: what `validate_args` has said of `args`; None: they are validated here, with the checkpoint's arguments
            where `--use-checkpoint-args` asks for them.
        program_over: the store over which rank 0 hands out the program of `--pipeline-schedule auto`, and how long to
            wait for that.

    Raises ValueError.
    """
    if notes is None:
        rank, world_size, _ = initialize.environment_ranks()
        args, overridden = _take_over(args) if args.use_checkpoint_args else (args, [])
        if program_over is not None:
            from megatron.trainer.plan import auto_program  # the planner, which other runs start without

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
    """The arguments with the checkpoint's in the place of the command line's, and notes on those that were given."""
    given = {name: getattr(args, name) for name in args.given if hasattr(args, name)}
    degrees = destinations(Role.DEGREES) if args.use_mp_args_from_checkpoint_args else ()
    args = with_checkpoint_arguments(args, further=degrees)
    return args, notes_on_overridden(given, args)
