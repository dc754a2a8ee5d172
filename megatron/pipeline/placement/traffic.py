"""What the ranks of a job send each other in one iteration, in bytes, wherever they sit.

| kind | who | how much |
|---|---|---|
| pipeline | a rank of a pipeline and the next one | an activation forward and its gradient back, for each microbatch |
| pair | ranks s and p-1-s of a pipeline | BPipe's evictions, and as much back when they are loaded |
| data | the replicas of a rank | one all-reduce of its gradients |
| tensor | the ranks that share layers | all-reduces in every layer and microbatch |
| embedding | first and last rank of a pipeline | one all-reduce of the tied embedding's gradient |

How often is counted in the program (`counts.py`), so it holds for every schedule; with several stages on each rank the
last rank of a pipeline also sends to the first. How much each time is for who knows the model to say
(`planner.time.traffic`). "Stage" in this room is the rank of a pipeline, 0 to p-1.

An all-reduce of n ranks goes round a ring: each member sends 2(n-1)/n of the bytes to the next one. A reduce-scatter
followed by an all-gather (sequence parallelism, distributed optimizer) sends the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from megatron.pipeline.program.move_order import pair_of


class TrafficKind(str, Enum):
    """Kinds of traffic, as in the table above."""

    PIPELINE = "pipeline"
    PAIR = "pair"
    DATA = "data"
    TENSOR = "tensor"
    EMBEDDING = "embedding"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes per iteration and rank.

    Attributes:
        pipeline: by stage, what its rank and the next one send each other, each way: activations one way and as much as
            gradients back. After the last stage comes the first.
        pair: by stage, what its rank evicts to the pair's; as much comes back. 0 for stages that evict nothing.
        data: by stage, the gradients of a rank, which its replicas all-reduce.
        tensor: by stage, the sum of what a rank all-reduces with the ranks that share its layers.
        embedding: what the ranks in `ends` all-reduce; 0 where embeddings are not tied.
        ends: who has the first and the last stage of the model; None: the first and the last rank.
        pair_of_rank: by stage, the other one of its pair; None: p-1-s.
    """

    pipeline: tuple[float, ...]
    pair: tuple[float, ...]
    data: tuple[float, ...]
    tensor: tuple[float, ...]
    embedding: float
    ends: tuple[int, int] | None = None
    pair_of_rank: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PointToPoint:
    """Two places of a replica's pipeline that send each other `bytes_each_way` from every tensor rank."""

    kind: TrafficKind
    first_stage: int
    second_stage: int
    bytes_each_way: float


def point_to_point(traffic: Traffic) -> Iterator[PointToPoint]:
    """All traffic between stages that is not nothing."""
    num_stages = len(traffic.pair)
    for stage, num_bytes in enumerate(traffic.pipeline):
        if num_bytes:
            yield PointToPoint(
                kind=TrafficKind.PIPELINE,
                first_stage=stage,
                second_stage=(stage + 1) % num_stages,
                bytes_each_way=num_bytes,
            )
    for stage, num_bytes in enumerate(traffic.pair):
        if num_bytes:
            pair = pair_of(stage, num_stages) if traffic.pair_of_rank is None else traffic.pair_of_rank[stage]
            yield PointToPoint(kind=TrafficKind.PAIR, first_stage=stage, second_stage=pair, bytes_each_way=num_bytes)
    first, last = (0, num_stages - 1) if traffic.ends is None else traffic.ends
    if traffic.embedding and first != last:  # an all-reduce of two: each sends 2(2-1)/2 of the bytes
        yield PointToPoint(
            kind=TrafficKind.EMBEDDING, first_stage=first, second_stage=last, bytes_each_way=traffic.embedding
        )


def ring_bytes(num_bytes: float, num_members: int) -> float:
    """What each member of an all-reduce sends to the next."""
    return 2 * (num_members - 1) / num_members * num_bytes
