"""`finetune`: one run on this rank, from checked flags to the model in --output_dir."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch

from megatron import backend
from megatron.finetuning import checkpoint, intervals
from megatron.finetuning.arguments import SOFTENING
from megatron.finetuning.assembly import Pipeline, assemble
from megatron.finetuning.checkpoint import Origin, Progress
from megatron.finetuning.data.epochs import Epochs
from megatron.finetuning.dry_run import first_lines
from megatron.finetuning.feed import Feed
from megatron.finetuning.plan import Plan, make_plan
from megatron.finetuning.report import Report, peak_memory
from megatron.finetuning.samples import Data, read_data
from megatron.finetuning.trainer import Trainer, checkpoint_saver
from megatron.pipeline.runtime import failure
from megatron.pipeline.runtime.trace import gather_traces
from megatron.training import initialize
from megatron.training.by_products import ByProduct
from megatron.training.entry import OnThisRank, SameEverywhere, agree_or_raise, agree_to_start
from megatron.training.logging import configure_logging
from megatron.training.signals import StopSignal
from megatron.training.timeline import write_pictures

MOST_NEW = 0.3
"""The part of a model's parameters that may begin at random: a new head, and no more."""


def finetune(args: argparse.Namespace, stop: StopSignal) -> None:
    """Train and evaluate as `args` say.

    Raises:
        SameEverywhere: an error that all ranks know; print it once.
        OnThisRank: this rank did not find the others.
    """
    configure_logging(args.logging_level)
    join(args)
    outcome = None
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    with initialize.left_in_order(), failure.guard(timeout=timeout):
        try:
            run(args, stop)
        except ValueError as error:
            try:
                agree_or_raise(error)
            except SameEverywhere as same:
                outcome = same
    if outcome is not None:
        raise outcome


def join(args: argparse.Namespace) -> None:
    """Become a rank of the job."""
    problem = None
    try:
        initialize.choose_device(args)
        check_output_dir(args)
    except ValueError as error:
        problem = str(error)
    try:
        store = initialize.meet()
    except ValueError as error:
        raise OnThisRank(problem or str(error)) from error
    timeout = max(timedelta(minutes=args.distributed_timeout_minutes), initialize.RENDEZVOUS_TIMEOUT)
    agree_to_start(store, rank=args.rank, world_size=args.world_size, problem=problem, timeout=timeout)
    initialize.join(args, store)


def check_output_dir(args: argparse.Namespace) -> None:
    """Find where to go on. Raises ValueError where a run would write over another's checkpoints."""
    args.resumed_from = None
    if args.output_dir is None:
        return
    last = checkpoint.latest(Path(args.output_dir))
    if args.resume_from_checkpoint == "last":
        if last is None:
            raise ValueError(f"--resume_from_checkpoint: {args.output_dir} has no checkpoint; leave it out")
        args.resumed_from = last
    elif args.resume_from_checkpoint is not None:
        args.resumed_from = Path(args.resume_from_checkpoint)
    elif args.do_train and last is not None and not args.overwrite_output_dir:
        raise ValueError(
            f"{args.output_dir} has checkpoints of another run ({last.name}); give --resume_from_checkpoint to go on, "
            "--overwrite_output_dir to begin again, or another --output_dir"
        )


def run(args: argparse.Namespace, stop: StopSignal) -> None:
    """The run of a rank that has joined the job. Raises ValueError."""
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    data = read_data(args)
    plan = make_plan(args, data)
    batches = _batches(args, data, plan) if args.do_train else None
    num_steps = _num_steps(args, batches)
    steps_per_epoch = batches.batches_per_epoch if batches else 1
    intervals.settle(args, num_steps=num_steps, steps_per_epoch=steps_per_epoch)
    facts = _facts(args, plan)
    done = _progress(args, facts)
    report = Report(args, num_steps=num_steps, steps_per_epoch=steps_per_epoch)
    feed = Feed(data.training, size=args.per_device_train_batch_size, seed=args.seed, device=backend.device())
    pipeline = assemble(
        plan, args, feed=feed, summary=data.task.summary, folder=args.model_name_or_path, num_steps=max(num_steps, 1),
        first_batch=done.batches, first_microbatch=done.microbatches,
    )  # fmt: skip
    if args.resumed_from is not None:
        checkpoint.restore(pipeline, args.resumed_from)
    for line in (*first_lines(plan, args), *(f"note: {note}" for note in args.notes)):
        report.say(line)
    new = _gathered_names(pipeline)
    require_most(plan, new, args.model_name_or_path)
    if new:
        report.say(f"note: {args.model_name_or_path} has no values for {', '.join(new)}; they begin at random")
    seconds = time.perf_counter() - started
    report.say(f"{num_steps - done.batches} of {num_steps} batches to train, {seconds:.1f} s since the start")
    origin = Origin(args.model_name_or_path, plan.unused, plan.renamed, plan.save_rest)
    trainer = Trainer(
        pipeline, args, report, stop,
        batches=batches.batches(done.batches) if batches else iter(()), num_steps=num_steps,
        validation=data.validation if args.do_eval else None,
        save=checkpoint_saver(pipeline, args, origin, facts),
    )  # fmt: skip
    if trainer.train():
        if args.do_eval and trainer.evaluated_step != num_steps:
            trainer.evaluate()
        if args.do_train:
            checkpoint.save_model(pipeline, Path(args.output_dir), origin)
            report.say(f"model in {args.output_dir}")
    peaks = " ".join(f"{each / 2**20:.0f}" for each in peak_memory())
    report.say(f"most memory of each rank, MiB: {peaks}")
    if args.pipeline_timeline:
        _draw(plan, pipeline, trainer, args)
    torch.distributed.barrier()
    pipeline.engine.close()
    report.close()


