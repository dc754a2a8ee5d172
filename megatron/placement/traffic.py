"""What the ranks of a job send each other in one iteration, in bytes, wherever they sit.

| kind | who | how much |
|---|---|---|
| pipeline | a rank of a pipeline and the next one | an activation forward and its gradient back, for each microbatch |
| pair | ranks s and p-1-s of a pipeline | BPipe's evictions, and as much back when they are loaded |
| data | the replicas of a rank | one all-reduce of its gradients |
| tensor | the ranks that share layers | all-reduces in every layer and microbatch |
| embedding | first and last rank of a pipeline | one all-reduce of the tied embedding's gradient |

How often is counted in the program (`counts.py`), so it holds for every schedule; with several stages on each rank the
last rank of a pipeline also sends to the first. "Stage" in this room is the rank of a pipeline, 0 to p-1.

An all-reduce of n ranks goes round a ring: each member sends 2(n-1)/n of the bytes to the next one. A reduce-scatter
followed by an all-gather (sequence parallelism, distributed optimizer) sends the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from megatron.pipeline.program.move_order import pair_of
from megatron.placement.bandwidth import ModelShape, RecomputeScope, saved_activation_bytes
from megatron.placement.counts import MessageCounts
from megatron.placement.degrees import Degrees


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


def estimate_traffic(
    shape: ModelShape,
    degrees: Degrees,
    counts: MessageCounts,
    *,
    vocabulary_size: int,
    scope: RecomputeScope = RecomputeScope.NONE,
    tied_embeddings: bool = True,
    gradient_bytes: int = 4,
    trained_layers: Sequence[int] | None = None,
) -> Traffic:
    """The traffic of one iteration on a GPT with feed-forward width 4h.

    Args:
        shape: the model; its t, p and v are those of `degrees` and `counts`.
        counts: what the pipeline sends in a batch.
        vocabulary_size: rows of the embedding.
        scope: what is recomputed; decides how much a pair moves and how often layers communicate.
        tied_embeddings: the last stage holds the embedding too.
        gradient_bytes: of an element of a gradient when it is reduced.
        trained_layers: how many each rank of a pipeline trains; None: all, in even parts. The embedding is frozen with
            the first layer.

    Raises:
        ValueError: a vocabulary below 1.
    """
    assert (shape.tensor, shape.pipeline) == (degrees.tensor, degrees.pipeline)
    assert (shape.pipeline, shape.num_virtual_stages) == (len(counts.evictions), counts.num_virtual_stages)
    if vocabulary_size < 1:
        raise ValueError(f"vocabulary of {vocabulary_size} is below 1; give 1 or more")
    p, t = degrees.pipeline, degrees.tensor
    ends = counts.ends or (0, p - 1)
    activation = shape.element_bytes * shape.activation_elements
    sent, saved = activation / (t if shape.sequence_parallel else 1), saved_activation_bytes(shape, scope)
    even = shape.num_layers / p
    layers = [even] * p if trained_layers is None else list(trained_layers)
    embeddings = ends if sum(layers) == shape.num_layers else ends[1:]
    per_layer = 12 * shape.hidden_size**2 + 13 * shape.hidden_size
    embedding = vocabulary_size * shape.hidden_size / t
    # Two all-reduces in a layer's forward, two in its backward, two more where the forward is run again.
    num_reductions = 6 if scope is RecomputeScope.LAYER else 4
    reduced = counts.num_microbatches * even * num_reductions * activation if t > 1 else 0.0
    return Traffic(
        pipeline=tuple(count * sent for count in counts.activations),
        pair=tuple(count * saved * own / even for count, own in zip(counts.evictions, layers, strict=True)),
        data=tuple(
            gradient_bytes * (layers[rank] * per_layer / t + _num_ends(rank, embeddings, p) * embedding)
            for rank in range(p)
        ),
        tensor=(reduced,) * p,
        embedding=gradient_bytes * embedding if tied_embeddings and ends[0] != ends[1] else 0.0,
        ends=counts.ends,
        pair_of_rank=counts.pair_of_rank,
    )


def _num_ends(rank: int, ends: tuple[int, ...], num_ranks: int) -> int:
    """How often a rank holds the embedding; where there is one rank, both ends share it."""
    return 1 if num_ranks == 1 else ends.count(rank)
