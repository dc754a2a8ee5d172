"""A run on one rank: its training program, its part of the model with the optimizer, the engine, and the reports.

A run has one `ModelAndOptimizer` at a time: the rank's model chunks with their optimizer, weight update and stages. If
the pipeline changes during training, the run builds another one, and the trained state moves to it as it does through
a checkpoint. The engine drives the stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from megatron import backend
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.pipeline.placement.topology import this_process
from megatron.pipeline.program.copies import Share, share_of
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.activations.transfers import DeferredBytes
from megatron.pipeline.runtime.contract.trace import CudaClock, HostClock, Tracer
from megatron.pipeline.runtime.copied_stages import CopyRanks
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.failure.errors import AgreedError
from megatron.pipeline.runtime.stages.megatron.auxiliary import ROUTER_LOSSES, loss_names
from megatron.pipeline.runtime.stages.megatron.base_update import LayersOfParameters
from megatron.pipeline.runtime.stages.megatron.frozen_update import MegatronFrozenUpdate
from megatron.pipeline.runtime.stages.megatron.optimistic_update import MegatronOptimisticUpdate
from megatron.pipeline.runtime.stages.megatron.pipeline_position import copy_tied_embeddings_over
from megatron.pipeline.runtime.stages.megatron.relay_update import MegatronRelayUpdate
from megatron.pipeline.runtime.stages.megatron.stage import ForwardStep, MegatronStage
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
from megatron.pipeline.schedules import PipelineSchedule
from megatron.trainer.arguments.flags.config import (
    TrainConfig,
    edge_length,
    num_places,
    ranks_of_place,
    replica_in_place,
    replicas_of_place,
)
from megatron.trainer.checkpoint.checkpoint import CheckpointPosition, RunParts
from megatron.trainer.checkpoint.writer import CheckpointWriter
from megatron.trainer.data.microbatches import FieldsProvider, MicrobatchIterator, gpt_fields
from megatron.trainer.models import core_config
from megatron.trainer.models.gpt import build_chunks, wrap_for_training
from megatron.trainer.plan import arrangement, from_flags
from megatron.trainer.report.log import Reporter
from megatron.trainer.report.metrics import ALLOCATED, DEFERRED, LOSS, SAVED_ACTIVATIONS, flops_per_sample
from megatron.trainer.start_up.initialize import require_room
from megatron.trainer.start_up.optimizer import Kinds, build_optimizer

if TYPE_CHECKING:
    from megatron.pipeline.survivors import Survivors
    from megatron.trainer.changes.decisions import ChangeDecisions
    from megatron.trainer.changes.prefix_cache import PrefixCache
    from megatron.trainer.data.datasets import Datasets

# --- the program ------------------------------------------------------------------------------------------------------


def language_model_losses(args: TrainConfig) -> tuple[str, ...]:
    """The names of a GPT's losses: of its tokens, of multi-token prediction, and of its routers."""
    of_tokens = (LOSS, *loss_names(args.mtp_num_layers))
    if args.num_experts is None:
        return of_tokens
    factors = dict(zip(args.moe_router_load_balancing_type, args.moe_aux_loss_coeff, strict=False))
    factors["z_loss"] = args.moe_z_loss_coeff
    return (*of_tokens, *(name for kind, name in ROUTER_LOSSES.items() if factors.get(kind)))


ModelProvider = Callable[..., torch.nn.Module]
"""Megatron's `provider(pre_process, post_process)`."""


@dataclass(frozen=True, kw_only=True)
class TrainingProgram:
    """The parts of a training program, for any flags.

    Attributes:
        model_provider: `model_provider(args, config)` returns Megatron's `provider(pre_process, post_process)`. It is
            called for each stage of the rank, with a configuration in which each stage is a pipeline rank of its own.
        forward_step: Megatron's `forward_step(data_iterator, model)`.
        datasets_provider: `datasets_provider(args, tokenizer)` returns the `Datasets` of this rank; `tokenizer` is None
            for an architecture without text.
        fields_provider: `fields_provider(args)` returns the parts of a microbatch.
        loss_names: `loss_names(args)` returns the names that the forward step's loss function reports, which include
            "lm loss" or "loss".
    """

    model_provider: Callable[[TrainConfig, TransformerConfig], ModelProvider]
    forward_step: ForwardStep
    datasets_provider: Callable[[TrainConfig, MegatronTokenizerBase | None], Datasets]
    fields_provider: FieldsProvider = gpt_fields
    loss_names: Callable[[TrainConfig], tuple[str, ...]] = language_model_losses


# --- model and optimizer ----------------------------------------------------------------------------------------------


Update = MegatronWeightUpdate | MegatronRelayUpdate | MegatronFrozenUpdate


