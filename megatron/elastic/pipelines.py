"""What a pipeline takes once its first layers are frozen, for each number of ranks that it may have.

Problem: frozen layers cost a forward and no backward, so the cut that was even is no more, and fewer ranks may do; the
others become replicas, each of which takes fewer microbatches of the batch, which stays.

Solution: for each number of pipeline ranks, cut the layers exactly by what they cost now, and simulate the program.
Where what the prefix puts out is read from a cache, the prefix lies on the first rank and costs the reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from megatron.elastic.cut import cut_exactly
from megatron.pipeline.costs import Costs
from megatron.pipeline.instruction import Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate

_BATCHES = 4
"""Simulated: the steady state is what the last of them adds."""


@dataclass(frozen=True)
class Layers:
    """What layers cost and hold, one by one; the embedding counts to the first one and the head to the last.

    Attributes:
        forward, backward: seconds of a microbatch, recompute included.
        trained_bytes, frozen_bytes: of a layer's weights; trained, with gradients and the optimizer's state.
        saved_bytes: of a trained layer's activations, for each microbatch in flight.
        read: seconds of reading what a frozen prefix puts out from a cache; None: there is none.
        occupation: seconds that a transfer between ranks takes.
        reduce: seconds of the reduction of a layer's gradients over replicas, whatever their number.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    trained_bytes: float = 1.0
    frozen_bytes: float = 1 / 6  # with BF16 weights and Adam; the share that the full paper counts, too
    saved_bytes: float = 0.0
    read: float | None = None
    occupation: float = 0.0
    reduce: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.forward) == len(self.backward) >= 1:
            raise ValueError(
                f"{len(self.forward)} forwards and {len(self.backward)} backwards are given; give both of each layer"
            )


@dataclass(frozen=True)
class Pipeline:
    """One way to go on.

    Attributes:
        num_frozen: layers; whether the prefix is `cached`.
        num_ranks, num_replicas: p and d.
        num_microbatches: of a batch, for each replica.
        layers_of_rank: how many each rank has; of a cached prefix none are counted.
        seconds: of a batch, simulated.
        num_bytes: of the rank that holds most.
    """

    num_frozen: int
    cached: bool
    num_ranks: int
    num_replicas: int
    num_microbatches: int
    layers_of_rank: tuple[int, ...]
    seconds: float
    num_bytes: float


def fastest(found: Sequence[Pipeline], *, most_bytes: float) -> Pipeline:
    """Of those that fit, the one that takes least; of equals the one with fewer ranks, which has more replicas.

    Raises:
        ValueError: none fits.
    """
    fitting = [each for each in found if each.num_bytes <= most_bytes * (1 + 1e-9)]
    if not fitting:
        least = min(each.num_bytes for each in found)
        raise ValueError(f"no pipeline fits into {most_bytes:g} bytes a rank; the least takes {least:g}")
    return min(fitting, key=lambda each: (each.seconds, each.num_ranks))


def pipelines(
    layers: Layers, num_frozen: int, *, world: int, num_microbatches: int, preset: str = "flush",
    ranks: Sequence[int] | None = None, cached: bool = False,
) -> list[Pipeline]:  # fmt: skip
    """Each number of pipeline ranks that `world` can be divided into, or of `ranks`, the most ranks first.

    Args:
        num_frozen: layers, fewer than all.
        num_microbatches: of a batch over all replicas; those that cannot be shared out evenly are no candidates.
        preset: gpipe, flush or 2bw.
        cached: the prefix is read.

    Raises:
        ValueError: nothing is left to train, or a cache whose reading costs are not given.
    """
    num_layers = len(layers.forward)
    if not 0 <= num_frozen < num_layers:
        raise ValueError(f"{num_frozen} of {num_layers} layers cannot be frozen; give 0 to {num_layers - 1}")
    if cached and (layers.read is None or not num_frozen):
        raise ValueError("a cache needs frozen layers, and the seconds that reading takes; give both, or no cache")
    most = num_layers - num_frozen if cached else num_layers
    candidates = ranks or [each for each in range(min(world, most), 0, -1) if world % each == 0]
    found = []
    for num_ranks in candidates:
        num_replicas = world // num_ranks
        if world % num_ranks or num_microbatches % num_replicas or num_ranks > most:
            continue
        own = num_microbatches // num_replicas
        pipeline = _simulated(layers, num_frozen, cached, num_ranks, num_replicas, own, preset)
        if pipeline is not None:
            found.append(pipeline)
    return found


@lru_cache(maxsize=4096)
def _simulated(
    layers: Layers, num_frozen: int, cached: bool, num_ranks: int, num_replicas: int, num_microbatches: int, preset: str
) -> Pipeline | None:
    """None: the schedule does not run so few microbatches."""
    costs = [
        (forward, 0.0 if place < num_frozen else backward)
        for place, (forward, backward) in enumerate(zip(layers.forward, layers.backward, strict=True))
    ]
    frozen = num_frozen
    if cached:
        costs, frozen = costs[num_frozen:], 0
    counts = cut_exactly([sum(each) for each in costs], num_ranks)
    stages: list[tuple[float, float]] = []
    rank_of_stage: list[int] = []
    sizes: list[int] = []  # trained layers
    if cached:
        stages.append((layers.read, 0.0))
        rank_of_stage.append(0)
        sizes.append(0)
    for rank, (begin, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        border = min(max(frozen, begin), end)
        for first, last in ((begin, border), (border, end)):
            if first < last:
                stages.append((sum(each[0] for each in costs[first:last]), sum(each[1] for each in costs[first:last])))
                rank_of_stage.append(rank)
                sizes.append(0 if last <= frozen else last - first)
    num_frozen_stages = sum(not size for size in sizes)
    schedule = Schedule.preset(
        preset, num_stages=len(stages), rank_of_stage=tuple(rank_of_stage), num_frozen=num_frozen_stages,
        data_parallel=num_replicas > 1,
    )  # fmt: skip
    if not schedule.runs(num_microbatches):
        return None
    reduce = [layers.reduce * size * (num_replicas > 1) for size in sizes]
    timeline = simulate(
        schedule.build((num_microbatches,) * _BATCHES),
        Costs(
            forward=[each for each, _ in stages], backward=[each for _, each in stages], reduce_grad=reduce,
            forward_bytes=layers.occupation, backward_bytes=layers.occupation, bandwidth=1.0,
        ),
    )  # fmt: skip
    saved = schedule.max_saved_microbatches((num_microbatches,) * _BATCHES)
    held = [0.0] * num_ranks
    for stage, (rank, size) in enumerate(zip(rank_of_stage, sizes, strict=True)):
        held[rank] += size * (layers.trained_bytes + layers.saved_bytes * saved[stage])
    for rank, (begin, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        held[rank] += layers.frozen_bytes * max(0, min(end, frozen) - begin)
    if cached:  # what is not in the cache yet has to be computed
        held[0] += layers.frozen_bytes * num_frozen
    ends = [
        max(
            span.end
            for span in timeline.spans
            if span.instruction.kind is Kind.STEP and span.instruction.version == each
        )
        for each in (_BATCHES - 1, _BATCHES)
    ]
    seconds = ends[1] - ends[0]
    return Pipeline(num_frozen, cached, num_ranks, num_replicas, num_microbatches, counts, seconds, max(held))
