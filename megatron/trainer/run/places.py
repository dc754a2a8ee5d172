"""The places of a job: which ranks are lost together, and which ranks have the same weights.

Ranks that compute layers together (tensor, context and expert parallelism) have consecutive numbers. They share one
place in the pipeline of a replica, or of the replicas that share out experts.
"""

from megatron.pipeline.survivors import ReplicaRank
from megatron.trainer.arguments.flags.config import (
    TrainConfig,
    expert_tensor_size,
    num_places,
    ranks_of_part,
    ranks_of_place,
)


def place_of(args: TrainConfig, rank: int) -> ReplicaRank:
    """The place of a rank, by its number when the job began."""
    pipeline_rank, replica = divmod(rank // ranks_of_place(args), num_places(args))
    return ReplicaRank(replica=replica, rank=pipeline_rank)


def part_of(args: TrainConfig, rank: int) -> tuple[int, int]:
    """The pipeline rank of a rank, and its part of the weights there, by its number when the job began.

    Ranks with the same two numbers have the same weights.
    """
    return place_of(args, rank).rank, rank % ranks_of_part(args)


def shared_out(args: TrainConfig, rank: int) -> list[tuple[int, int]]:
    """The weights of which a rank has a shard, by its number when the job began: pipeline rank, and part there.

    First the dense weights, and second, if ranks share out experts, the rank's experts. Ranks with the same two numbers
    share out the optimizer's state of the same weights.
    """
    distances = [args.tensor_model_parallel_size]
    if args.expert_model_parallel_size > 1:
        distances.append(expert_tensor_size(args) * args.expert_model_parallel_size)
    return [(place_of(args, rank).rank, rank % distance) for distance in distances]