@dataclass(frozen=True, kw_only=True)
class ModelAndOptimizer(RunParts):
    """A rank's model, optimizer, weight update, and the stages that compute with them.

    Attributes:
        memory: the store of saved activations, if they are counted or moved.
        deferred_bytes: the engine's count of the bytes kept between I and W of split backwards.
    """

    schedule: PipelineSchedule
    chunks: list[torch.nn.Module]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    update: Update
    stages: list[MegatronStage]
    memory: ActivationMemory | None
    deferred_bytes: DeferredBytes


def setup_model_and_optimizer(
    args: TrainConfig,
    program: TrainingProgram,
    *,
    rank: int | None = None,
    layers: Sequence[int] | None = None,
    draws: bool = True,
    locally: Callable[[], AbstractContextManager] = nullcontext,
    copies: CopyRanks | None = None,
    kinds: Kinds | None = None,
) -> ModelAndOptimizer:
    """Build this rank's part of the pipeline of `args`. Collective.

    Args:
        rank: a pipeline rank other than that of the process groups.
        layers: the number of layers of each stage, if other than the flags give.
        draws: draw the weights from the seed; if False, the weights are undefined, and the caller loads them.
        locally: a context manager around each step that needs no other rank, entered equally often on each rank. In it,
            a rank that fails, for example for lack of memory, can tell the others.
        copies: the ranks with copies of this rank's stages, if ranks were lost.
        kinds: in a process that is alone, the kinds of parameters of the job's ranks (see `build_optimizer`).

    Raises ValueError if flags, data and machine do not go together.
    """
    with locally():
        schedule, model = args.schedule, arrangement.model_config(args)
        if not draws:  # `perform_initialization=False` would leave tensor parallel weights unmarked
            model.init_method = model.output_layer_init_method = model.embedding_init_method = _leave_as_it_is
        if layers is None:
            layers = from_flags.layers_of_stages(model) if args.frozen_stages is None else args.frozen_stages.layers
        own = schedule.stages_of(parallel_state.get_pipeline_model_parallel_rank() if rank is None else rank)
    on_host = schedule.residency is not None
    require_room(args, layers)
    with locally():
        chunks = build_chunks(partial(program.model_provider, args), model, stages=own, layers=layers, on_host=on_host)
        for stage, chunk in zip(own, chunks, strict=True):
            if stage < schedule.num_frozen:
                chunk.requires_grad_(False)
        chunks = wrap_for_training(chunks, core_config.ddp_config(args), on_host=on_host, draws=draws)
    if draws and copies is not None:
        copy_tied_embeddings_over(chunks, copies)
    trained = [chunk for stage, chunk in zip(own, chunks, strict=True) if stage >= schedule.num_frozen]
    with locally():  # after the collective with which it begins
        optimizer = build_optimizer(args, trained or chunks, on_host=on_host, kinds=kinds)
        scheduler = core_config.param_scheduler(args, optimizer)
    may_move = args.made_program is not None and args.pipeline_moves != "none"  # the next program may, too
    counts = args.moves_activations or may_move or args.log_saved_activations
    memory, deferred_bytes = ActivationMemory(backend.device()) if counts else None, DeferredBytes()
    options = {
        "loss_names": program.loss_names(args),
        "rank_metrics": _rank_metrics(memory, deferred_bytes if schedule.splits_backward else None),
        "timeout": timedelta(minutes=args.distributed_timeout_minutes),
    }
    if trained:
        if schedule.residency is None:
            options["allocating"] = locally
        if copies is not None:
            options["copies"] = copies
        update = _make_update(args, trained, optimizer, scheduler, stages=own, **options)
    else:
        with locally():  # empty: other ranks allocate here
            pass
        update = MegatronFrozenUpdate(
            chunks, optimizer, scheduler, weights=schedule.weights,
            num_layers=args.num_layers if args.freeze_training else 0, **options,
        )  # fmt: skip
    try:
        with locally():
            stages = [
                MegatronStage(
                    chunk, program.forward_step, update, index=stage, num_stages=schedule.num_stages,
                    seq_length=edge_length(args), micro_batch_size=args.micro_batch_size,
                    recompute=schedule.recomputes(stage), keeps=schedule.keeps(stage), seed=args.seed,
                    loss_names=program.loss_names(args), activation_memory=memory, first_trained=schedule.num_frozen,
                )
                for stage, chunk in zip(own, chunks, strict=True)
            ]  # fmt: skip
    except AgreedError:
        update.close()
        raise
    return ModelAndOptimizer(
        schedule=schedule, chunks=chunks, optimizer=optimizer, scheduler=scheduler, update=update, stages=stages,
        memory=memory,
        deferred_bytes=deferred_bytes,
    )  # fmt: skip


