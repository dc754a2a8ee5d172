"""Puts a run together: tokenizer, data, model, optimizer, checkpoint, stage, engine, in the order in which errors are
cheap.

Directories and files are tried before the model is built, and the checkpoint is read before the first sample. What the
loop needs comes back as one record.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch

from megatron import backend
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.pipeline.runtime.activation_memory import ActivationMemory
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.megatron_relay_update import MegatronRelayUpdate
from megatron.pipeline.runtime.megatron_stage import ForwardStep, MegatronStage
from megatron.pipeline.runtime.megatron_update import MegatronWeightUpdate
from megatron.pipeline.runtime.trace import CudaClock, HostClock, Tracer
from megatron.pipeline.schedules import Schedule
from megatron.training import config, plan, provisional
from megatron.training.arguments.classification import CLASSIFIERS
from megatron.training.arguments.rules_run import pipeline_schedule
from megatron.training.checkpoint.ownership import OwnerMark
from megatron.training.checkpointing import CheckpointPosition, CheckpointWriter, load_checkpoint
from megatron.training.data import Field, FieldsProvider, MicrobatchIterator, gpt_fields
from megatron.training.host_room import require_room
from megatron.training.logging import ALLOCATED, LOSS, SAVED_ACTIVATIONS, Reporter
from megatron.training.models import build_chunks, num_parameters, wrap_for_training
from megatron.training.optimizer_kernel import choose_kernel
from megatron.training.optimizers import build_optimizer
from megatron.training.outputs import prepare_outputs
from megatron.training.placement import this_process
from megatron.training.throughput import flops_per_sample
from megatron.training.tokenizer import build_tokenizer, padded_vocab_size, vocab_size

ModelProvider = Callable[..., torch.nn.Module]
DatasetsProvider = Callable[[argparse.Namespace, object], list]
LossNames = Callable[[argparse.Namespace], tuple[str, ...]]

_TRACED_EXTRA = 8  # legs: drains, evaluations and batches cut by them


@dataclass
class Run:
    """Everything of a run on one rank, and where it stands (`position` counts over the whole run)."""

    args: argparse.Namespace
    chunks: list[torch.nn.Module]
    optimizer: object
    scheduler: OptimizerParamScheduler
    update: MegatronWeightUpdate | MegatronRelayUpdate
    stages: list[MegatronStage]
    engine: PipelineEngine
    reporter: Reporter
    writer: CheckpointWriter | None
    datasets: list
    fields: tuple[Field, ...]
    vocab_size: int
    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    flops: float = 0.0
    saved_iteration: int | None = None

    def position(self) -> CheckpointPosition:
        """Where the run stands, as a checkpoint records it."""
        return CheckpointPosition(
            iteration=self.iteration,
            consumed_train_samples=self.consumed_samples,
            consumed_valid_samples=self.consumed_valid_samples,
            num_floating_point_operations_so_far=self.flops,
        )

    def samples(self, index: int, name: str, consumed: int) -> list[MicrobatchIterator]:
        """Microbatches of dataset `index` (0 training, 1 validation, 2 test) from sample `consumed` on, by own stage.

        Validation data begin again at their end: a resumed run that evaluates at other intervals has them sized for
        those, and its position from before. Those of which every evaluation takes all begin anew with it.
        """
        if getattr(self.datasets[index], "starts_over", False):
            consumed = 0
        return [
            MicrobatchIterator(
                self.args, self.datasets[index], fields=self.fields, name=name, consumed_samples=consumed,
                vocab_size=self.vocab_size, stage=stage.index, num_stages=stage.num_stages,
                repeats=name == "validation",
            )
            for stage in self.stages
        ]  # fmt: skip


def assemble(
    args: argparse.Namespace,
    *,
    model_provider: Callable[[argparse.Namespace, object], ModelProvider],
    forward_step: ForwardStep,
    datasets_provider: DatasetsProvider,
    fields_provider: FieldsProvider = gpt_fields,
    loss_names: LossNames = lambda args: (LOSS,),
) -> Run:
    """Build a run on this rank. Collective. Raises ValueError for what the user can mend.

    Args:
        args: validated; process groups are up.
        model_provider: `model_provider(args, config)` returns Megatron's `provider(pre_process, post_process)`. It is
            called for each stage of the rank, with a configuration by which each stage has a rank of its own.
        forward_step: Megatron's `forward_step(data_iterator, model)`.
        datasets_provider: `datasets_provider(args, tokenizer)` returns the three datasets of this rank.
        fields_provider: `fields_provider(args)` returns the parts of a microbatch.
        loss_names: `loss_names(args)` returns what the forward step's loss function reports; "lm loss" or "loss" is
            among it.
    """
    owner_mark = prepare_outputs(args)
    try:
        return _build(args, owner_mark, model_provider, forward_step, datasets_provider, fields_provider, loss_names)
    except BaseException:
        if owner_mark is not None:
            owner_mark.release()
        raise


def _build(
    args: argparse.Namespace,
    owner_mark: OwnerMark | None,
    model_provider: Callable[[argparse.Namespace, object], ModelProvider],
    forward_step: ForwardStep,
    datasets_provider: DatasetsProvider,
    fields_provider: FieldsProvider,
    loss_names: LossNames,
) -> Run:
    tokenizer = None if args.architecture == "vit" else build_tokenizer(args)
    args.padded_vocab_size = 0 if tokenizer is None else padded_vocab_size(args, tokenizer)
    schedule = pipeline_schedule(args)
    model_config = config.transformer_config(args)
    layers = plan.layers_of_stages(model_config)
    require_room(args, schedule, layers)
    reporter = Reporter(args)
    datasets = datasets_provider(args, tokenizer)
    own_stages = schedule.stages_of(parallel_state.get_pipeline_model_parallel_rank())
    chunks = build_chunks(
        partial(model_provider, args), model_config, stages=own_stages, layers=layers,
        on_host=schedule.residency is not None,
    )  # fmt: skip
    chunks = wrap_for_training(chunks, config.ddp_config(args), on_host=schedule.residency is not None)
    optimizer = build_optimizer(args, chunks, on_host=schedule.residency is not None)
    scheduler = config.param_scheduler(args, optimizer)
    counts = args.moves_activations or args.log_saved_activations
    memory = ActivationMemory(backend.device()) if counts else None
    update = _update(args, schedule, chunks, optimizer, scheduler, loss_names=loss_names(args), gauges=_gauges(memory))
    position = _load(args, chunks, optimizer, scheduler, update, reporter) or CheckpointPosition()
    choose_kernel(optimizer, args.optimizer_kernel)  # what was loaded has the kernel that it was saved with
    args.batch_sizes.check_from(position.consumed_train_samples)
    stages = [
        MegatronStage(
            chunk, forward_step, update, index=stage, num_stages=schedule.num_stages,
            seq_length=args.seq_length, micro_batch_size=args.micro_batch_size, recompute=schedule.recomputes(stage),
            seed=args.seed, loss_names=loss_names(args), activation_memory=memory,
        )
        for stage, chunk in zip(own_stages, chunks, strict=True)
    ]  # fmt: skip
    engine = build_engine(
        args, schedule, stages, update, position, activation_memory=memory if args.moves_activations else None
    )
    _describe(args, reporter, stages, position)
    return Run(
        args, chunks, optimizer, scheduler, update, stages, engine, reporter,
        CheckpointWriter(args.save, owner_mark=owner_mark) if args.save is not None else None,
        datasets, fields_provider(args), 0 if tokenizer is None else vocab_size(args, tokenizer),
        iteration=position.iteration, consumed_samples=position.consumed_train_samples,
        consumed_valid_samples=position.consumed_valid_samples,
        flops=position.num_floating_point_operations_so_far,
        saved_iteration=position.iteration if position.iteration else None,
    )  # fmt: skip


def _update(
    args: argparse.Namespace,
    schedule: Schedule,
    chunks: list,
    optimizer: object,
    scheduler: OptimizerParamScheduler,
    **options: object,
) -> MegatronWeightUpdate | MegatronRelayUpdate:
    """The weight update of this rank, for where the schedule has the weights."""
    options["timeout"] = timedelta(minutes=args.distributed_timeout_minutes)
    stages = schedule.stages_of(parallel_state.get_pipeline_model_parallel_rank())
    if schedule.residency is not None:
        return MegatronRelayUpdate(
            chunks, optimizer, scheduler, stages=stages, residency=schedule.residency, host=this_process().host,
            gathers=args.l2l_fetch == "shares", **options,
        )  # fmt: skip
    return MegatronWeightUpdate(
        chunks, optimizer, scheduler, weights=schedule.weights, num_stages=schedule.num_stages, stage=stages[0],
        single_gradient_buffer=args.pipeline_2bw_single_gradient_buffer, reduce_partial=schedule.reduce_partial,
        uniform=schedule.provisional_microbatches is not None, **options,
    )  # fmt: skip


def _gauges(memory: ActivationMemory | None) -> dict[str, Callable[[], float]]:
    """What every rank measures for the report of a batch, by name."""
    if memory is None:
        return {}
    allocated = {ALLOCATED: backend.peak_memory_bytes} if backend.is_cuda() else {}
    return {SAVED_ACTIVATIONS: memory.take_recent_peak, **allocated}


def _load(
    args: argparse.Namespace,
    chunks: list,
    optimizer: object,
    scheduler: object,
    update: MegatronWeightUpdate | MegatronRelayUpdate,
    reporter: Reporter,
) -> CheckpointPosition | None:
    """Load `--load`, or where that holds nothing `--pretrained-checkpoint`'s weights; a classifier's head is new."""
    position = None
    if args.load is not None:
        position = load_checkpoint(args=args, chunks=chunks, optimizer=optimizer, scheduler=scheduler, update=update)
        if position is None and args.exit_on_missing_checkpoint:
            raise ValueError(f"--load {args.load} holds no checkpoint, and --exit-on-missing-checkpoint is given")
    if position is None and args.pretrained_checkpoint is not None:
        pretrained = argparse.Namespace(**{**vars(args), "load": args.pretrained_checkpoint, "finetune": True,
                                           "ckpt_step": None})  # fmt: skip
        position = load_checkpoint(
            args=pretrained, chunks=chunks, optimizer=optimizer, scheduler=scheduler, update=update,
            body_only=args.architecture in CLASSIFIERS,
        )  # fmt: skip
        if position is None:
            raise ValueError(f"--pretrained-checkpoint {args.pretrained_checkpoint} holds no checkpoint")
        but = " but for the head" if args.architecture in CLASSIFIERS else ""
        reporter.say(f"loaded the weights of {args.pretrained_checkpoint}{but}; starting from iteration 0")
    elif position is not None:
        reporter.say(f"loaded {args.load}; starting from iteration {position.iteration}")
    elif args.load is not None:
        reporter.say(f"--load {args.load} holds no checkpoint yet: starting from iteration 0")
    return position


def build_engine(
    args: argparse.Namespace,
    schedule: Schedule,
    stages: list[MegatronStage],
    update: MegatronWeightUpdate | MegatronRelayUpdate,
    position: CheckpointPosition,
    activation_memory: ActivationMemory | None = None,
) -> PipelineEngine:
    """The engine over this rank's pipeline group, going on at `position`.

    `activation_memory`: the stages', where the schedule moves activations.
    Microbatches are numbered by the samples before them, so that dropout goes on as in a run that was never stopped,
    also after a change of the microbatch size or of the number of replicas.
    """
    tracer = None
    if args.pipeline_timeline is not None:
        clock = CudaClock() if backend.is_cuda() else HostClock()
        tracer = Tracer(num_batches=2 * args.pipeline_timeline_iterations + _TRACED_EXTRA, clock=clock)
    return PipelineEngine(
        schedule, stages, update,
        ranks=torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()),
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        backend=args.distributed_backend,
        device=backend.device(),
        tracer=tracer,
        first_batch=position.iteration,
        first_microbatch=position.consumed_train_samples // args.batch_sizes.samples_per_microbatch,
        activation_memory=activation_memory,
        ledger=update.ledger if schedule.residency is not None else None,
    )  # fmt: skip


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
    predictions = provisional.description(args, num_microbatches)
    reporter.say(
        f"{args.world_size} ranks on {backend.device().type} ({args.distributed_backend}): tensor "
        f"{args.tensor_model_parallel_size} x pipeline {args.pipeline_model_parallel_size} x data "
        f"{args.data_parallel_size}, schedule {args.pipeline_schedule}, "
        f"{num_microbatches} microbatches of {args.micro_batch_size} a batch\n"
        + (f"{predictions}\n" if predictions else "")
        + f"parameters per stage (millions): {parts}; {flops_per_sample(args) / 1e9:.3g} GFLOP per sample"
    )
