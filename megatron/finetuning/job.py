"""One run on this rank: from checked flags to the model in --output_dir."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron import backend
from megatron.capture.tensors import state_of_tensors
from megatron.finetuning import checkpoint
from megatron.finetuning.adapter_arguments import MERGED, has_adapter
from megatron.finetuning.adapters import AdapterTensors
from megatron.finetuning.arguments import (
    LOSS_SCALE,
    SOFTENING,
    changed,
    has_masters,
    require_gloo,
    rows_of_batch,
    settled_intervals,
)
from megatron.finetuning.assembly import BuiltPipeline, build_pipeline
from megatron.finetuning.best import Best
from megatron.finetuning.checkpoint import CheckpointOrigin, SavedProgress
from megatron.finetuning.data.batches import Epochs, Feed, Share
from megatron.finetuning.data.stored_rows import StoredRows
from megatron.finetuning.decoding import Generation
from megatron.finetuning.freezing import Freezer
from megatron.finetuning.freezing_arguments import FREEZING
from megatron.finetuning.merge import require_mergeable, save_merged
from megatron.finetuning.plan import RunPlan, first_lines, make_plan, shorter_lines
from megatron.finetuning.pretrained import Pretrained
from megatron.finetuning.relay import rounding_of
from megatron.finetuning.relay_plan import relay_lines
from megatron.finetuning.report import Report
from megatron.finetuning.samples import (
    Data,
    contents_of_files,
    epochs_of,
    flags_of_rows,
    read_data,
    require_whole_microbatches,
)
from megatron.finetuning.trainer import Trainer, set_references
from megatron.pipeline.library.ranks import find_ranks
from megatron.pipeline.runtime.contract.trace import gather_traces
from megatron.pipeline.runtime.failure import agreement, failure_guard
from megatron.pipeline.runtime.failure.agreement import agree_to_start, gathered, guarded
from megatron.pipeline.runtime.failure.errors import (
    JobHasEnded,
    OnThisRank,
    environment_ranks,
    is_ended_with_node,
)
from megatron.pipeline.runtime.stages.module.rank_update import TOGETHER
from megatron.pipeline.runtime.timeline_files import write_pictures
from megatron.trainer.ranks import StopSignal
from megatron.trainer.report.log import configure_logging
from megatron.trainer.report.metrics import ByProduct
from megatron.trainer.start_up import initialize

if TYPE_CHECKING:
    from megatron.finetuning.lost_ranks import LostRanks

KEPT = (
    "dataloader_drop_last", "pad_to_multiple_of", "group_by_length", "learning_rate", "lr_scheduler_type",
    "warmup_steps", "warmup_ratio", "max_grad_norm", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "momentum", "load_in_4bit", "load_in_8bit", *(name for name in LOSS_SCALE if name != "initial_loss_scale"),
)  # fmt: skip
"""Flags that a resumed run must repeat besides the flags that decide its rows. The position in the rows, the learning
rates and the state of the optimizers depend on them."""


def finetune(args: argparse.Namespace, stop: StopSignal) -> None:
    """Train and evaluate as the flags say.

    Raises:
        SameEverywhere: for an error that all ranks know, to be printed once.
        OnThisRank: if this rank did not find the others.
    """
    configure_logging(args.logging_level)
    args, lost_ranks = join_job(args)
    guard = failure_guard.guard(timeout=timedelta(minutes=args.distributed_timeout_minutes))
    if lost_ranks is not None:
        guard = nullcontext()  # an error ends this rank alone, and the other ranks notice
    with initialize.left_in_order(), guarded(guard):
        try:
            run(args, stop, lost_ranks)
        except JobHasEnded as end:
            sys.stdout.write(f"{end}\n")
        except ValueError as error:
            if lost_ranks is not None and not lost_ranks.has_state:  # the other ranks do not know of the error
                raise OnThisRank(str(error)) from error
            if lost_ranks is not None and not lost_ranks.has_begun:  # they all end, and none has to notice it
                lost_ranks.membership.leave()
            raise
        if lost_ranks is not None:
            lost_ranks.membership.leave()


def join_job(args: argparse.Namespace) -> tuple[argparse.Namespace, LostRanks | None]:
    """Choose the device, agree with the other ranks that the run can begin, and join their process group.

    Returns the arguments with the device's backend and the checkpoint from which the run resumes, and the object that
    handles lost ranks (None without `--go_on_without_lost_ranks`).
    """
    problem = job = None
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    try:
        args = on_this_device(args)
        require_gloo(args)
    except ValueError as error:
        problem = str(error)
    try:
        if args.go_on_without_lost_ranks:
            from megatron.pipeline.runtime.failure.membership import takes_in  # other runs start without this module

            job = initialize.running_job(partial(takes_in, timeout=args.failure_timeout))
        if job is None and problem is None:
            args, problem = _with_checkpoint(args)
        store = initialize.rendezvous() if job is None else job
    except ValueError as error:
        raise OnThisRank(problem or str(error)) from error
    patience = max(timeout, initialize.RENDEZVOUS_TIMEOUT)
    if job is None:
        agree_to_start(store, rank=args.rank, world_size=args.world_size, problem=problem, timeout=patience)
    elif problem is not None:
        raise OnThisRank(problem)
    lost_ranks = None
    if args.go_on_without_lost_ranks:
        from megatron.finetuning.lost_ranks import LostRanks  # other runs start without this module

        lost_ranks = LostRanks(args, store, is_new=job is not None)
        if job is not None:
            initialize.be_alone_in_group(args.distributed_backend, timeout)
            return args, lost_ranks
        store = lost_ranks.membership.store()
    initialize.join_process_group(store, args.distributed_backend, timeout)
    agreement.set_timeout(timeout)
    found = [args.resumed_from]
    torch.distributed.broadcast_object_list(found)  # a file system may show a folder to one host later than to another
    return changed(args, resumed_from=found[0]), lost_ranks


def _with_checkpoint(args: argparse.Namespace) -> tuple[argparse.Namespace, str | None]:
    """The arguments with the checkpoint from which the run resumes, and this rank's problem with it."""
    try:
        return changed(args, resumed_from=checkpoint_to_resume(args)), None
    except ValueError as error:
        return args, str(error)


