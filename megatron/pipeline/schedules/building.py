"""From the choices of a schedule to a program: its order, then one pass for each concern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import Kind, Row
from megatron.pipeline.program.periodic import PeriodicProgram
from megatron.pipeline.program.program import Program, shifted_row
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.passes import Segments
from megatron.pipeline.schedules.passes.balance import add_balance
from megatron.pipeline.schedules.passes.communication import add_communication
from megatron.pipeline.schedules.passes.host_updates import add_host_updates
from megatron.pipeline.schedules.passes.predictions import add_predictions
from megatron.pipeline.schedules.passes.recompute import add_recompute
from megatron.pipeline.schedules.passes.residency import add_residency
from megatron.pipeline.schedules.passes.stash import add_stash
from megatron.pipeline.schedules.passes.updates import add_updates
from megatron.pipeline.schedules.passes.versions import set_versions
from megatron.pipeline.schedules.saved import bounds_of_ranks
from megatron.pipeline.schedules.segments import ProgramInSegments

if TYPE_CHECKING:
    from megatron.pipeline.schedules.any_schedule import AnySchedule
    from megatron.pipeline.schedules.schedule import Schedule


def build_in_segments(
    schedule: Schedule, order: Order, batches: Sequence[int], first_batch: int = 0, first_microbatch: int = 0
) -> ProgramInSegments:
    """The program of batches that the schedule takes, with the places at which a run could be drained."""
    extent = _extent(schedule, order, batches, first_batch, first_microbatch)
    segments_of_rank = [set_versions(segments, extent) for segments in _without_transfers(schedule, order, extent)]
    goes_on_with = [order.goes_on_with(rank) for rank in range(schedule.num_ranks)]
    return ProgramInSegments.join(extent, add_communication(segments_of_rank, extent, goes_on_with))


def segments_without_transfers(schedule: Schedule, order: Order, batches: Sequence[int]) -> list[Segments]:
    """What each rank does in the program of batches that the schedule takes, but for transfers between stages and
    without the versions that computations use.
    """
    return _without_transfers(schedule, order, _extent(schedule, order, batches))


def build_periodic(schedule: Schedule, order: Order, num_microbatches: int) -> PeriodicProgram:
    """The run from batch 0 on of any number of batches of this size."""
    num_fill = max(1, (schedule.weights.delay or 0) + schedule.settling_batches)
    batches = (num_microbatches,) * num_fill
    built = schedule.build_in_segments((*batches, num_microbatches))
    return PeriodicProgram(
        extent=_extent(schedule, order, batches),
        fill=built.segments(0, num_fill),
        period=built.segments(num_fill, num_fill + 1),
        drain=tuple(shifted_row(row, microbatches=-num_microbatches, versions=-1) for row in built.drain),
        num_microbatches=num_microbatches,
    )


def build_evaluation(
    schedule: AnySchedule, order: Order, num_microbatches: int, version: int, first_microbatch: int = 0
) -> Program:
    """Forwards of one batch with one weight version."""
    extent = Extent(
        rank_of_stage=schedule.rank_of_stage,
        edges=schedule.edges,
        batches=(num_microbatches,),
        weights=schedule.weights,
        first_batch=version,
        first_microbatch=first_microbatch,
        residency=schedule.residency,
        forward_only=True,
    )
    microbatches = range(first_microbatch, first_microbatch + num_microbatches)
    segments_of_rank = []
    for rank in range(schedule.num_ranks):
        computations = (each for segment in _segments_of(order, rank, extent, [microbatches]) for each in segment)
        forwards = [replace(each, version=version) for each in computations if each.kind is Kind.FORWARD]
        segments = [forwards]
        segments_of_rank.append(add_residency(segments, extent) if extent.residency else segments)
    return ProgramInSegments.join(extent, add_communication(segments_of_rank, extent)).program


def computations_of(schedule: Schedule, order: Order, rank: int, batches: Sequence[int]) -> Row:
    """The order of a rank in a program of batches that the schedule takes."""
    segments = _order_segments(order, rank, _extent(schedule, order, batches))
    return tuple(each for segment in segments for each in segment)


def returns_to_batches(schedule: Schedule, order: Order, batches: Sequence[int]) -> bool:
    """`Program.returns_to_batches` of the program of these batches, which is not built: the order says it."""
    extent = _extent(schedule, order, batches)
    return any(
        extent.returns_in(each for segment in _order_segments(order, rank, extent) for each in segment)
        for rank in range(schedule.num_ranks)
    )


# --- parts


def _without_transfers(schedule: Schedule, order: Order, extent: Extent) -> list[Segments]:
    ordered = [_order_segments(order, rank, extent) for rank in range(schedule.num_ranks)]
    if schedule.balance:
        ordered = add_balance(ordered, extent, bounds_of_ranks(order))
    return [_with_updates(segments, rank, extent) for rank, segments in enumerate(ordered)]


def _with_updates(segments: Segments, rank: int, extent: Extent) -> Segments:
    """The order of a rank, with all that concerns it alone."""
    if extent.recompute:
        segments = add_recompute(segments, extent)
    if extent.residency:
        segments = add_residency(segments, extent)
        if extent.residency.stashes_on_host:
            segments = add_stash(segments, extent)
        segments = add_host_updates(segments, rank, extent)
    else:
        segments = add_updates(segments, rank, extent)
    if extent.weights.predicts:
        segments = add_predictions(segments, rank, extent)
    return segments


def _extent(
    schedule: Schedule, order: Order, batches: Sequence[int], first_batch: int = 0, first_microbatch: int = 0
) -> Extent:
    stages = range(schedule.num_stages)
    return Extent(
        rank_of_stage=schedule.rank_of_stage,
        edges=schedule.edges,
        batches=tuple(batches),
        weights=schedule.weights,
        first_batch=first_batch,
        first_microbatch=first_microbatch,
        recompute=schedule.recompute,
        not_recomputed=tuple(each for each in stages if schedule.recompute and not schedule.recomputes(each)),
        tied_embeddings=schedule.tied_embeddings,
        data_parallel=schedule.data_parallel,
        residency=schedule.residency,
        **_predictions(schedule, batches),
    )


def _predictions(schedule: Schedule, batches: Sequence[int]) -> dict[str, Any]:
    """What the program says about its predictions.

    Raises:
        ValueError: the batches begin where different numbers of backwards are left of the one before.
    """
    if not schedule.weights.predicts:
        return {}
    found = {schedule.unread(size) for size in batches}
    if len(found) > 1 and schedule.provisional_microbatches is None:
        raise ValueError(
            f"{schedule.order} begins a batch where other numbers of backwards are left of the one before for each "
            f"size of {batches}, so none can be said for all; give provisional_microbatches"
        )
    return {
        "unread": next(iter(found)) if schedule.provisional_microbatches is None else (),
        "provisional_microbatches": schedule.provisional_microbatches,
        "reduce_partial": schedule.reduce_partial and schedule.data_parallel,
    }


def _order_segments(order: Order, rank: int, extent: Extent) -> Segments:
    """The order of a rank: all batches in one stretch, or each in its own where the policy drains."""
    first = extent.first_batch
    batches = [extent.microbatches_of(batch) for batch in range(first, first + len(extent.batches))]
    if not extent.weights.drains:
        return _segments_of(order, rank, extent, batches)
    stretches = [_segments_of(order, rank, extent, [batch]) for batch in batches]
    return [*(segment + drain for segment, drain in stretches), []]


def _segments_of(order: Order, rank: int, extent: Extent, batches: Sequence[range]) -> Segments:
    """What the order says of a rank; one that does not interleave is asked for the rank's stage."""
    return order.segments(rank if order.interleaves else extent.stages_of(rank)[0], batches)
