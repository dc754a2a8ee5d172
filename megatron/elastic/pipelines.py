"""The time and memory of a pipeline whose first layers are frozen, for each possible number of ranks.

Problem: frozen layers cost a forward and no backward, so a cut that was even is uneven now, and fewer pipeline ranks
may suffice. The other ranks then form replicas. The batch stays the same, so each replica takes fewer microbatches.

Solution: for each number of pipeline ranks, the layers are cut exactly by their present costs, and the program is
simulated. If the output of the frozen prefix is read from a cache, the prefix lies on the first rank and costs the
reading. Layers whose output is not in the cache yet are computed on the first rank, and their output is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from megatron.elastic.stages import cut_at_frozen, cut_exactly, cut_that_fits
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs

_BATCHES = 4
"""The number of simulated batches. The last of them gives the time of a batch in the steady state."""
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Layers:
    """The costs and the memory of layers. The embedding is a part of the first layer, the head of the last.

    Attributes:
        forward, backward: for each layer, seconds of a microbatch, recompute included.
        trained_bytes: bytes of a trained layer's weights, with gradients and optimizer state.
        frozen_bytes: bytes of a frozen layer's weights.
        saved_bytes: bytes of a trained layer's activations, for each microbatch in flight.
        read: seconds of reading the output of a frozen prefix for a microbatch from a cache; None: there is no cache.
        write: seconds of writing this output.
        occupation: seconds for which a transfer between ranks occupies its link.
        latency: seconds from the end of that occupation to the arrival.
        reduce: seconds of the reduction of a layer's gradients over replicas, whatever their number.
        reduce_latency: additional seconds of a rank's reduction, whatever its size.
        norm: seconds of the all-reduce of the norm over all ranks.
        around: seconds of the runtime around each computation of a stage, if the layers' seconds do not include them.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    trained_bytes: float = 1.0
    frozen_bytes: float = 1 / 6  # with BF16 weights and Adam, as in the full paper
    saved_bytes: float = 0.0
    read: float | None = None
    write: float = 0.0
    occupation: float = 0.0
    latency: float = 0.0
    reduce: float = 0.0
    reduce_latency: float = 0.0
    norm: float = 0.0
    around: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.forward) == len(self.backward) >= 1:
            raise ValueError(
                f"{len(self.forward)} forwards and {len(self.backward)} backwards are given; give both of each layer"
            )


@dataclass(frozen=True)
class PipelineOption:
    """A pipeline with which a run may continue, with its simulated seconds and its estimated memory.

    Attributes:
        num_frozen: number of frozen layers.
        cached: whether the output of the frozen prefix is read from a cache.
        num_ranks, num_replicas: pipeline parallel size p and data parallel size d.
        num_microbatches: number of microbatches of a batch, for each replica.
        layers_of_rank: number of layers of each rank, without the layers of a cached prefix.
        seconds: simulated seconds of a batch.
        num_bytes: bytes of the rank that holds most.
        num_stored, on_host: for a cached prefix, as in `pipelines`.
        preset: gpipe, flush or 2bw.
    """

    num_frozen: int
    cached: bool
    num_ranks: int
    num_replicas: int
    num_microbatches: int
    layers_of_rank: tuple[int, ...]
    seconds: float
    num_bytes: float
    num_stored: int = 0
    on_host: bool = False
    preset: str = "flush"


@dataclass(frozen=True)
class StageWork:
    """The work of one stage: its rank, its seconds for a microbatch, and its numbers of layers in memory."""

    rank: int
    forward: float
    backward: float
    num_trained: int
    num_frozen: int


