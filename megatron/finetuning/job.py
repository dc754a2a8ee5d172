"""One run on this rank: from checked flags to the model in --output_dir."""

from __future__ import annotations

import argparse
import math
import os
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch

from megatron import backend
from megatron.finetuning import checkpoint
from megatron.finetuning.arguments import SOFTENING, changed, settled_intervals
from megatron.finetuning.assembly import BuiltPipeline, build_pipeline
from megatron.finetuning.checkpoint import CheckpointOrigin, SavedProgress
from megatron.finetuning.data.batches import Epochs, Feed
from megatron.finetuning.plan import RunPlan, first_lines, make_plan
from megatron.finetuning.pretrained import Pretrained
from megatron.finetuning.samples import Data, read_data
from megatron.finetuning.trainer import Report, Trainer, peak_memory
from megatron.pipeline.runtime.contract.trace import gather_traces
from megatron.pipeline.runtime.failure import agreement, failure_guard
from megatron.pipeline.runtime.failure.agreement import agree_to_start, guarded
from megatron.pipeline.runtime.failure.errors import OnThisRank
from megatron.pipeline.runtime.timeline_files import write_pictures
from megatron.trainer.ranks import StopSignal
from megatron.trainer.report.log import configure_logging
from megatron.trainer.report.metrics import ByProduct
from megatron.trainer.start_up import initialize

KEPT = (
    "gradient_accumulation_steps", "dataloader_drop_last", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "momentum",
)  # fmt: skip
"""Flags that a resumed run must repeat: its place in the data and the state of its optimizers depend on them."""


def finetune(args: argparse.Namespace, stop: StopSignal) -> None:
    """Train and evaluate as the flags say.

    Raises:
        SameEverywhere: for an error that all ranks know, to be printed once.
        OnThisRank: if this rank did not find the others.
    """
    configure_logging(args.logging_level)
    args = join_job(args)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    with initialize.left_in_order(), guarded(failure_guard.guard(timeout=timeout)):
        run(args, stop)


def join_job(args: argparse.Namespace) -> argparse.Namespace:
    """Choose the device, agree with the other ranks that the run can begin, and join their process group.

    Returns the arguments with the device's backend and the checkpoint from which the run resumes.
    """
    problem = None
    try:
        args = changed(on_this_device(args), resumed_from=checkpoint_to_resume(args))
    except ValueError as error:
        problem = str(error)
    try:
        store = initialize.rendezvous()
    except ValueError as error:
        raise OnThisRank(problem or str(error)) from error
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    patience = max(timeout, initialize.RENDEZVOUS_TIMEOUT)
    agree_to_start(store, rank=args.rank, world_size=args.world_size, problem=problem, timeout=patience)
    initialize.join_process_group(store, args.distributed_backend, timeout)
    agreement.set_timeout(timeout)
    return args


def on_this_device(args: argparse.Namespace) -> argparse.Namespace:
    """Choose the device; returns the arguments with its backend."""
    return changed(args, distributed_backend=initialize.choose_device(args.distributed_backend)[1])


