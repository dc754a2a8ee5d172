"""The last batches of a run as a picture, planned above measured, and as a trace for Perfetto.

The plan is a simulation of the program that ran, with each stage's mean measured times. Transfers cost nothing in the
simulation. So the measured timeline differs from the plan only by transfers, waiting and noise.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from megatron.core import parallel_state
from megatron.documents import counted
from megatron.pipeline.draw import draw_timeline
from megatron.pipeline.runtime.contract.trace import RankTrace, gather_traces, timeline, write_chrome_trace
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.schedules import PipelineSchedule, ProgramSchedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import measured_costs
from megatron.pipeline.simulate.timeline import Timeline

_RUN_IN, _RUN_OUT = 2, 1  # batches that the plan also simulates, before and after the batches shown


def last_stretch(measured: Timeline, drains: Collection[int], *, most: int) -> range:
    """Return the batches to show: the last ones, at most `most`, of the longest stretch between drains.

    Of several longest stretches, take the latest. A drain inside the picture would hide the schedule. `drains`: the
    batches before which the pipeline was drained.
    """
    borders = sorted({measured.first_batch, *drains, measured.first_batch + len(measured.batches)})
    inside = [border for border in borders if border >= measured.first_batch]
    stretches = [range(first, last) for first, last in pairwise(inside)]
    longest = max(reversed(stretches), key=len)
    return longest[-most:]


def planned_timeline(schedule: PipelineSchedule, measured: Timeline, shown: range, drains: Collection[int]) -> Timeline:
    """Simulate the batches `shown` with measured times, and with them the neighbouring batches of the same stretch."""
    drained = max((drain for drain in drains if drain <= shown.start), default=measured.first_batch)
    first = max(_begins(schedule, shown.start, drained=drained), drained, measured.first_batch)
    end = measured.first_batch + len(measured.batches)
    last = min([shown.stop + _RUN_OUT, end, *(drain for drain in drains if drain >= shown.stop)])
    sizes = measured.batches[first - measured.first_batch : last - measured.first_batch]
    first_microbatch = measured.batch_borders()[first - measured.first_batch]
    program = schedule.build(sizes, first_batch=first, first_microbatch=first_microbatch)
    costs = measured_costs(measured.of_batches(shown.start, len(shown)))
    return simulate(program, costs).of_batches(shown.start, len(shown)).named("planned")


def _begins(schedule: PipelineSchedule, batch: int, *, drained: int) -> int:
    """Return the batch with which a simulation begins, so that `batch` and later ones are as in the middle of a run.

    A program's rows repeat after its fill, in whole periods from the batch `drained` on.
    """
    if not isinstance(schedule, ProgramSchedule):
        return batch - _RUN_IN
    first = batch - max(_RUN_IN, schedule.repetition.num_fill)
    return first - (first - drained) % schedule.repetition.num_period


def write_timeline(
    engine: PipelineEngine,
    folder: Path,
    *,
    drains: Collection[int],
    most: int,
    places: Sequence[tuple[int, str]] = (),
    note: str = "",
) -> None:
    """Write `timeline.png`, `measured.json` (a Timeline) and `trace.json` (for Perfetto).

    Collective; call it drained. Shows the pipeline of the first replica's first tensor rank. Where the stages of the
    program are copies, shows all ranks of the program. The picture has at most `most` batches.

    Args:
        engine: the engine that ran the batches, with a tracer.
        folder: where the files are written.
        drains: the batches before which the pipeline was drained.
        most: the number of batches in the picture.
        places: for each rank of the program, its rank in the whole job and a text that names its place there; empty:
            the ranks are those of the job.
        note: the end of the title.

    Raises:
        OSError: a file cannot be written.
        ValueError: there are more ranks than a picture has room for.
    """
    group = None
    if not engine.schedule.copies:  # else one program spans all ranks
        if (
            parallel_state.get_data_parallel_rank(with_context_parallel=True)
            or parallel_state.get_tensor_model_parallel_rank()
        ):
            return
        group = parallel_state.get_pipeline_model_parallel_group()
    traces = gather_traces(engine.trace(), group=group)
    if traces is not None:  # with copies, other tensor ranks have pipelines of their own and are gathered, too
        traces = [trace for trace in traces if trace.pipeline == traces[0].pipeline]
    if traces is not None and places:
        pipeline = tuple(rank for rank, _ in places)
        traces = [
            replace(trace, rank=rank, pipeline=pipeline, place=place)
            for trace, (rank, place) in zip(traces, places, strict=True)
        ]
    write_pictures(engine.schedule, traces, folder, drains=drains, most=most, note=note)


def write_pictures(
    schedule: PipelineSchedule,
    traces: Sequence[RankTrace] | None,
    folder: Path,
    *,
    drains: Collection[int],
    most: int,
    note: str = "",
) -> None:
    """Write the files of `write_timeline` from the traces of a pipeline's ranks. Do nothing if `traces` is None.

    `gather_traces` returns None on all ranks but one.
    """
    if traces is None or not traces[0].batches:
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_chrome_trace(traces, folder / "trace.json")
    measured = timeline(traces)
    measured.save(folder / "measured.json")
    shown = last_stretch(measured, drains, most=most)
    planned = planned_timeline(schedule, measured, shown, drains)
    draw_timeline(
        [planned, measured.of_batches(shown.start, len(shown)).named("measured")],
        folder / "timeline.png",
        title=f"{len(shown)} iterations from {shown.start + 1} on, {note or counted(measured.num_stages, 'stage')}",
        names=[str(trace) for trace in traces if trace.place],
        time_label="time [ms]",
        time_scale=1000,
        lanes=True,
        saved_microbatches=schedule.residency is not None,
    )
