"""The bytes that the ranks of a job send each other in one iteration, independent of where the ranks run.

| kind | ranks | traffic |
|---|---|---|
| pipeline | a rank of a pipeline and the next one | an activation forward and its gradient back, for each microbatch |
| pair | ranks s and p-1-s of a pipeline | BPipe's evictions, and the same number of loads back |
| data | the replicas of a rank | one all-reduce of the rank's gradients |
| tensor | the ranks that share layers | all-reduces in every layer and microbatch |
| embedding | first and last rank of a pipeline | one all-reduce of the tied embedding's gradient |

Messages are counted in the rows of the program (`count_transfers`), so the counts hold for every schedule. With several
stages on each rank, the last rank of a pipeline also sends to the first. For a schedule without flushes, the counts
belong to one batch of the steady period. The bytes of a message depend on the model (`planner.time.traffic`).
"Stage" in this folder is the rank of a pipeline, 0 to p-1.

An all-reduce of n ranks is a ring: each member sends 2(n-1)/n of the bytes to the next one. A reduce-scatter
followed by an all-gather (sequence parallelism, distributed optimizer) sends the same number of bytes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from megatron.pipeline.program.instruction import EVICTIONS, Tensor
from megatron.pipeline.program.lane_order import Pairs, pair_of
from megatron.pipeline.schedules import PipelineSchedule


@dataclass(frozen=True, kw_only=True)
class MessageCounts:
    """The number of messages of one batch, by rank of the pipeline.

    Attributes:
        num_microbatches: microbatches of the batch.
        activations: number of tensors that a rank and the next rank send each other in each direction: activations
            forward and the same number of gradients back; the mean of both directions if frozen stages get no
            gradients. The next rank of the last rank is the first.
        evictions: number of moves from a rank to its pair, each of one microbatch at one stage; the same number is
            loaded back.
        ends: the ranks of the first and the last stage; None: the first and the last rank.
        pair_of_rank: by rank, the rank with the paired stages; None: rank p-1-s for rank s.
    """

    num_microbatches: int
    activations: tuple[float, ...]
    evictions: tuple[float, ...]
    ends: tuple[int, int] | None = None
    pair_of_rank: tuple[int, ...] | None = None

    @property
    def evictors(self) -> tuple[int, ...]:
        """The ranks that evict activations."""
        return tuple(rank for rank, count in enumerate(self.evictions) if count)


def count_transfers(schedule: PipelineSchedule, num_microbatches: int) -> MessageCounts:
    """Count the messages that the ranks of `schedule` send in a batch.

    Raises:
        ValueError: the schedule cannot run the batch, its stages are copies, or a rank sends to a rank that is not its
            neighbour.
    """
    if schedule.copies:
        raise ValueError("the stages of the schedule are copies of several replicas; place the schedule of one replica")
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
            first = instruction.stage - (sent is Tensor.GRADIENT)  # the lower of the two stages
            sends[placement[first], placement[first + 1]] += 0.5 / num_batches
    if schedule.num_frozen and schedule.balance:
        pairs = tuple(map(Pairs(placement, schedule.num_frozen).of_rank, range(schedule.num_ranks)))
    return MessageCounts(
        num_microbatches=num_microbatches,
        activations=exchanged(sends, schedule.num_ranks),
        evictions=tuple(sum(each.kind in EVICTIONS for each in row) / num_batches for row in rows),
        ends=ends_of(schedule),
        pair_of_rank=pairs,
    )


def exchanged(sent: Mapping[tuple[int, int], float], num_ranks: int) -> tuple[float, ...]:
    """The number of activations, or of bytes, that each rank and the next rank send each other in each direction.

    Args:
        sent: number of activations or bytes by sender and receiver. The same amount of gradients is sent back.

    Raises:
        ValueError: a sender and its receiver are not neighbours.
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


def ends_of(schedule: PipelineSchedule) -> tuple[int, int] | None:
    """The ranks of the two stages that may share an embedding; None: the first and the last rank."""
    ends = schedule.tied_ranks
    return None if ends == (0, schedule.num_ranks - 1) else ends


class TrafficKind(str, Enum):
    """The kinds of traffic of the module's table."""

    PIPELINE = "pipeline"
    PAIR = "pair"
    DATA = "data"
    TENSOR = "tensor"
    EMBEDDING = "embedding"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The bytes that ranks send in one iteration, by stage.

    Attributes:
        pipeline: bytes that a stage's rank and the next rank send each other in each direction: activations forward and
            the same number of bytes of gradients back. The next stage of the last stage is the first.
        pair: bytes that a stage's rank evicts to the rank of its pair; the same number of bytes is loaded back.
        data: bytes of gradients that replicas all-reduce.
        tensor: bytes that a rank all-reduces with the ranks that share its layers.
        embedding: bytes that the ranks in `ends` all-reduce; 0 if embeddings are not tied.
        ends: the ranks of the model's first and last stage; None: the first and the last rank.
        pair_of_rank: the other stage of each stage's pair; None: stage p-1-s for stage s.
    """

    pipeline: tuple[float, ...]
    pair: tuple[float, ...]
    data: tuple[float, ...]
    tensor: tuple[float, ...]
    embedding: float
    ends: tuple[int, int] | None = None
    pair_of_rank: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PointToPoint:
    """Two stages of a replica's pipeline whose tensor ranks each send `bytes_each_way` to the other stage."""

    kind: TrafficKind
    first_stage: int
    second_stage: int
    bytes_each_way: float


def point_to_point(traffic: Traffic) -> Iterator[PointToPoint]:
    """Yield all traffic of more than 0 bytes between stages."""
    num_stages = len(traffic.pair)
    for stage, num_bytes in enumerate(traffic.pipeline):
        if num_bytes:
            yield PointToPoint(TrafficKind.PIPELINE, stage, (stage + 1) % num_stages, num_bytes)
    for stage, num_bytes in enumerate(traffic.pair):
        if num_bytes:
            pair = pair_of(stage, num_stages) if traffic.pair_of_rank is None else traffic.pair_of_rank[stage]
            yield PointToPoint(TrafficKind.PAIR, stage, pair, num_bytes)
    first, last = (0, num_stages - 1) if traffic.ends is None else traffic.ends
    if traffic.embedding and first != last:  # an all-reduce of two: each sends 2(2-1)/2 of the bytes
        yield PointToPoint(TrafficKind.EMBEDDING, first, last, traffic.embedding)


def ring_bytes(num_bytes: float, num_members: int) -> float:
    """The bytes that each member of an all-reduce of `num_bytes` sends to the next member of the ring."""
    return 2 * (num_members - 1) / num_members * num_bytes
