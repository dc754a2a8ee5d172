"""The places of a job: which ranks are lost together, and which ranks have the same weights.

Ranks that compute layers together (tensor and context parallelism) have consecutive numbers. They share one place in
the pipeline of a replica.
"""

from megatron.pipeline.survivors import ReplicaRank
from megatron.trainer.arguments.flags.config import TrainConfig, ranks_of_place


def place_of(args: TrainConfig, rank: int) -> ReplicaRank:
    """The place of a rank, by its number when the job began."""
    pipeline_rank, replica = divmod(rank // ranks_of_place(args), args.data_parallel_size)
    return ReplicaRank(replica=replica, rank=pipeline_rank)


def part_of(args: TrainConfig, rank: int) -> tuple[int, int]:
    """The pipeline rank and the tensor rank of a rank, by its number when the job began.

    Ranks with the same two numbers have the same weights.
    """
    return place_of(args, rank).rank, rank % args.tensor_model_parallel_size