def on_this_device(args: argparse.Namespace) -> argparse.Namespace:
    """Choose the device; returns the arguments with its backend."""
    return changed(args, distributed_backend=initialize.choose_device(args.distributed_backend)[1])


def checkpoint_to_resume(args: argparse.Namespace) -> Path | None:
    """The checkpoint from which the run resumes, or None. Makes the output directory of a run that trains.

    Raises ValueError if the checkpoint does not exist, the run would overwrite the checkpoints of another run, or
    --output_dir cannot be written.
    """
    output = None if args.output_dir is None else Path(args.output_dir)
    if output is not None:
        checkpoint.recover(output)
    last = None if output is None else checkpoint.latest(output)
    if args.resume_from_checkpoint == "auto" and last is None:
        args.notes.append("--resume_from_checkpoint auto: there is no checkpoint yet, so the run begins")
    if args.resume_from_checkpoint == "last" and last is None:
        where = "there is no --output_dir" if output is None else f"{output} has no checkpoint"
        raise ValueError(f"--resume_from_checkpoint: {where}; name a checkpoint, or leave it out")
    found = last if args.resume_from_checkpoint in ("last", "auto") else args.resume_from_checkpoint
    resumed_from = None if found is None else Path(found)
    if resumed_from is not None and not resumed_from.exists():
        checkpoint.recover(resumed_from.parent)
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