def pipelines(
    layers: Layers, num_frozen: int, *, world: int, num_microbatches: int, preset: str = "flush",
    ranks: Sequence[int] | None = None, cached: bool = False, num_stored: int | None = None, on_host: bool = False,
    most_bytes: float = math.inf, layers_of_rank: tuple[int, ...] | None = None,
) -> list[PipelineOption]:  # fmt: skip
    """The possible pipelines on `world` ranks, one for each number of pipeline ranks, the most ranks first.

    A number of pipeline ranks is left out if it does not divide `world`, if replicas would not get equal numbers of
    microbatches, or if the schedule cannot run so few microbatches.

    Args:
        num_frozen: number of frozen layers, fewer than all.
        num_microbatches: number of microbatches of a batch over all replicas.
        preset: gpipe, flush or 2bw.
        ranks: the numbers of pipeline ranks to try; None: all.
        cached: whether the output of the frozen prefix is read from a cache.
        num_stored: number of layers of a cached prefix whose output is in the cache. This output is read, the other
            frozen layers are computed, and their output is written, as in the first epoch after a freeze. None: all.
        on_host: whether the stored layers' weights stay on the host until a sample is missing; otherwise the first rank
            holds them.
        most_bytes: memory of a rank. The layers are cut such that they fit, if this is possible.
        layers_of_rank: a given cut, which also decides the number of ranks.

    Raises:
        ValueError: no layer is left to train, the costs of reading a cache are missing, or `layers_of_rank` does not
            fit the layers.
    """
    num_layers = len(layers.forward)
    if not 0 <= num_frozen < num_layers:
        raise ValueError(f"{num_frozen} of {num_layers} layers cannot be frozen; give 0 to {num_layers - 1}")
    if cached and (layers.read is None or not num_frozen):
        raise ValueError("a cache needs frozen layers, and the seconds that reading takes; give both, or no cache")
    num_stored = num_frozen if num_stored is None else num_stored
    if not 0 <= num_stored <= num_frozen:
        raise ValueError(f"a cache cannot have the output of {num_stored} of {num_frozen} frozen layers; give fewer")
    most = num_layers - num_frozen if cached else num_layers
    if layers_of_rank is not None:
        if min(layers_of_rank) < 1 or sum(layers_of_rank) != most:
            raise ValueError(f"{layers_of_rank} is no cut of {most} layers; give each rank one and more")
        ranks = [len(layers_of_rank)]
    candidates = ranks or [each for each in range(min(world, most), 0, -1) if world % each == 0]
    found = []
    for num_ranks in candidates:
        num_replicas = world // num_ranks
        if world % num_ranks or num_microbatches % num_replicas or num_ranks > most:
            continue
        option = PipelineOption(
            num_frozen, cached, num_ranks, num_replicas, num_microbatches // num_replicas, layers_of_rank or (),
            seconds=0.0, num_bytes=0.0, num_stored=num_stored if cached else 0, on_host=on_host, preset=preset,
        )  # fmt: skip
        option = replace(option, layers_of_rank=layers_of_rank or _cut(layers, option, most_bytes))
        option = _simulated(layers, option)
        if option is not None:
            found.append(option)
    return found