def _leave_as_it_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _make_update(
    args: TrainConfig,
    chunks: list,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    *,
    stages: Sequence[int],
    **options: object,
) -> Update:
    """Make the weight update of the trained chunks that fits where the schedule keeps the weights."""
    schedule = args.schedule
    if schedule.residency is not None:
        return MegatronRelayUpdate(
            chunks, optimizer, scheduler, stages=stages, residency=schedule.residency, host=this_process().host,
            gathers=args.l2l_fetch == "shares", **options,
        )  # fmt: skip
    kind = MegatronOptimisticUpdate if schedule.optimistic else MegatronWeightUpdate
    return kind(
        chunks, optimizer, scheduler, weights=schedule.weights, num_stages=schedule.num_stages, stage=stages[0],
        single_gradient_buffer=args.pipeline_2bw_single_gradient_buffer, reduce_partial=schedule.reduce_partial,
        provisional_microbatches=schedule.provisional_microbatches,
        layers=LayersOfParameters(chunks, args.num_layers) if args.freeze_training else None,
        counts_tokens=not args.freeze_training, **options,
    )  # fmt: skip


def _rank_metrics(
    memory: ActivationMemory | None, deferred_bytes: DeferredBytes | None
) -> dict[str, Callable[[], float]]:
    """The memory measurements of a rank for the report of a batch, by name; empty without `memory`."""
    if memory is None:
        return {}
    allocated = {ALLOCATED: backend.peak_memory_bytes} if backend.is_cuda() else {}
    deferred = {} if deferred_bytes is None else {DEFERRED: deferred_bytes.take_recent_peak}
    return {SAVED_ACTIVATIONS: memory.take_recent_peak, **deferred, **allocated}


# --- the engine -------------------------------------------------------------------------------------------------------

_TRACED_EXTRA = 8  # segments: drains, evaluations and batches that they cut
_TRACED_OF_LAYERS = 4  # batches from which the times of layers are learned


def build_engine(
    args: TrainConfig, built: ModelAndOptimizer, position: CheckpointPosition, *, survivors: Survivors | None = None
) -> PipelineEngine:
    """The engine over this rank's pipeline group, from `position` on; over the `survivors` if ranks were lost.

    The samples before a microbatch give its number, so that dropout continues as in an uninterrupted run, also after a
    change of the microbatch size or of the number of replicas. A program for survivors contains the microbatches of all
    replicas.
    """
    schedule, samples = built.schedule, args.batch_sizes.samples_per_microbatch
    moves = args.moves_activations
    ranks = torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    if survivors is not None:
        schedule, samples = survivors.schedule, args.micro_batch_size * replicas_of_place(args)
        moves = schedule.moves_activations
        size = ranks_of_place(args)  # a pipeline consists of the ranks at one index in all places
        ranks = list(range(torch.distributed.get_rank() % size, torch.distributed.get_world_size(), size))
    return PipelineEngine(
        schedule, built.stages, built.update,
        ranks=ranks,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        backend=args.distributed_backend,
        device=backend.device(),
        tracer=_tracer_of(args),
        first_batch=position.iteration,
        first_microbatch=position.consumed_train_samples // samples,
        activation_memory=built.memory if moves else None,
        deferred_bytes=built.deferred_bytes,
        ledger=built.update.ledger if schedule.residency is not None else None,
    )  # fmt: skip


def _tracer_of(args: TrainConfig) -> Tracer | None:
    """A tracer for the batches whose trace the run reads later; None if it reads none."""
    traced = _TRACED_OF_LAYERS if args.elastic_pipeline or args.activation_cache is not None else 0
    if args.made_program is not None and args.made_program.measures:
        traced = args.pipeline_measured_batches
    if args.pipeline_timeline is not None:
        traced = max(traced, 2 * args.pipeline_timeline_iterations + _TRACED_EXTRA)
    clock = CudaClock() if backend.is_cuda() else HostClock()
    return Tracer(num_batches=traced, clock=clock) if traced else None


# --- the run ----------------------------------------------------------------------------------------------------------


_KEPT_SIZES = 64  # many more than batches are in flight