def run(args: argparse.Namespace, stop: StopSignal, lost_ranks: LostRanks | None = None) -> None:
    """Run the job on a rank that has joined the process group, or on a new process, which is alone in one.

    Raises ValueError for an error that all ranks find.
    """
    started, is_new = time.perf_counter(), lost_ranks is not None and not lost_ranks.has_state
    ranks = find_ranks(None, None, args.data_parallel_size) if lost_ranks is None else lost_ranks.ranks
    torch.manual_seed(args.seed)
    data = read_data(args)
    require_whole_microbatches(args, data)
    plan = make_plan(args, data, known=lost_ranks.partition() if is_new else None)
    if lost_ranks is not None:
        lost_ranks.require(plan)
    relays = plan.schedule.residency is not None
    batches = _batches(args, data, plan) if args.do_train else None
    steps_per_epoch = batches.batches_per_epoch if batches else 1
    num_steps = 0
    if batches:
        num_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
    args = settled_intervals(args, num_steps=num_steps, steps_per_epoch=steps_per_epoch)
    facts = _facts(args, plan, data)
    if lost_ranks is not None:  # any rank may have to write them
        facts["contents"] = dict(item for each in gathered(facts["contents"]) for item in each.items())
    with agreement.agreed():  # a host may have another file
        done = _saved_progress(args, facts)
    with agreement.agreed():  # the first rank alone writes
        writes = args.rank == 0 and not is_new
        report = Report(args, num_steps=num_steps, steps_per_epoch=steps_per_epoch, writes=writes)
    feed = Feed(
        data.training, size=args.per_device_train_batch_size, seed=args.seed, device=backend.device(),
        share=Share(ranks.replica, args.data_parallel_size), first_microbatch=done.microbatches,
    )  # fmt: skip
    with agreement.agreed():
        generation = None if data.prompts is None else Generation(args, plan.model, data.prompts, data.processor)
        source = pretrained = Pretrained(
            plan.model, args.model_name_or_path, new_head=data.task.new_head, other_sizes=args.ignore_mismatched_sizes
        )
        if args.merge_adapter:
            require_mergeable(plan.adapter, pretrained)
        if plan.adapter is not None:
            source = AdapterTensors(
                plan.adapter, source, used=plan.captured.all_names, seed=args.seed, begun=args.adapter_name_or_path,
                counted=plan.counted, rounded=rounding_of(plan, args),
            )  # fmt: skip
    freezer = Freezer.of(args, plan, ranks, done.freezing)
    weights, options = source, {}
    if freezer is not None:
        plan, options = freezer.plan, {"observe": freezer.observe}
        if freezer.num_frozen:  # frozen weights are in the checkpoint's model alone
            with agreement.agreed():
                weights = Pretrained(plan.model, str(args.resumed_from), new_head=data.task.new_head)
    pipeline = build_pipeline(
        plan, args, feed=feed, summary=data.task.summary, pretrained=weights, ranks=ranks,
        num_steps=max(num_steps, 1), first_batch=done.batches, first_microbatch=done.microbatches,
        is_alone=is_new, **options,
    )  # fmt: skip
    num_pairs = 0
    if not is_new:
        num_pairs = set_references(pipeline, (data.training, data.validation), size=args.per_device_train_batch_size)
    if args.resumed_from is not None:
        checkpoint.restore(pipeline, args.resumed_from)
    lines = (relay_lines if relays else first_lines)(plan, args)
    of_answers = [] if generation is None else generation.decoder.notes
    notes = [f"note: {note}" for note in [*args.notes, *data.notes, *source.notes, *of_answers]]
    proved = () if lost_ranks is None else lost_ranks.proved.lines
    for line in (*lines, *shorter_lines(plan, args, data), *proved, *notes):
        report.say(line)
    if num_pairs:
        report.say(f"reference: log-probabilities of {num_pairs} pairs in the model that the run began with")
    seconds = time.perf_counter() - started
    left = max(num_steps - done.batches, 0)
    report.say(f"{left} of {num_steps} batches to train, {seconds:.1f} s since the start")
    origin = CheckpointOrigin(source, plan.captured.all_names, plan.save_rest, None if relays else plan.partition)
    best = _best(args, done)
    generate = None if generation is None else generation.evaluate
    trainer = Trainer(
        pipeline, args, report, stop, origin, facts, batches, num_steps, data.validation, best, freezer,
        data.task.summary, generate, owes_evaluation=args.do_train and done.owes_evaluation, lost_ranks=lost_ranks,
        iteration=done.batches,
    )  # fmt: skip
    if is_new:
        lost_ranks.come_back(trainer)
    elif lost_ranks is not None:
        lost_ranks.begin(plan)
    if lost_ranks is not None:
        stop.means_loss = is_ended_with_node

    def finish() -> None:
        pipeline = trainer.pipeline
        if args.do_eval and trainer.evaluated_step != trainer.iteration:
            trainer.evaluate()
        if args.do_train:
            output = Path(args.output_dir)
            if args.load_best_model_at_end:
                if best.checkpoint is not None:
                    trainer.is_at_best = True
                    checkpoint.restore(pipeline, output / best.checkpoint)
                report.say(best.verdict())
            checkpoint.save_model(pipeline, output, origin)
            report.say(f"{'model' if plan.adapter is None else 'adapter'} in {args.output_dir}")
            if args.merge_adapter:
                merged = output / MERGED
                save_merged(plan.adapter, pretrained, output, merged, dtype=plan.dtype, save_rest=plan.save_merged_rest)
                report.say(f"merged model in {merged}")

    trainer.run(finish)
    try:
        _end(plan, trainer, args)
    except RuntimeError as error:  # all has been written
        if lost_ranks is None or not lost_ranks.comes_from_loss(error):
            raise
        lost_ranks.end_without_lost()
    report.close()


def _end(plan: RunPlan, trainer: Trainer, args: argparse.Namespace) -> None:
    """Report what the run has needed, draw its last batches, and close the pipeline. Collective."""
    pipeline, report, ranks = trainer.pipeline, trainer.report, trainer.pipeline.ranks
    peaks = [f"{peak / 2**20:.0f}" for peak in gathered(backend.peak_memory_bytes())]
    of_replicas = "; ".join(" ".join(peaks[rank] for rank in replica) for replica in ranks.pipelines)
    report.say(f"most memory of each rank{', by replica' * (len(ranks.pipelines) > 1)}, MiB: {of_replicas}")
    if plan.schedule.residency is not None:
        report.say(relay_peaks(pipeline))
    if args.pipeline_timeline:
        _draw(plan, pipeline, trainer, args)
    torch.distributed.barrier()
    pipeline.engine.close()


