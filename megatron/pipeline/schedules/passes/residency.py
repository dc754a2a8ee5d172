"""Bring the weights of each stage to the device before it computes, where they live on the host.

A row is a sequence of *runs*, computations of one stage one after another. Before a run those stages are to be resident
whose runs come next: as many different ones, from this run on, as there is room for. What is resident and not among
them is freed, and what is missing is fetched, in the order of use. So a fetch stands right behind the FREE that makes
room for it, and the copy runs beside the run that follows:

    0FETCH 1FETCH 0F0 0F1 0FREE 2FETCH 1F0 1F1 2F0 2B0 2F1 2B1 2FREE 0FETCH 1R0 1B0 1R1 1B1 1FREE 0R0 0B0 0R1 0B1 0FREE

On one rank with N stages, of which K are resident, the last K stay where the relay turns around, so a batch fetches
2N - K of them, however many microbatches it has. Nothing stays over a batch's border: the next batch uses other
weights, or the run may be drained there.
"""

from itertools import groupby

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.schedules.passes import Segment, Segments


def add_residency(segments: Segments, extent: Extent) -> Segments:
    """The segments of a rank, which hold computations alone, each of one batch, with what brings their weights."""
    return [_with_weights(segment, extent) if segment else [] for segment in segments]


def _with_weights(segment: Segment, extent: Extent) -> Segment:
    batch = extent.batch_of(segment[0].microbatch)
    version = extent.weights.version_of(batch, newest=batch)
    runs = [list(run) for _, run in groupby(segment, key=lambda each: each.stage)]
    stages = [run[0].stage for run in runs]
    resident: list[int] = []
    result: Segment = []
    for index, run in enumerate(runs):
        wanted = _next(stages, index, extent.residency.stages)
        result += [Instruction(Kind.FREE, stage, version=version) for stage in resident if stage not in wanted]
        result += [Instruction(Kind.FETCH, stage, version=version) for stage in wanted if stage not in resident]
        result += run
        resident = wanted
    return result + [Instruction(Kind.FREE, stage, version=version) for stage in resident]


def _next(stages: list[int], first: int, count: int) -> list[int]:
    """The next `count` different stages from `first` on, or all that there are, in their order."""
    found: dict[int, None] = {}
    for index in range(first, len(stages)):
        found.setdefault(stages[index])
        if len(found) == count:
            break
    return list(found)
