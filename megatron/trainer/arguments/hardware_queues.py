"""CUDA_DEVICE_MAX_CONNECTIONS, judged for the job that the flags describe."""

import argparse
from collections.abc import Mapping

from megatron.pipeline.check import queue_environment
from megatron.trainer.arguments.values.pipeline_choice import choice_of


def require_hardware_queues(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Refuse an environment with too few hardware queues for a job over NCCL. Raises ValueError.

    Args:
        args: validated.
        environment: see `queue_environment`.
    """
    queue_environment.require_hardware_queues(
        args.schedule,
        environment,
        flag=choice_of(args).flag,
        tensor=args.tensor_model_parallel_size,
        data=args.data_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        distributed_optimizer=args.use_distributed_optimizer,
        max_microbatches=max(args.batch_sizes.all_num_microbatches()),
        moves_activations=args.moves_activations,
    )
