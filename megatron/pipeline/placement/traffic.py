"""The bytes that the ranks of a job send each other in one iteration, independent of where the ranks run.

| kind | who | how much |
|---|---|---|
| pipeline | a rank of a pipeline and the next one | an activation forward and its gradient back, for each microbatch |
| pair | ranks s and p-1-s of a pipeline | BPipe's evictions, and as much back when they are loaded |
| data | the replicas of a rank | one all-reduce of its gradients |
| tensor | the ranks that share layers | all-reduces in every layer and microbatch |
| embedding | first and last rank of a pipeline | one all-reduce of the tied embedding's gradient |

How often ranks send is counted in the rows of the program (`count_transfers`), so the counts hold for every schedule;
with several stages on each rank the last rank of a pipeline also sends to the first. Under a schedule without flushes
the counts are of a batch of the steady period. The bytes of each message need the model (`planner.time.traffic`).
"Stage" in this folder is the rank of a pipeline, 0 to p-1.

An all-reduce of n ranks is a ring: each member sends 2(n-1)/n of the bytes to the next one. A reduce-scatter
followed by an all-gather (sequence parallelism, distributed optimizer) sends as many bytes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from megatron.pipeline.program.instruction import Kind, Tensor
from megatron.pipeline.program.move_order import Pairs, pair_of
from megatron.pipeline.schedules import PipelineSchedule


@dataclass(frozen=True, kw_only=True)
class MessageCounts:
    """By rank of the pipeline, in one batch.

    Attributes:
        num_microbatches: of the batch.
        activations: tensors that it and the next rank send each other, each way: activations one way and as many
            gradients back; where frozen stages get none, the mean of both ways. The last rank's next is the first one.
        evictions: microbatches that it moves to its pair, each of one of its stages; as many come back.
        ends: the ranks of the first and the last stage; None: the first and the last rank.
        pair_of_rank: which rank's stages are paired with its own; None: p-1-s.
    """

    num_microbatches: int
    activations: tuple[float, ...]
    evictions: tuple[float, ...]
    ends: tuple[int, int] | None = None
    pair_of_rank: tuple[int, ...] | None = None

    @property
    def evictors(self) -> tuple[int, ...]:
        """The ranks that move anything."""
        return tuple(rank for rank, count in enumerate(self.evictions) if count)


def count_transfers(schedule: PipelineSchedule, num_microbatches: int) -> MessageCounts:
    """What the ranks of `schedule` send in a batch.

    Raises:
        ValueError: a batch that it cannot run, or as `exchanged`.
    """
    num_batches = 1
    if schedule.weights.drains:
        rows = schedule.build((num_microbatches,)).rows
    else:
        periodic = schedule.build_periodic(num_microbatches)
        rows, num_batches = periodic.period, periodic.num_batches
    placement, sends, pairs = schedule.rank_of_stage, Counter(), None
    for instruction in chain(*rows):
        sent = instruction.kind.row.sends
        if sent is not None:
            first = instruction.stage - (sent is Tensor.GRADIENT)  # the lower one of the two stages
            sends[placement[first], placement[first + 1]] += 0.5 / num_batches
    if schedule.num_frozen and schedule.balance:
        pairs = tuple(map(Pairs(placement, schedule.num_frozen).of_rank, range(schedule.num_ranks)))
    return MessageCounts(
        num_microbatches=num_microbatches,
        activations=exchanged(sends, schedule.num_ranks),
        evictions=tuple(sum(each.kind is Kind.EVICT for each in row) / num_batches for row in rows),
        ends=ends_of(placement),
        pair_of_rank=pairs,
    )


def exchanged(sent: Mapping[tuple[int, int], float], num_ranks: int) -> tuple[float, ...]:
    """By rank, what it and the next one send each other, each way.

    Args:
        sent: sender and receiver -> activations, or their bytes. As many gradients come back.

    Raises:
        ValueError: a sender whose receiver is not beside it.
    """
    found = [0] * num_ranks
    for (sender, receiver), num in sent.items():
        if receiver == (sender + 1) % num_ranks:
            found[sender] += num
        elif sender == (receiver + 1) % num_ranks:
            found[receiver] += num
        else:
            raise ValueError(
                f"rank {sender} sends to rank {receiver} of {num_ranks}, and traffic is known between neighbours only; "
                "place stages that follow each other on neighbouring ranks"
            )
    return tuple(found)


def ends_of(rank_of_stage: Sequence[int]) -> tuple[int, int] | None:
    """The ranks of the first and the last stage; None: the first and the last rank."""
    ends = rank_of_stage[0], rank_of_stage[-1]
    return None if ends == (0, max(rank_of_stage)) else ends


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