@dataclass
class Run:
    """The parts of a run on one rank, and its position (`position` counts over the whole run).

    There is no engine while the ranks of the job change.
    """

    args: TrainConfig
    program: TrainingProgram
    model_and_optimizer: ModelAndOptimizer
    engine: PipelineEngine | None
    reporter: Reporter
    writer: CheckpointWriter | None
    datasets: list
    vocab_size: int
    decisions: ChangeDecisions | None = None
    cache: PrefixCache | None = None
    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    flops: float = 0.0
    saved_iteration: int | None = None  # of the last save that has begun and was not dropped
    is_kept_out_of_collections: bool = False  # by gc.freeze, when it began to train
    survivors: Survivors | None = None  # the program of the ranks that are left, if ranks were lost
    begun: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_SIZES))  # samples of the last batches

    def go_on_with(self, args: TrainConfig) -> None:
        """Switch to a configuration of the run with a changed arrangement."""
        self.args = self.reporter.args = args
        if self.decisions is not None:
            self.decisions.go_on_with(args)

    @property
    def chunks(self) -> list[torch.nn.Module]:
        return self.model_and_optimizer.chunks

    @property
    def optimizer(self) -> MegatronOptimizer:
        return self.model_and_optimizer.optimizer

    @property
    def scheduler(self) -> OptimizerParamScheduler:
        return self.model_and_optimizer.scheduler

    @property
    def update(self) -> Update:
        return self.model_and_optimizer.update

    @property
    def stages(self) -> list[MegatronStage]:
        return self.model_and_optimizer.stages

    @property
    def deferred_bytes(self) -> DeferredBytes:
        return self.model_and_optimizer.deferred_bytes

    @property
    def has_saved(self) -> bool:
        """Whether this job is known to have saved a checkpoint."""
        return self.writer is not None and self.writer.has_saved

    def take_over_saving(self) -> None:
        """After a change of ranks, let the present rank 0 own the directory of `--save`. Collective."""
        if self.writer is None:
            return
        if torch.distributed.get_rank() > 0:
            self.writer.disown()
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            self.writer.own()

    @property
    def shares(self) -> list[Share | None]:
        """For each own stage, its share of all microbatches where ranks were lost; None: those of its replica."""
        if self.survivors is None:
            return [None] * len(self.stages)
        copies = self.survivors.schedule.copies
        rank, num_replicas = torch.distributed.get_rank(), replicas_of_place(self.args)
        own = self.survivors.schedule.stages_of(rank // ranks_of_place(self.args))
        replica = replica_in_place(self.args, rank)
        return [share_of(copies, number).of_replica(replica, num_replicas) for number in own]

    @property
    def replicas_in_program(self) -> int:
        """The number of replicas in the program: all (`num_places`) where ranks were lost, else one."""
        return 1 if self.survivors is None else num_places(self.args)

    @cached_property
    def _flops_per_sample(self) -> float:
        return flops_per_sample(self.args)

    def begin_batch(self, num_samples: int) -> None:
        """Advance the run's position by a batch of `num_samples` samples."""
        self.iteration += 1
        self.consumed_samples += num_samples
        self.flops += self._flops_per_sample * num_samples
        self.begun.append(num_samples)

    def stand_after(self, iteration: int) -> None:
        """Move the run's position to `iteration` batches: drop begun batches, or count further ones as done."""
        while self.iteration > iteration:
            self.iteration -= 1
            num_samples = self.begun.pop()
            self.consumed_samples -= num_samples
            self.flops -= self._flops_per_sample * num_samples
        while self.iteration < iteration:
            self.begin_batch(self.args.batch_sizes.num_samples(self.consumed_samples))

    def stand_at(self, position: CheckpointPosition) -> None:
        """Move the run's position to that of a checkpoint."""
        self.iteration = position.iteration
        self.consumed_samples = position.consumed_train_samples
        self.consumed_valid_samples = position.consumed_valid_samples
        self.flops = position.num_floating_point_operations_so_far
        self.begun.clear()

    def position(self) -> CheckpointPosition:
        """The run's position, as a checkpoint records it."""
        return CheckpointPosition(
            iteration=self.iteration,
            consumed_train_samples=self.consumed_samples,
            consumed_valid_samples=self.consumed_valid_samples,
            num_floating_point_operations_so_far=self.flops,
        )

    def samples(self, index: int, name: str, consumed: int) -> list[MicrobatchIterator]:
        """For each own stage, the microbatches of dataset `index` from sample `consumed` on.

        Datasets are 0 training, 1 validation, 2 test.

        Validation data repeat: a resumed run that evaluates at other intervals sizes them for the new intervals, while
        its position was counted with the old ones. Data that each evaluation reads completely start over with each
        evaluation.
        """
        if getattr(self.datasets[index], "starts_over", False):
            consumed = 0
        return [
            MicrobatchIterator(
                self.args, self.datasets[index], fields=self.program.fields_provider(self.args), name=name,
                consumed_samples=consumed, vocab_size=self.vocab_size, stage=stage.index, num_stages=stage.num_stages,
                repeats=name == "validation", share=share,
            )
            for stage, share in zip(self.stages, self.shares, strict=True)
        ]  # fmt: skip