def checkpoint_to_resume(args: argparse.Namespace) -> Path | None:
    """The checkpoint from which the run resumes, or None. Makes the output directory of a run that trains.

    Raises ValueError if the checkpoint does not exist, the run would overwrite the checkpoints of another run, or
    --output_dir cannot be written.
    """
    output = None if args.output_dir is None else Path(args.output_dir)
    last = None if output is None else checkpoint.latest(output)
    if args.resume_from_checkpoint == "last" and last is None:
        where = "there is no --output_dir" if output is None else f"{output} has no checkpoint"
        raise ValueError(f"--resume_from_checkpoint: {where}; name a checkpoint, or leave it out")
    found = last if args.resume_from_checkpoint == "last" else args.resume_from_checkpoint
    resumed_from = None if found is None else Path(found)
    if not args.do_train:
        return resumed_from
    goes_on = last is not None and resumed_from is not None and last.resolve() == resumed_from.resolve()
    if last is not None and not goes_on and not args.overwrite_output_dir:
        raise ValueError(
            f"{output} has checkpoints of another run ({last.name}); give --resume_from_checkpoint to go on with the "
            "last, --overwrite_output_dir to drop those that this run does not go on from, or another --output_dir"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output_dir {output} cannot be made: {error.strerror}; give another") from error
    if not os.access(output, os.W_OK):
        raise ValueError(f"--output_dir {output} cannot be written; give another")
    return resumed_from


def run(args: argparse.Namespace, stop: StopSignal) -> None:
    """Run the job on a rank that has joined the process group. Raises ValueError for an error that all ranks find."""
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    data = read_data(args)
    plan = make_plan(args, data)
    batches = _batches(args, data, plan) if args.do_train else None
    steps_per_epoch = batches.batches_per_epoch if batches else 1
    num_steps = 0
    if batches:
        num_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
    args = settled_intervals(args, num_steps=num_steps, steps_per_epoch=steps_per_epoch)
    facts = _facts(args, plan, data)
    done = _progress(args, facts)
    with agreement.agreed():  # the first rank alone writes
        report = Report(args, num_steps=num_steps, steps_per_epoch=steps_per_epoch)
    feed = Feed(data.training, size=args.per_device_train_batch_size, seed=args.seed, device=backend.device())
    with agreement.agreed():
        pretrained = Pretrained(plan.model, args.model_name_or_path, new_head=data.task.new_head)
    pipeline = build_pipeline(
        plan, args, feed=feed, summary=data.task.summary, pretrained=pretrained, num_steps=max(num_steps, 1),
        first_batch=done.batches, first_microbatch=done.microbatches,
    )  # fmt: skip
    if args.resumed_from is not None:
        checkpoint.restore(pipeline, args.resumed_from)
    notes = [f"note: {note}" for note in [*args.notes, *data.notes, *pretrained.notes]]
    for line in (*first_lines(plan, args), *notes):
        report.say(line)
    seconds = time.perf_counter() - started
    left = max(num_steps - done.batches, 0)
    report.say(f"{left} of {num_steps} batches to train, {seconds:.1f} s since the start")
    origin = CheckpointOrigin(pretrained, plan.captured.all_names, plan.save_rest)
    left_batches = batches.batches(done.batches) if batches else iter(())
    trainer = Trainer(pipeline, args, report, stop, origin, facts, left_batches, num_steps, data.validation)
    if trainer.train():
        if args.do_eval and trainer.evaluated_step != num_steps:
            trainer.evaluate()
        if args.do_train:
            checkpoint.save_model(pipeline, Path(args.output_dir), origin)
            report.say(f"model in {args.output_dir}")
    peaks = " ".join(f"{peak / 2**20:.0f}" for peak in peak_memory())
    report.say(f"most memory of each rank, MiB: {peaks}")
    if args.pipeline_timeline:
        _draw(plan, pipeline, trainer, args)
    torch.distributed.barrier()
    pipeline.engine.close()
    report.close()


def _batches(args: argparse.Namespace, data: Data, plan: RunPlan) -> Epochs:
    """The run's batches in order. Raises ValueError if the schedule cannot run one of their numbers of microbatches."""
    batches = Epochs(
        num_samples=len(data.training), micro_batch_size=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps, seed=args.seed, drop_last=args.dataloader_drop_last,
    )  # fmt: skip
    for num_microbatches in sorted({len(batch) for batch in islice(batches.batches(), batches.batches_per_epoch)}):
        try:
            plan.schedule.validate(num_microbatches)
        except ValueError as error:
            if num_microbatches == args.gradient_accumulation_steps:
                raise
            raise ValueError(f"the last batch of an epoch: {error}; or give --dataloader_drop_last") from error
    return batches


def _facts(args: argparse.Namespace, plan: RunPlan, data: Data) -> dict[str, object]:
    """The fields of `SavedProgress` that a resumed run must share."""
    return {
        "signature": plan.partition.signature,
        "stages": plan.stages_digest,
        "schedule": args.pipeline_schedule,
        "seed": args.seed,
        "optim": args.optim + (" with FP32 masters" if args.bf16 else ""),
        "softened": ", ".join(name for name in SOFTENING if getattr(args, name)),
        "samples": len(data.training) if args.do_train else None,
        "flags": {name: getattr(args, name) for name in KEPT} if args.do_train else {},
    }


def _draw(plan: RunPlan, pipeline: BuiltPipeline, trainer: Trainer, args: argparse.Namespace) -> None:
    with ByProduct(f"--pipeline_timeline {args.pipeline_timeline}", consequence="without it").attempt():
        write_pictures(
            plan.schedule, gather_traces(pipeline.engine.trace()), Path(args.pipeline_timeline),
            drains=trainer.drains, most=args.pipeline_timeline_iterations,
        )  # fmt: skip


def _progress(args: argparse.Namespace, facts: dict) -> SavedProgress:
    """The progress with which the run begins. Raises ValueError if the checkpoint was made with other settings."""
    begin = SavedProgress(0, 0, **facts)
    if args.resumed_from is None:
        return begin
    found = SavedProgress.read(args.resumed_from)
    found.require_same(begin, args.resumed_from, trains=args.do_train)
    return found
