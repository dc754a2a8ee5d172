"""The engine of a run: what drives the stages that a rank has built."""

import argparse
from datetime import timedelta

import torch

from megatron import backend
from megatron.core import parallel_state
from megatron.pipeline.runtime.contract.trace import CudaClock, HostClock, Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.trainer.checkpoint.checkpoint import CheckpointPosition
from megatron.trainer.start_up.model_and_optimizer import ModelAndOptimizer

_TRACED_EXTRA = 8  # segments: drains, evaluations and batches cut by them
_TRACED_OF_LAYERS = 4  # batches from which the times of layers are learned


def build_engine(args: argparse.Namespace, built: ModelAndOptimizer, position: CheckpointPosition) -> PipelineEngine:
    """The engine over this rank's pipeline group, going on at `position`.

    Microbatches are numbered by the samples before them, so that dropout goes on as in a run that was never stopped,
    also after a change of the microbatch size or of the number of replicas.
    """
    traced = _TRACED_OF_LAYERS if args.elastic_pipeline or args.activation_cache is not None else 0
    if args.pipeline_timeline is not None:
        traced = 2 * args.pipeline_timeline_iterations + _TRACED_EXTRA
    clock = CudaClock() if backend.is_cuda() else HostClock()
    return PipelineEngine(
        built.schedule, built.stages, built.update,
        ranks=torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()),
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        backend=args.distributed_backend,
        device=backend.device(),
        tracer=Tracer(num_batches=traced, clock=clock) if traced else None,
        first_batch=position.iteration,
        first_microbatch=position.consumed_train_samples // args.batch_sizes.samples_per_microbatch,
        activation_memory=built.memory if args.moves_activations else None,
        deferred_bytes=built.deferred_bytes,
        ledger=built.update.ledger if built.schedule.residency is not None else None,
    )  # fmt: skip
