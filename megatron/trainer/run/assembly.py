"""The assembly of a run on this rank: tokenizer, data, model, optimizer, checkpoint, stages, engine, in this order.

This order makes errors cheap: directories and files are tried before the model is built, and the checkpoint is read
before the first sample. The training loop gets one record (`Run`).
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from megatron import backend
from megatron.documents import counted
from megatron.pipeline.runtime.failure.agreement import agreed, gathered
from megatron.pipeline.runtime.stages.megatron.optimizers import is_dense
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.pipeline.start_up import late_weights
from megatron.trainer.arguments.flags.config import (
    TrainConfig,
    choice_of,
    num_expert_replicas,
    num_places,
    num_replicas,
    ranks_of_place,
    schedule_text,
)
from megatron.trainer.arguments.flags.model import CLASSIFIERS
from megatron.trainer.arguments.flags.specification import name_of
from megatron.trainer.arguments.rules.data import split_shares
from megatron.trainer.changes.decisions import ChangeDecisions
from megatron.trainer.changes.prefix_cache import PrefixCache, require_cache
from megatron.trainer.checkpoint.checkpoint import CheckpointPosition, load_checkpoint
from megatron.trainer.checkpoint.hugging_face import load_hugging_face
from megatron.trainer.checkpoint.ownership import OwnerMark
from megatron.trainer.checkpoint.writer import CheckpointWriter
from megatron.trainer.data.datasets import SPLITS
from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size, require_known_tokens, vocab_size
from megatron.trainer.plan.arrangement import iterations_to_the_end
from megatron.trainer.report.log import Reporter
from megatron.trainer.report.metrics import flops_per_sample
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
    from megatron.pipeline.runtime.copied_stages import CopyRanks
    from megatron.pipeline.runtime.failure.membership import Membership
    from megatron.trainer.data.datasets import Datasets


def assemble(
    args: TrainConfig,
    program: TrainingProgram,
    *,
    copies: CopyRanks | None = None,
    takes_over: bool = False,
    reading: AbstractContextManager | None = None,
) -> Run:
    """Build a run of `program` on this rank. Collective. Raises ValueError for errors that the user can fix.

    Args:
        args: completed. The process groups must exist.
        copies: if ranks were lost before, the ranks over which the reductions of this rank go. The run has no engine.
        takes_over: a process of this job that is lost may still own the directory of `--save`.
        reading: a context in which the data are read; the indices of samples may be made in it.
    """
    with ExitStack() as on_error:
        owner_mark = prepare_outputs(args, takes_over=takes_over)
        if owner_mark is not None:
            on_error.callback(owner_mark.release)
        _require_one_program(args)
        made = args.made_program
        if made is not None and not made.measures and args.save is not None and args.rank == 0:
            from megatron.trainer.plan import auto_program

            auto_program.keep(made, Path(args.save))
        run = _build(args, program, owner_mark, copies, reading, on_error)
        on_error.pop_all()
    return run


def assemble_alone(args: TrainConfig, program: TrainingProgram, membership: Membership) -> Run:
    """Build the run of a new process that replaces a lost rank, without its state and its engine.

    `args`: completed, with the rank of the lost process. This process is alone in its process group, and megatron.core
    has its pipeline rank. Waits until the first of the other ranks has built its part: the indices of samples, which
    all read, are written then. Raises ValueError as `assemble` does, and OnThisRank if no other rank is left.
    """
    membership.await_keys([_KINDS])
    args, reporter, datasets, num_tokens = _read(args, program, ExitStack(), writes=False)
    kinds = pickle.loads(membership.ask(lambda store: store.get(_KINDS)))
    built = setup_model_and_optimizer(args, program, kinds=kinds)
    writer = CheckpointWriter(args.save) if args.save is not None else None
    return Run(args, program, built, None, reporter, writer, datasets.parts, num_tokens)


_KINDS = "kinds of parameters"  # a key of the job's store


def tell_new_processes(run: Run, membership: Membership) -> None:
    """Write to the job's store what `assemble_alone` needs to know of the other ranks, if no rank has done so yet."""
    if not membership.ask(lambda store: store.check([_KINDS])):
        kinds = pickle.dumps(run.optimizer.kinds_of_parameters)
        membership.ask(lambda store: store.set(_KINDS, kinds))


def _read(
    args: TrainConfig,
    program: TrainingProgram,
    on_error: ExitStack,
    *,
    writes: bool | None = None,
    reading: AbstractContextManager | None = None,
) -> tuple[TrainConfig, Reporter, Datasets, int]:
    """Read the tokenizer and the data, and open the log.

    Returns the configuration completed from tokenizer and data, the reporter, the datasets, and the number of token
    ids.

    Args:
        on_error: what is closed if the run cannot be built; gets the reporter.
        writes: whether this rank writes the log; None: if it is the last rank.
        reading: as for `assemble`.
    """
    tokenizer = None if args.architecture == "vit" else build_tokenizer(args)
    args = replace(args, padded_vocab_size=0 if tokenizer is None else padded_vocab_size(args, tokenizer))
    if args.load_hf is not None:
        require_known_tokens(args, tokenizer)
    if args.activation_cache is not None:
        with agreed():
            require_cache(args)
    reporter = Reporter(args, writes=writes)
    on_error.callback(reporter.close)
    with reading or nullcontext():
        datasets = program.datasets_provider(args, tokenizer)
    args = replace(args, has_split=datasets.has_split, data_digest=datasets.digest)
    if args.freeze_watch_validation is not None and not args.has_split[1]:
        raise ValueError(
            f"--freeze-watch-validation {args.freeze_watch_validation:g} looks at evaluations, and there are no "
            "validation data; give some, or leave this out"
        )
    for note in (*datasets.notes, *without_data(args)):
        reporter.say(f"note: {note}")
    return args, reporter, datasets, 0 if tokenizer is None else vocab_size(args, tokenizer)