def _batches(args: argparse.Namespace, data: Data, plan: Plan) -> Epochs:
    """The run's batches. Raises ValueError where the schedule cannot run one of them."""
    batches = Epochs(
        num_samples=len(data.training), micro_batch_size=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps, seed=args.seed, drop_last=args.dataloader_drop_last,
    )  # fmt: skip
    for size in sorted({len(batch) for batch in islice(batches.batches(), batches.batches_per_epoch)}):
        _check_size(plan, size, args)
    return batches


def _facts(args: argparse.Namespace, plan: Plan) -> dict[str, object]:
    """What a resumed run must have alike; see `Progress`."""
    return {
        "signature": plan.partition.signature,
        "stages": plan.stages_digest,
        "schedule": args.pipeline_schedule,
        "seed": args.seed,
        "optim": args.optim + (" with FP32 masters" if args.bf16 else ""),
        "softened": ", ".join(name for name in SOFTENING if getattr(args, name)),
    }


def _draw(plan: Plan, pipeline: Pipeline, trainer: Trainer, args: argparse.Namespace) -> None:
    with ByProduct(f"--pipeline_timeline {args.pipeline_timeline}", consequence="without it").attempt():
        write_pictures(
            plan.schedule, gather_traces(pipeline.engine.trace()), Path(args.pipeline_timeline),
            drains=trainer.drains, most=args.pipeline_timeline_iterations,
        )  # fmt: skip


def _check_size(plan: Plan, num_microbatches: int, args: argparse.Namespace) -> None:
    """Raises ValueError where the schedule cannot run batches of this size, such as the last one of an epoch."""
    try:
        plan.schedule.validate(num_microbatches)
    except ValueError as error:
        if num_microbatches == args.gradient_accumulation_steps:
            raise
        raise ValueError(f"the last batch of an epoch: {error}; or give --dataloader_drop_last") from error


def _num_steps(args: argparse.Namespace, batches: Epochs | None) -> int:
    if batches is None:
        return 0
    if args.max_steps > 0:
        return args.max_steps
    return -int(-args.num_train_epochs * batches.batches_per_epoch // 1)


def _progress(args: argparse.Namespace, facts: dict) -> Progress:
    """Where the run begins. Raises ValueError where a checkpoint is of another run."""
    if args.resumed_from is None:
        return Progress(0, 0, **facts)
    found = Progress.read(args.resumed_from)
    for name, value in facts.items():
        if getattr(found, name) != value:
            raise ValueError(
                f"{args.resumed_from} was made with another {name} ({getattr(found, name)}) than this run's ({value}); "
                "give the flags and the partition that it was made with"
            )
    return found


def require_most(plan: Plan, new: Sequence[str], folder: str) -> None:
    """Raises ValueError where more is new than a head: the folder is of another model, or has other names."""
    sizes = {name: each.numel() for name, each in plan.captured.parameters.items()}
    part = sum(sizes.get(name, 0) for name in new) / sum(sizes.values())
    if part > MOST_NEW:
        raise ValueError(
            f"{folder} has no values for {part:.0%} of the parameters of {plan.captured.model_name}, such as {new[0]}; "
            "give the folder of such a model"
        )


def _gathered_names(pipeline: Pipeline) -> list[str]:
    found: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, pipeline.made)
    return sorted({name for names in found for name in names})