def most_saved(preset: str, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """The most microbatches whose activations each rank saves at a time.

    A frozen prefix does not change the numbers, since the trained ranks keep their distance to the end of the pipeline.
    """
    schedule = Schedule.preset(preset, num_stages=num_ranks)
    full = num_microbatches if schedule.accepts(num_microbatches) else max(num_microbatches, num_ranks)
    return schedule.max_saved_microbatches((full,) * _BATCHES)


def seconds_of_prefix(layers: Layers, num_frozen: int, num_stored: int) -> float:
    """The seconds of a microbatch in a cached prefix: reading, computing the layers that are not stored, writing."""
    read = layers.read if num_stored else 0.0
    return read + (sum(layers.forward[num_stored:num_frozen]) + layers.write if num_stored < num_frozen else 0.0)


def work_of_stages(layers: Layers, pipeline: PipelineOption) -> list[StageWork]:
    """The stages of a pipeline, first to last: a rank has at most one frozen stage and one trained stage."""
    stages, in_front = [], 0
    if pipeline.cached:
        in_front = pipeline.num_frozen
        seconds = seconds_of_prefix(layers, in_front, pipeline.num_stored)
        stages.append(StageWork(0, seconds, 0.0, 0, _held_in_front(pipeline)))
    cut = cut_at_frozen(pipeline.layers_of_rank, pipeline.num_frozen - in_front)
    own = pairwise(accumulate(cut.layers, initial=in_front))
    for stage, (rank, (begin, end)) in enumerate(zip(cut.rank_of_stage, own, strict=True)):
        forward, backward = sum(layers.forward[begin:end]), sum(layers.backward[begin:end])
        trained = stage >= cut.num_frozen
        stages.append(
            StageWork(rank, forward, backward * trained, (end - begin) * trained, (end - begin) * (not trained))
        )
    return stages


def _held_in_front(pipeline: PipelineOption) -> int:
    """The number of layers of a cached prefix whose weights the first rank holds."""
    return pipeline.num_frozen - (pipeline.num_stored if pipeline.on_host else 0)


def schedule_of(layers: Layers, pipeline: PipelineOption) -> tuple[Schedule, Costs]:
    """The schedule of a pipeline, and its costs in seconds."""
    stages = work_of_stages(layers, pipeline)
    schedule = Schedule.preset(
        pipeline.preset, num_stages=len(stages), rank_of_stage=tuple(each.rank for each in stages),
        num_frozen=sum(not each.num_trained for each in stages), data_parallel=pipeline.num_replicas > 1,
    )  # fmt: skip
    reduces, around = pipeline.num_replicas > 1, layers.around
    return schedule, Costs(
        forward=[each.forward + around for each in stages],
        backward=[each.backward + around if each.num_trained else 0.0 for each in stages],
        reduce_grad=[
            layers.reduce * each.num_trained + layers.reduce_latency if reduces and each.num_trained else 0.0
            for each in stages
        ],
        forward_bytes=layers.occupation, backward_bytes=layers.occupation, bandwidth=1.0, latency=layers.latency,
        reduce_norm=layers.norm,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _cut(layers: Layers, option: PipelineOption, most_bytes: float) -> tuple[int, ...]:
    """The most even cut that fits in memory, or the most even cut of all if none fits."""
    num_frozen, num_ranks = option.num_frozen, option.num_ranks
    places = range(num_frozen if option.cached else 0, len(layers.forward))
    work = [layers.forward[each] + (layers.backward[each] if each >= num_frozen else 0.0) for each in places]
    first_bytes = 0.0
    if option.cached:
        work[0] += seconds_of_prefix(layers, num_frozen, option.num_stored)
        first_bytes = layers.frozen_bytes * _held_in_front(option)
    saved = most_saved(option.preset, num_ranks, option.num_microbatches)

    def fits(rank: int, begin: int, end: int) -> bool:
        frozen = sum(each < num_frozen for each in places[begin:end])
        trained = (end - begin - frozen) * (layers.trained_bytes + layers.saved_bytes * saved[rank])
        return trained + frozen * layers.frozen_bytes + (0 if rank else first_bytes) <= most_bytes * _ROUNDING

    return cut_that_fits(work, num_ranks, fits) or cut_exactly(work, num_ranks)


@lru_cache(maxsize=4096)
def _simulated(layers: Layers, option: PipelineOption) -> PipelineOption | None:
    """The pipeline with its seconds and bytes; None if the schedule cannot run so few microbatches."""
    schedule, costs = schedule_of(layers, option)
    batches = (option.num_microbatches,) * _BATCHES
    if not schedule.accepts(option.num_microbatches):
        return None
    timeline, saved = simulate(schedule.build(batches), costs), schedule.max_saved_microbatches(batches)
    held = [0.0] * option.num_ranks
    for place, stage in enumerate(work_of_stages(layers, option)):
        held[stage.rank] += layers.frozen_bytes * stage.num_frozen
        held[stage.rank] += stage.num_trained * (layers.trained_bytes + layers.saved_bytes * saved[place])
    steps = [(span.instruction.version, span.end) for span in timeline.spans if span.instruction.kind is Kind.STEP]
    before, last = (max(end for version, end in steps if version == each) for each in (_BATCHES - 1, _BATCHES))
    return replace(option, seconds=last - before, num_bytes=max(held))
