"""Puts a run together: tokenizer, data, model, optimizer, checkpoint, stage, engine, in the order in which errors are
cheap.

Directories and files are tried before the model is built, and the checkpoint is read before the first sample. What the
loop needs comes back as one record.
"""

import argparse
import time

import torch

from megatron import backend
from megatron.documents.numbers import counted
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.pipeline.start_up import provisional
from megatron.trainer.arguments.flags.classification import CLASSIFIERS
from megatron.trainer.arguments.values.pipeline_choice import choice_of, schedule_text
from megatron.trainer.changes.elasticity import Elasticity
from megatron.trainer.changes.prefix_cache import PrefixCache, require_cache
from megatron.trainer.checkpoint.checkpoint import CheckpointPosition, CheckpointWriter, load_checkpoint
from megatron.trainer.checkpoint.ownership import OwnerMark
from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size, vocab_size
from megatron.trainer.models.gpt import num_parameters
from megatron.trainer.optimizer.kernel import choose_kernel
from megatron.trainer.plan.arrangement import iterations_to_the_end
from megatron.trainer.ranks.agreement import agreed
from megatron.trainer.report.log import Reporter
from megatron.trainer.report.throughput import flops_per_sample
from megatron.trainer.run.evaluation import without_data
from megatron.trainer.start_up.engine import build_engine
from megatron.trainer.start_up.model_and_optimizer import ModelAndOptimizer, setup_model_and_optimizer
from megatron.trainer.start_up.outputs import prepare_outputs
from megatron.trainer.start_up.program import TrainingProgram
from megatron.trainer.start_up.run import Run


def assemble(args: argparse.Namespace, program: TrainingProgram) -> Run:
    """Build a run of `program` on this rank. Collective. Raises ValueError for what the user can mend.

    `args`: completed; process groups are up.
    """
    owner_mark = prepare_outputs(args)
    try:
        _require_one_program(args)
        return _build(args, program, owner_mark)
    except BaseException:
        if owner_mark is not None:
            owner_mark.release()
        raise


def _build(args: argparse.Namespace, program: TrainingProgram, owner_mark: OwnerMark | None) -> Run:
    tokenizer = None if args.architecture == "vit" else build_tokenizer(args)
    args.padded_vocab_size = 0 if tokenizer is None else padded_vocab_size(args, tokenizer)
    if args.activation_cache is not None:
        with agreed():
            require_cache(args)
    reporter = Reporter(args)
    datasets = program.datasets_provider(args, tokenizer)
    if args.freeze_watch_validation is not None and not args.has_split[1]:
        raise ValueError(
            f"--freeze-watch-validation {args.freeze_watch_validation:g} looks at evaluations, and there are no "
            "validation data; give some, or leave this out"
        )
    for note in without_data(args):
        reporter.say(f"note: {note}")
    began = time.perf_counter()
    built = setup_model_and_optimizer(args, program)
    seconds_of_setup = time.perf_counter() - began
    position = _load(args, built, reporter) or CheckpointPosition()
    elasticity = Elasticity(args) if args.changes else None
    if elasticity is not None and args.recorded_changes is not None:
        elasticity.load_state_dict(args.recorded_changes)
    choose_kernel(built.optimizer, args.optimizer_kernel)  # what was loaded has the kernel that it was saved with
    args.batch_sizes.check_from(position.consumed_train_samples)
    args.train_iters = iterations_to_the_end(
        args, iteration=position.iteration, consumed_samples=position.consumed_train_samples
    )
    began = time.perf_counter()
    engine = build_engine(args, built, position)
    if elasticity is not None:  # a change does the same again
        elasticity.expect_change(seconds_of_setup + time.perf_counter() - began)
    _describe(args, reporter, built.stages, position)
    cache = None
    if args.activation_cache is not None:
        with agreed():
            cache = PrefixCache(args, datasets[0])
        cache.serve(built.stages)
    return Run(
        args, program, built, engine, reporter,
        CheckpointWriter(args.save, owner_mark=owner_mark) if args.save is not None else None,
        datasets, 0 if tokenizer is None else vocab_size(args, tokenizer), elasticity, cache,
        iteration=position.iteration, consumed_samples=position.consumed_train_samples,
        consumed_valid_samples=position.consumed_valid_samples,
        flops=position.num_floating_point_operations_so_far,
        saved_iteration=position.iteration if position.iteration else None,
    )  # fmt: skip


def _require_one_program(args: argparse.Namespace) -> None:
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


def _load(args: argparse.Namespace, built: ModelAndOptimizer, reporter: Reporter) -> CheckpointPosition | None:
    """Load `--load`, or where that holds nothing `--pretrained-checkpoint`'s weights; a classifier's head is new."""
    position = None
    if args.load is not None:
        position = load_checkpoint(built, args=args, say=reporter.say)
        if position is None and args.exit_on_missing_checkpoint:
            raise ValueError(f"--load {args.load} holds no checkpoint, and --exit-on-missing-checkpoint is given")
    if position is None and args.pretrained_checkpoint is not None:
        pretrained = argparse.Namespace(**{**vars(args), "load": args.pretrained_checkpoint, "finetune": True,
                                           "ckpt_step": None})  # fmt: skip
        position = load_checkpoint(built, args=pretrained, body_only=args.architecture in CLASSIFIERS)
        if position is None:
            raise ValueError(f"--pretrained-checkpoint {args.pretrained_checkpoint} holds no checkpoint")
        but = " but for the head" if args.architecture in CLASSIFIERS else ""
        reporter.say(f"loaded the weights of {args.pretrained_checkpoint}{but}; starting from iteration 0")
    elif position is not None:
        reporter.say(f"loaded {args.load}; starting from iteration {position.iteration}")
    elif args.load is not None:
        reporter.say(f"--load {args.load} holds no checkpoint yet: starting from iteration 0")
    return position


def _describe(
    args: argparse.Namespace, reporter: Reporter, stages: list[MegatronStage], position: CheckpointPosition
) -> None:
    gathered = [None] * args.world_size
    torch.distributed.all_gather_object(gathered, [(stage.index, num_parameters([stage.model])) for stage in stages])
    totals: dict[int, int] = {}
    for index, count in (pair for pairs in gathered for pair in pairs):
        totals[index] = totals.get(index, 0) + count // args.data_parallel_size
    parts = ", ".join(f"{totals[index] / 1e6:.3g}" for index in sorted(totals))
    num_microbatches = args.batch_sizes.num_microbatches(position.consumed_train_samples)
    predictions = provisional.description(args.schedule, choice_of(args).name, num_microbatches)
    reporter.say(
        f"{counted(args.world_size, 'rank')} on {backend.device().type} ({args.distributed_backend}): tensor "
        f"{args.tensor_model_parallel_size} x pipeline {args.pipeline_model_parallel_size} x data "
        f"{args.data_parallel_size}, {schedule_text(args)}, "
        f"{counted(num_microbatches, 'microbatch')} of {args.micro_batch_size} a batch\n"
        + (f"{predictions}\n" if predictions else "")
        + f"parameters per stage (millions): {parts}; {flops_per_sample(args) / 1e9:.3g} GFLOP per sample"
    )