def relay_peaks(pipeline: BuiltPipeline) -> str:
    """The most bytes of a relay on each rank, in a sentence. Collective."""
    ledger = pipeline.updates[TOGETHER].ledger
    found = gathered((ledger.take_device_peak(), ledger.host_bytes))
    device, host = (" ".join(f"{each / 2**20:.1f}" for each in part) for part in zip(*found, strict=True))
    what = "" if backend.is_cuda() else " (weights, gradients and inputs)"
    return f"of these, MiB on the device{what}: {device}; on the host: {host}"


def _batches(args: argparse.Namespace, data: Data, plan: RunPlan) -> Epochs:
    """The run's batches in order. Raises ValueError if the schedule cannot run one of their numbers of microbatches."""
    batches = epochs_of(args, data.training)
    num_of, epoch = Share(0, args.data_parallel_size).num_of, list(islice(batches.batches(), batches.batches_per_epoch))
    size, replicas = args.per_device_train_batch_size, args.data_parallel_size
    if plan.counted and any(len(batch) % replicas or min(map(len, batch)) < size for batch in epoch):
        raise ValueError(
            f"{plan.captured.model_name} has batch norm, whose statistics would count the rows that fill up the last "
            "batch of an epoch; give --dataloader_drop_last"
        )
    for num_microbatches in sorted({num_of(len(batch)) for batch in epoch}):
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
        "optim": args.optim
        + (" with FP32 masters" if has_masters(args) else "")
        + (" with BF16 moments" if args.l2l_moments == "bfloat16" else ""),
        "softened": ", ".join(name for name in SOFTENING if getattr(args, name)),
        "samples": len(data.training) if args.do_train else None,
        "batch_size": rows_of_batch(args) if args.do_train else None,
        "flags": _flags(args) if args.do_train else {},
        "contents": _contents(args, data) if args.do_train else {},
    }


def _flags(args: argparse.Namespace) -> dict[str, object]:
    """The flags that a resumed run must repeat if it trains."""
    names = {*KEPT, *flags_of_rows(), *(FREEZING if args.freeze_training else ())}
    return {name: getattr(args, name) for name in sorted(names)}


def _contents(args: argparse.Namespace, data: Data) -> dict[str, str | None]:
    """Name of a flag -> the state of its file, for a resumed run to compare.

    Rows that are kept in files (--data_cache) know the contents from which they were made. Otherwise the first rank of
    each host reads the files once more. With an adapter it also reads some of the frozen weights. Other ranks compare
    no files that they would have to read.
    """
    rank, _, local_rank = environment_ranks()
    if 0 not in (rank, local_rank):
        return data.training.contents if isinstance(data.training, StoredRows) else {}
    contents = data.training.contents if isinstance(data.training, StoredRows) else contents_of_files(args)
    base = {"model_name_or_path": state_of_tensors(args.model_name_or_path)} if has_adapter(args) else {}
    return {**contents, **base}


def _draw(plan: RunPlan, pipeline: BuiltPipeline, trainer: Trainer, args: argparse.Namespace) -> None:
    """Draw the last batches of the first replica, or of all ranks that are left if ranks were lost."""
    traces = gather_traces(pipeline.engine.trace(), group=pipeline.groups.pipeline)
    if pipeline.ranks.replica:
        return
    program = plan.schedule if trainer.survivors is None else trainer.survivors.schedule
    with ByProduct(f"--pipeline_timeline {args.pipeline_timeline}", consequence="without it").attempt():
        write_pictures(
            program, traces, Path(args.pipeline_timeline), drains=trainer.drains,
            most=args.pipeline_timeline_iterations,
        )  # fmt: skip


def _best(args: argparse.Namespace, done: SavedProgress) -> Best | None:
    """The best evaluation with which the run begins; None if no flag asks for it.

    Raises ValueError if the run resumes from a checkpoint whose best checkpoint is not in --output_dir.
    """
    best = Best.of(args)
    if best is None or done.best is None or not args.do_train:
        return best
    best.restore(done.best)
    if best.checkpoint is not None and not (Path(args.output_dir) / best.checkpoint).is_dir():
        raise ValueError(
            f"the best checkpoint of the run that goes on, {best.checkpoint}, is not in --output_dir "
            f"{args.output_dir}; give the folder of the run, or begin again"
        )
    return best


def _saved_progress(args: argparse.Namespace, facts: dict) -> SavedProgress:
    """The progress with which the run begins. Raises ValueError if the checkpoint was made with other settings."""
    begin = SavedProgress(0, 0, **facts)
    if args.resumed_from is None:
        return begin
    found = SavedProgress.read(args.resumed_from)
    found.require_same(begin, args.resumed_from, trains=args.do_train)
    return found
