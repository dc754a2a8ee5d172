"""`--pipeline-timeline`: the last batches of a run as a picture, planned above measured, and as a trace for Perfetto.

The plan is the simulation of the very program that ran, with each stage's mean measured times and transfers that cost
nothing; so what differs between the two is transfer, waiting and noise.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.core import parallel_state
from megatron.pipeline.costs import Costs
from megatron.pipeline.draw import draw_timeline
from megatron.pipeline.instruction import Kind
from megatron.pipeline.runtime.trace import CHAIN, COMPUTE, TraceSpan, gather_spans, write_chrome_trace
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.timeline import Span, Timeline

_RUN_IN = (
    2  # batches that the plan starts before the picture, so that it shows the steady state where the run was in it
)


class TracedBatch(NamedTuple):
    """A batch of the run: its index, its first microbatch and how many it has."""

    index: int
    first_microbatch: int
    num_microbatches: int


def measured_timeline(spans: Iterable[TraceSpan], batches: Sequence[TracedBatch], num_stages: int) -> Timeline:
    """The spans of `batches` as a timeline; one stage per pipeline rank."""
    low = batches[0].first_microbatch
    high = batches[-1].first_microbatch + batches[-1].num_microbatches

    def belongs(span: TraceSpan) -> bool:
        instruction = span.instruction
        if instruction.microbatch is not None:
            return low <= instruction.microbatch < high
        return batches[0].index < (instruction.version or 0) <= batches[-1].index + 1

    kept = [
        Span(span.rank, span.instruction, span.start, span.end)
        for span in spans
        if span.track in (COMPUTE, CHAIN) and belongs(span)
    ]
    return Timeline.from_spans(
        kept, rank_of_stage=range(num_stages), batches=[batch.num_microbatches for batch in batches],
        first_batch=batches[0].index, first_microbatch=low, name="measured",
    )  # fmt: skip


def measured_costs(timeline: Timeline, num_stages: int) -> Costs:
    """Mean seconds of each kind of work per stage."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for span in timeline.spans:
        times[span.instruction.kind, span.instruction.stage].append(span.end - span.start)

    def mean(kind: Kind) -> list[float]:
        return [statistics.fmean(times.get((kind, stage), [0.0])) for stage in range(num_stages)]

    reductions = {
        name: max(mean(kind)) for name, kind in (("reduce_embed", Kind.REDUCE_EMBED), ("reduce_norm", Kind.REDUCE_NORM))
    }
    return Costs(
        forward=mean(Kind.FORWARD), backward=mean(Kind.BACKWARD), recompute=mean(Kind.RECOMPUTE), step=mean(Kind.STEP),
        reduce_grad=mean(Kind.REDUCE_GRAD), **reductions,
    )  # fmt: skip


def planned_timeline(
    schedule: Schedule, history: Sequence[TracedBatch], batches: Sequence[TracedBatch], costs: Costs
) -> Timeline:
    """The simulation of the same batches, run in from up to two batches before them."""
    first = next(position for position, batch in enumerate(history) if batch.index == batches[0].index)
    around = history[max(first - _RUN_IN, 0) : first + len(batches)]
    program = schedule.build(
        [batch.num_microbatches for batch in around], first_batch=around[0].index,
        first_microbatch=around[0].first_microbatch,
    )  # fmt: skip
    return simulate(program, costs).of_batches(batches[0].index, len(batches)).named("planned")


def write_timeline(run) -> None:
    """Write `timeline.png` and `trace.json` (Perfetto) into `--pipeline-timeline`. Collective, drained.

    Shows the first replica's first tensor rank.
    """
    if parallel_state.get_data_parallel_rank() or parallel_state.get_tensor_model_parallel_rank():
        return
    group = parallel_state.get_pipeline_model_parallel_group()
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    spans = gather_spans(run.engine.trace_spans(), group=group, group_rank=rank, group_size=size)
    if spans is None:
        return
    folder = Path(run.args.pipeline_timeline)
    folder.mkdir(parents=True, exist_ok=True)
    write_chrome_trace(spans, folder / "trace.json")
    history = list(run.history)
    batches = _complete_batches(spans, history, size)[-run.args.pipeline_timeline_iterations :]
    if not batches:
        return
    measured = measured_timeline(spans, batches, size)
    planned = planned_timeline(run.engine.schedule, history, batches, measured_costs(measured, size))
    draw_timeline([planned, measured], folder / "timeline.png", title=_title(run), time_label="ms", time_scale=1000,
                  lanes=True)  # fmt: skip


def _title(run) -> str:
    args = run.args
    return f"{args.pipeline_schedule}, p={args.pipeline_model_parallel_size}, the last iterations up to {run.iteration}"


def _complete_batches(spans: Iterable[TraceSpan], history: Sequence[TracedBatch], num_stages: int) -> list[TracedBatch]:
    """Batches of which every forward and backward of every stage was traced."""
    seen = {
        (span.instruction.kind, span.instruction.stage, span.instruction.microbatch)
        for span in spans
        if span.instruction.kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    return [
        batch
        for batch in history
        if all(
            (kind, stage, batch.first_microbatch + position) in seen
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for stage in range(num_stages)
            for position in range(batch.num_microbatches)
        )
    ]
