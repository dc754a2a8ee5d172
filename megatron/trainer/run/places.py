"""The places of a job: who is lost with whom, and who has the same weights.

Ranks that compute layers together (tensor and context parallelism) have consecutive numbers, and one place in the
pipeline of a replica.
"""

from megatron.pipeline.survivors import ReplicaRank
from megatron.trainer.arguments.flags.config import TrainConfig, ranks_of_place


def place_of(args: TrainConfig, rank: int) -> ReplicaRank:
    """The place of a rank of the job as it began."""
    pipeline_rank, replica = divmod(rank // ranks_of_place(args), args.data_parallel_size)
    return ReplicaRank(replica=replica, rank=pipeline_rank)


def part_of(args: TrainConfig, rank: int) -> tuple[int, int]:
    """The pipeline rank and the tensor rank of a rank of the job as it began: ranks that have both in common have the
    same weights."""
    return place_of(args, rank).rank, rank % args.tensor_model_parallel_size
