"""Puts a run together: tokenizer, data, model, optimizer, checkpoint, stage, engine, in the order in which errors are
cheap.

Directories and files are tried before the model is built, and the checkpoint is read before the first sample. What the
loop needs comes back as one record.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch

from megatron import backend
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.megatron_stage import ForwardStep, MegatronStage
from megatron.pipeline.runtime.trace import CudaClock, HostClock, Tracer
from megatron.training import provisional
from megatron.training.arguments.classification import CLASSIFIERS
from megatron.training.arrangement import iterations_to_the_end
from megatron.training.checkpoint.agreement import agreed
from megatron.training.checkpoint.ownership import OwnerMark
from megatron.training.checkpointing import CheckpointPosition, CheckpointWriter, load_checkpoint
from megatron.training.data import Field, FieldsProvider, MicrobatchIterator, gpt_fields
from megatron.training.elasticity import Elasticity
from megatron.training.logging import LOSS, Reporter
from megatron.training.models import num_parameters
from megatron.training.optimizer_kernel import choose_kernel
from megatron.training.outputs import prepare_outputs
from megatron.training.place import Parts, Place, Update, build_place
from megatron.training.prefix_cache import PrefixCache, require_cache
from megatron.training.throughput import flops_per_sample
from megatron.training.tokenizer import build_tokenizer, padded_vocab_size, vocab_size

ModelProvider = Callable[..., torch.nn.Module]
DatasetsProvider = Callable[[argparse.Namespace, object], list]
LossNames = Callable[[argparse.Namespace], tuple[str, ...]]

_TRACED_EXTRA = 8  # legs: drains, evaluations and batches cut by them
_TRACED_OF_LAYERS = 4  # batches from which the times of layers are learned


@dataclass
class Run:
    """Everything of a run on one rank, and where it stands (`position` counts over the whole run)."""

    args: argparse.Namespace
    parts: Parts
    place: Place
    engine: PipelineEngine
    reporter: Reporter
    writer: CheckpointWriter | None
    datasets: list
    fields: tuple[Field, ...]
    vocab_size: int
    elasticity: Elasticity | None = None
    cache: PrefixCache | None = None
    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    flops: float = 0.0
    saved_iteration: int | None = None

    @property
    def chunks(self) -> list[torch.nn.Module]:
        return self.place.chunks

    @property
    def optimizer(self) -> MegatronOptimizer:
        return self.place.optimizer

    @property
    def scheduler(self) -> OptimizerParamScheduler:
        return self.place.scheduler

    @property
    def update(self) -> Update:
        return self.place.update

    @property
    def stages(self) -> list[MegatronStage]:
        return self.place.stages

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
    if args.activation_cache is not None:
        with agreed():
            require_cache(args)
    parts = Parts(partial(model_provider, args), forward_step, loss_names(args))
    reporter = Reporter(args)
    datasets = datasets_provider(args, tokenizer)
    began = time.perf_counter()
    place = build_place(args, parts)
    seconds_of_place = time.perf_counter() - began
    position = _load(args, place, reporter) or CheckpointPosition()
    elasticity = Elasticity(args) if args.changes else None
    if elasticity is not None and args.recorded_changes is not None:
        elasticity.load_state_dict(args.recorded_changes)
    choose_kernel(place.optimizer, args.optimizer_kernel)  # what was loaded has the kernel that it was saved with
    args.batch_sizes.check_from(position.consumed_train_samples)
    args.train_iters = iterations_to_the_end(
        args, iteration=position.iteration, consumed_samples=position.consumed_train_samples
    )
    began = time.perf_counter()
    engine = build_engine(args, place, position)
    if elasticity is not None:  # a change does the same again
        elasticity.expect_change(seconds_of_place + time.perf_counter() - began)
    _describe(args, reporter, place.stages, position)
    cache = None
    if args.activation_cache is not None:
        with agreed():
            cache = PrefixCache(args, datasets[0])
        cache.serve(place.stages)
    return Run(
        args, parts, place, engine, reporter,
        CheckpointWriter(args.save, owner_mark=owner_mark) if args.save is not None else None,
        datasets, fields_provider(args), 0 if tokenizer is None else vocab_size(args, tokenizer), elasticity, cache,
        iteration=position.iteration, consumed_samples=position.consumed_train_samples,
        consumed_valid_samples=position.consumed_valid_samples,
        flops=position.num_floating_point_operations_so_far,
        saved_iteration=position.iteration if position.iteration else None,
    )  # fmt: skip


def _load(args: argparse.Namespace, place: Place, reporter: Reporter) -> CheckpointPosition | None:
    """Load `--load`, or where that holds nothing `--pretrained-checkpoint`'s weights; a classifier's head is new."""
    held = {"chunks": place.chunks, "optimizer": place.optimizer, "scheduler": place.scheduler, "update": place.update}
    position = None
    if args.load is not None:
        position = load_checkpoint(args=args, **held)
        if position is None and args.exit_on_missing_checkpoint:
            raise ValueError(f"--load {args.load} holds no checkpoint, and --exit-on-missing-checkpoint is given")
    if position is None and args.pretrained_checkpoint is not None:
        pretrained = argparse.Namespace(**{**vars(args), "load": args.pretrained_checkpoint, "finetune": True,
                                           "ckpt_step": None})  # fmt: skip
        position = load_checkpoint(args=pretrained, **held, body_only=args.architecture in CLASSIFIERS)
        if position is None:
            raise ValueError(f"--pretrained-checkpoint {args.pretrained_checkpoint} holds no checkpoint")
        but = " but for the head" if args.architecture in CLASSIFIERS else ""
        reporter.say(f"loaded the weights of {args.pretrained_checkpoint}{but}; starting from iteration 0")
    elif position is not None:
        reporter.say(f"loaded {args.load}; starting from iteration {position.iteration}")
    elif args.load is not None:
        reporter.say(f"--load {args.load} holds no checkpoint yet: starting from iteration 0")
    return position


def build_engine(args: argparse.Namespace, place: Place, position: CheckpointPosition) -> PipelineEngine:
    """The engine over this rank's pipeline group, going on at `position`.

    Microbatches are numbered by the samples before them, so that dropout goes on as in a run that was never stopped,
    also after a change of the microbatch size or of the number of replicas.
    """
    traced = _TRACED_OF_LAYERS if args.elastic_pipeline or args.activation_cache is not None else 0
    if args.pipeline_timeline is not None:
        traced = 2 * args.pipeline_timeline_iterations + _TRACED_EXTRA
    clock = CudaClock() if backend.is_cuda() else HostClock()
    return PipelineEngine(
        place.schedule, place.stages, place.update,
        ranks=torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()),
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        backend=args.distributed_backend,
        device=backend.device(),
        tracer=Tracer(num_batches=traced, clock=clock) if traced else None,
        first_batch=position.iteration,
        first_microbatch=position.consumed_train_samples // args.batch_sizes.samples_per_microbatch,
        activation_memory=place.memory if args.moves_activations else None,
        ledger=place.update.ledger if place.schedule.residency is not None else None,
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
