"""What the ranks of a job send each other in one iteration, in bytes, wherever they sit.

| kind | who | how much |
|---|---|---|
| pipeline | stages s and s+1 of one replica | an activation forward and its gradient back, for each microbatch |
| pair | stages s and p-1-s of one replica | BPipe's evictions, and as much back when they are loaded |
| data | the replicas of a stage | one all-reduce of its gradients |
| tensor | the ranks that share layers | all-reduces in every layer and microbatch |
| embedding | first and last stage of one replica | one all-reduce of the tied embedding's gradient |

With v stages on each rank a microbatch goes v times from each rank to the next, and v-1 times from the last to the
first. An all-reduce of n ranks goes round a ring: each member sends 2(n-1)/n of the bytes to the next one. A
reduce-scatter followed by an all-gather (sequence parallelism, distributed optimizer) sends the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from megatron.placement.bandwidth import ModelShape, RecomputeScope, saved_activation_bytes
from megatron.placement.degrees import Degrees

_ELEMENT = 2  # bytes of an activation
_GRADIENT = 4  # bytes of a gradient: reduced in FP32


class Kind(str, Enum):
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
        pipeline: what a rank sends to the next one; as much comes back as gradients.
        wraparound: what the last rank of a pipeline sends to the first, where each has several stages.
        pair: by stage, what its rank evicts to the pair's; as much comes back. 0 for stages that evict nothing.
        data: by stage, the gradients of a rank, which its replicas all-reduce.
        tensor: by stage, the sum of what a rank all-reduces with the ranks that share its layers.
        embedding: what first and last stage all-reduce; 0 where embeddings are not tied.
    """

    pipeline: float
    pair: tuple[float, ...]
    data: tuple[float, ...]
    tensor: tuple[float, ...]
    embedding: float
    wraparound: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PointToPoint:
    """Two places of a replica's pipeline that send each other `bytes_each_way` from every tensor rank."""

    kind: Kind
    first_stage: int
    second_stage: int
    bytes_each_way: float


def point_to_point(traffic: Traffic) -> Iterator[PointToPoint]:
    """All traffic between stages that is not nothing."""
    num_stages = len(traffic.pair)
    for stage in range(num_stages - 1):
        yield PointToPoint(
            kind=Kind.PIPELINE, first_stage=stage, second_stage=stage + 1, bytes_each_way=traffic.pipeline
        )
    if traffic.wraparound:
        yield PointToPoint(
            kind=Kind.PIPELINE, first_stage=num_stages - 1, second_stage=0, bytes_each_way=traffic.wraparound
        )
    for stage, num_bytes in enumerate(traffic.pair):
        if num_bytes:
            yield PointToPoint(
                kind=Kind.PAIR, first_stage=stage, second_stage=num_stages - 1 - stage, bytes_each_way=num_bytes
            )
    if traffic.embedding and num_stages > 1:  # an all-reduce of two: each sends 2(2-1)/2 of the bytes
        yield PointToPoint(
            kind=Kind.EMBEDDING, first_stage=0, second_stage=num_stages - 1, bytes_each_way=traffic.embedding
        )


def ring_bytes(num_bytes: float, num_members: int) -> float:
    """What each member of an all-reduce sends to the next."""
    return 2 * (num_members - 1) / num_members * num_bytes


def count_evictions(num_stages: int, stage: int, num_microbatches: int) -> int:
    """Microbatches that a stage of 1F1B evicts in a batch: BPipe's Algorithm 1 on the order without bubbles.

    With p=4, m=8, stage 0 evicts three: 1, 3 and 5, counted from 0 (Figure 4).
    """
    bound = -(-(num_stages + 2) // 2)
    warmup = min(num_stages - stage, num_microbatches)
    extra = max(0, warmup - bound)  # evicted in the warm-up: the microbatches bound-2, bound-1, ...
    evicted = set(range(bound - 2, bound - 2 + extra))
    total = extra
    for microbatch in range(num_microbatches):
        if microbatch in evicted:
            # In the steady phase the forward beside the load needs room too, so the forward before it is evicted.
            forward_beside = warmup - 1 + microbatch
            if microbatch > 0 and forward_beside < num_microbatches:
                evicted.add(forward_beside - 1)
                total += 1
    return total


def estimate_traffic(
    shape: ModelShape,
    degrees: Degrees,
    *,
    num_microbatches: int,
    vocabulary_size: int,
    scope: RecomputeScope = RecomputeScope.NONE,
    balances_activations: bool = True,
    sequence_parallel: bool = True,
    tied_embeddings: bool = True,
    num_virtual_stages: int = 1,
) -> Traffic:
    """The traffic of one iteration of 1F1B on a GPT with feed-forward width 4h and 16-bit activations.

    Args:
        shape: the model; its t and p are those of `degrees`.
        num_microbatches: m, of one replica in one batch.
        vocabulary_size: rows of the embedding.
        scope: what is recomputed; decides how much a pair moves and how often layers communicate.
        balances_activations: BPipe moves activations between pairs.
        sequence_parallel: activations between stages are split over tensor ranks.
        tied_embeddings: the last stage holds the embedding too.
        num_virtual_stages: v, the stages of each rank. Evictions are estimated as those of one stage.

    Raises:
        ValueError: a number of microbatches or a vocabulary below 1.
    """
    assert (shape.tensor, shape.pipeline) == (degrees.tensor, degrees.pipeline)
    if num_microbatches < 1 or vocabulary_size < 1:
        raise ValueError(f"{num_microbatches} microbatches, vocabulary of {vocabulary_size}: give 1 or more of each")
    p, t = degrees.pipeline, degrees.tensor
    activation = _ELEMENT * shape.activation_elements
    saved = saved_activation_bytes(shape, scope)
    evictions = [count_evictions(p, stage, num_microbatches) * balances_activations for stage in range(p)]
    layers = shape.num_layers / p
    per_layer = 12 * shape.hidden_size**2 + 13 * shape.hidden_size
    embedding = vocabulary_size * shape.hidden_size / t
    # Two all-reduces in a layer's forward, two in its backward, two more where the forward is run again.
    num_reductions = 6 if scope is RecomputeScope.LAYER else 4
    reduced = num_microbatches * layers * num_reductions * activation if t > 1 else 0.0
    edge = num_microbatches * activation / (t if sequence_parallel else 1)
    return Traffic(
        pipeline=num_virtual_stages * edge,
        wraparound=(num_virtual_stages - 1) * edge,
        pair=tuple(count * saved for count in evictions),
        data=tuple(
            _GRADIENT * (layers * per_layer / t + (embedding if stage in (0, p - 1) else 0)) for stage in range(p)
        ),
        tensor=(reduced,) * p,
        embedding=_GRADIENT * embedding if tied_embeddings and p > 1 else 0.0,
    )