def _build(
    args: TrainConfig,
    program: TrainingProgram,
    owner_mark: OwnerMark | None,
    copies: CopyRanks | None,
    reading: AbstractContextManager | None,
    on_error: ExitStack,
) -> Run:
    args, reporter, datasets, num_tokens = _read(args, program, on_error, reading=reading)
    began = time.perf_counter()
    built = setup_model_and_optimizer(args, program, copies=copies)
    seconds_of_setup = time.perf_counter() - began
    position = _load(args, built, reporter) or CheckpointPosition()
    args = replace(args, train_iters=iterations_to_the_end(
        args, iteration=position.iteration, consumed_samples=position.consumed_train_samples
    ))  # fmt: skip
    decisions = ChangeDecisions(args) if args.changes else None
    if decisions is not None and args.recorded_changes is not None:
        decisions.load_state_dict(args.recorded_changes)
    choose_kernel(built.optimizer, args.optimizer_kernel)  # a loaded state has the kernel of its save
    if args.go_on_without_lost_ranks and args.use_distributed_optimizer:
        built.update.keep_shards(copies=args.redundant_optimizer)
    args.batch_sizes.check_from(position.consumed_train_samples)
    began = time.perf_counter()
    engine = build_engine(args, built, position) if copies is None else None
    if decisions is not None:  # a change repeats the same work
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
        datasets.parts, num_tokens, decisions, cache,
        iteration=position.iteration, consumed_samples=position.consumed_train_samples,
        consumed_valid_samples=position.consumed_valid_samples,
        flops=position.num_floating_point_operations_so_far,
        saved_iteration=position.iteration if position.iteration else None,
    )  # fmt: skip


def _require_one_program(args: TrainConfig) -> None:
    """Raise ValueError if ranks have read different programs, each from its own host."""
    if args.program is None:
        return
    found = gathered(args.program.short_hash)
    if len(set(found)) > 1:
        other = next(rank for rank, digits in enumerate(found) if digits != found[0])
        raise ValueError(
            f"--pipeline-program {args.pipeline_program} is another program on rank {other} (sha256 {found[other]}) "
            f"than on rank 0 ({found[0]}); give all hosts the same file"
        )


def _load(args: TrainConfig, built: ModelAndOptimizer, reporter: Reporter) -> CheckpointPosition | None:
    """Load the checkpoint of `--load`, or without one the weights of `--pretrained-checkpoint` or `--load-hf`.

    A classifier's head is not loaded from `--pretrained-checkpoint`. Returns the position of `--load`, 0 for
    `--pretrained-checkpoint`; None without either.
    """
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
    """Notes on evaluations that the run would make and for which it has no data (`has_split`).

    Raises ValueError if --skip-train has nothing to evaluate, or if the user's flags ask for evaluations and --split
    promises validation data that are missing.
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
    of_ranks = gathered([(stage.index, _num_parameters(args, stage)) for stage in stages])
    totals: dict[int, float] = {}
    for index, count in chain.from_iterable(of_ranks):
        totals[index] = totals.get(index, 0) + count
    num_ranks = num_places(args) * ranks_of_place(args)  # with each stage, if none is lost
    ranks, num_all = counted(args.world_size, "rank"), num_ranks * args.pipeline_model_parallel_size
    if len(of_ranks) < num_all:
        ranks += f" of {num_all}"
        num_with = Counter(index for index, _ in chain.from_iterable(of_ranks))
        totals = {index: total * num_ranks / num_with[index] for index, total in totals.items()}
    parts = ", ".join(f"{totals[index] / 1e6:.3g}" for index in sorted(totals))
    num_microbatches = args.batch_sizes.num_microbatches(position.consumed_train_samples)
    context = f" x context {args.context_parallel_size}" if args.context_parallel_size > 1 else ""
    predictions = late_weights.description(args.schedule, choice_of(args).name, num_microbatches)
    reporter.say(
        f"{ranks} on {backend.device().type} ({args.distributed_backend}): tensor "
        f"{args.tensor_model_parallel_size} x pipeline {args.pipeline_model_parallel_size} x data "
        f"{args.data_parallel_size}{context}, {schedule_text(args)}, "
        f"{counted(num_microbatches, 'microbatch')} of {args.micro_batch_size} a batch\n"
        + (f"{predictions}\n" if predictions else "")
        + f"parameters per stage (millions): {parts}; {flops_per_sample(args) / 1e9:.3g} GFLOP per sample"
    )


def _num_parameters(args: TrainConfig, stage: MegatronStage) -> float:
    """This rank's share of a stage's parameters; the shares of all ranks add up to the number in the stage."""
    return sum(
        param.nelement() / (num_replicas(args) if is_dense(param) else num_expert_replicas(args))
        for param in stage.model.parameters()
    )
