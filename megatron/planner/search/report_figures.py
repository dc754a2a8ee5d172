"""Figures in the page of a search: bars of time and of memory, and timelines, of a few configurations.

Each configuration is a row of bars; all rows of a figure share an axis that begins at zero. A tooltip names each part.
The bars of time show the pipeline rank that computes most. Its computing time follows from the costs of a microbatch.
The parts for reductions and transfers are the times by which the iteration would be shorter without them. The rest is
the filling and draining of the pipeline, and waits for slower ranks.

Timelines show the steady state of small programs, all on one axis. Batches are shortened, so that single computations
can be seen, and to about the same time for all schedules. A drawing begins with a batch in the steady state: any batch
if batches drain, else the first whose weights are as old as those of all later batches. All drawings show the same
number of seconds, so that the reader sees which schedule gets farther.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from html import escape

from megatron.documents import counted
from megatron.pipeline.draw import colours
from megatron.pipeline.draw.page import legible_scale, page_timeline, round_step
from megatron.pipeline.draw.scene import Sign
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.timeline import Timeline
from megatron.planner.job.estimate import Estimate
from megatron.planner.memory.memory import GIB, MemoryParts
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.memory.schedule_demand import resized
from megatron.planner.planner import Planner
from megatron.planner.search.outcome import Kept
from megatron.planner.time.iteration import priced
from megatron.planner.time.microbatch_flow import StageTimes
from megatron.planner.time.steady import without_reductions

FORWARD, BACKWARD, RECOMPUTED, UPDATE = "forward", "backward", "recomputed", "update of weights"
REDUCTIONS, TRANSFERS, WAITS = "reductions that show", "transfers that show", "bubble"
COMPUTED = "computed"
LOST = "no tensor gets it"
COLOURS = {
    FORWARD: "#5b94d3", BACKWARD: "#66b35c", COMPUTED: "#5b94d3",
    RECOMPUTED: "#adc74d", UPDATE: colours.colour_of(Kind.STEP),
    REDUCTIONS: colours.REDUCTION, TRANSFERS: "#8457ae", WAITS: "#80808066",
    **colours.MEMORY, "workspace": "#8457ae", "communicators": "#00727a", "step": colours.colour_of(Kind.STEP),
    LOST: "#80808066",
}  # fmt: skip
_WIDE, _RIGHT, _ROW, _TOP, _FOOT, _LETTER = 620, 70, 22, 6, 34, 5.8  # pixels
_FEW, _MOST_CELLS = 16, 20_000  # microbatches of a shortened batch; the most computations of a drawing
_SHOWN = 1.25  # the time that a drawing shows, in times of the longest batch

Row = tuple[str, Kept, Planner]


def bars(rows: Sequence[tuple[str, dict[str, float]]], *, name: str, unit: str, most: float | None = None) -> str:
    """The HTML of a figure with a row of bars for each label and its parts.

    Args:
        name: a description of the figure for screen readers.
        unit: the unit of the parts.
        most: a value that is marked by a line and is within the axis; None: no line.
    """
    left = round(_LETTER * max((len(label) for label, _ in rows), default=0)) + 16
    shown = [part for part in COLOURS if any(parts.get(part, 0.0) > 0 for _, parts in rows)]
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    end = 1.02 * max(most or 0.0, longest)
    scale = _WIDE / end
    foot, drawn = _TOP + _ROW * len(rows), []

    def write(x: float, y: float, text: str, anchor: str = "start") -> None:
        drawn.append(f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    for index, (label, parts) in enumerate(rows):
        y, x = _TOP + _ROW * index, float(left)
        write(left - 8, y + 14, label, "end")
        total = sum(value for part, value in parts.items() if part != LOST)
        for part, value in ((part, parts.get(part, 0.0)) for part in shown):
            if value * scale < 0.05:
                continue
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="{_ROW - 5}" fill="{COLOURS[part]}">'
                f"<title>{escape(part)}: {value:.3g} {unit}, {100 * value / total:.1f}%</title></rect>"
            )
            x += value * scale
        write(x + 5, y + 14, f"{total:.3g}")
    step = round_step(end / 6)
    for tick in range(int(end / step) + 1):
        x = left + tick * step * scale
        drawn.append(f'<path stroke="currentColor" d="M{x:.1f} {foot}v4"/>')
        write(x, foot + 16, f"{tick * step:g}", "middle")
    write(left + _WIDE / 2, foot + 30, unit, "middle")
    if most is not None:
        drawn.append(f'<path stroke="#b03030" d="M{left + most * scale:.1f} {_TOP - 4}V{foot}"/>')
    width, height = left + _WIDE + _RIGHT, foot + _FOOT
    return (
        f'<figure><div class="wide bars"><svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{escape(name)}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" fill="currentColor">\n{chr(10).join(drawn)}\n</svg></div>'
        f"<figcaption>{_legend(Sign((COLOURS[part],), part) for part in shown)}</figcaption></figure>"
    )


def _legend(signs: Iterable[Sign]) -> str:
    swatches = ("".join(f'<i style="background:{each}"></i>' for each in sign.colours) + escape(sign.meaning)
                for sign in signs)  # fmt: skip
    return "".join(f'<span class="sign">{each}</span> ' for each in swatches)


def time_parts(estimate: Estimate, planner: Planner) -> dict[str, float]:
    """The seconds of an iteration by purpose; their sum is its time.

    For split weights, or for weights on the host, the only parts are time that is computed and time that is not.
    """
    configuration = estimate.configuration
    busy = (1 - estimate.bubble) * estimate.seconds
    if configuration.is_hosted or configuration.sharding is not None:
        return {COMPUTED: busy, WAITS: estimate.seconds - busy}
    schedule = configuration.pipeline_schedule(tied_embeddings=planner.model.shares_embedding)
    layers = planner.layers(configuration)
    costs = planner.costs(configuration, schedule, layers, estimate.verdict)
    stages, m = StageTimes(costs, schedule), configuration.num_microbatches
    work = [
        m * each + update
        for each, update in zip(stages.by_rank(stages.work), stages.by_rank(stages.updates(m)), strict=True)
    ]
    rank = work.index(max(work))
    forward = m * stages.by_rank(stages.forward)[rank]
    update = stages.by_rank(stages.updates(m))[rank]
    recomputed = 0.0
    if configuration.recompute is not RecomputeScope.NONE:
        whole = planner.costs(replace(configuration, recompute=RecomputeScope.NONE), schedule, layers, estimate.verdict)
        plain = StageTimes(whole, schedule)
        recomputed = m * (stages.by_rank(stages.backward)[rank] - plain.by_rank(plain.backward)[rank])
    found = {FORWARD: forward, BACKWARD: busy - forward - update - recomputed, RECOMPUTED: recomputed, UPDATE: update}
    base, idle = priced(costs, configuration, schedule).seconds, estimate.seconds - busy
    for name, faster in (
        (REDUCTIONS, without_reductions(costs)),
        (TRANSFERS, replace(costs, latency=0.0, forward_bytes=0.0, backward_bytes=0.0, evict=0.0, load=0.0)),
    ):
        shown = base - priced(faster, configuration, schedule).seconds
        found[name] = min(max(shown, 0.0), idle)
        idle -= found[name]
    return found | {WAITS: idle}


def memory_parts(estimate: Estimate, memory_gib: float) -> dict[str, float]:
    """The GiB of the fullest GPU by purpose, including the memory that no tensor can get (`LOST`).

    `memory_gib`: the memory of one GPU.
    """
    parts = max(estimate.memory, key=lambda rank: rank.total).parts
    found = {part.name: getattr(parts, part.name) / GIB for part in fields(MemoryParts) if part.name != "step"}
    found["step"] = parts.total / GIB - sum(found.values())  # only the part that the peak adds to the others
    free = memory_gib - parts.total / GIB
    return found | {LOST: min(max(estimate.verdict.free_gib - estimate.verdict.spare_gib, 0.0), max(free, 0.0))}


def time_bars(rows: Sequence[Row]) -> str:
    parts = [(label, time_parts(each.estimate, planner)) for label, each, planner in rows]
    return bars(parts, name="where an iteration's time goes", unit="seconds of an iteration")


def memory_bars(rows: Sequence[Row], memory_gib: float) -> str:
    """The bars of memory, with a line at `memory_gib`, the memory of one GPU."""
    parts = [(label, memory_parts(each.estimate, memory_gib)) for label, each, _ in rows]
    return bars(parts, name="what takes the memory of the fullest GPU", unit="GiB", most=memory_gib)


@dataclass(frozen=True)
class _Drawn:
    """A timeline whose batches are shortened from `whole` microbatches to `size`. `smaller`: a clause on the effect."""

    label: str
    timeline: Timeline
    start: float
    size: int
    whole: int
    smaller: str


def timeline_figures(rows: Sequence[Row]) -> str:
    """The HTML of a timeline for each labelled configuration, with a legend and a list of what is not drawn below."""
    schedules = [_schedule(each, planner) for _, each, planner in rows]
    wholes = [each.estimate.configuration.num_microbatches for _, each, _ in rows]
    seconds = [each.estimate.seconds / whole for (_, each, _), whole in zip(rows, wholes, strict=True)]
    least = [_fitting(schedule, whole, _least(schedule)) for schedule, whole in zip(schedules, wholes, strict=True)]
    small = [2 * schedule.num_stages * size <= _MOST_CELLS for schedule, size in zip(schedules, least, strict=True)]
    of_batch = max((a * b for a, b, fits in zip(least, seconds, small, strict=True) if fits), default=0.0)
    drawn: list[_Drawn | None] = []
    for index, (label, each, planner) in enumerate(rows):
        schedule, whole = schedules[index], wholes[index]
        if not small[index]:
            drawn.append(None)
            continue
        size = _fitting(schedule, whole, max(least[index], round(of_batch / seconds[index])))
        if 2 * schedule.num_stages * size > _MOST_CELLS:
            size = least[index]
        drawn.append(_drawn(label, each, planner, schedule, size, _SHOWN * of_batch))
    found = [each for each in drawn if each is not None]
    end = min((each.timeline.end - each.start for each in found), default=0.0)
    scale = max((legible_scale(each.timeline, end) for each in found), default=1.0)
    return "\n".join(
        _figure(each, end, scale) if each is not None else _too_large(row[0], schedule, size)
        for row, each, schedule, size in zip(rows, drawn, schedules, least, strict=True)
    )


def _schedule(each: Kept, planner: Planner) -> PipelineSchedule:
    return each.estimate.configuration.pipeline_schedule(tied_embeddings=planner.model.shares_embedding)


def _least(schedule: PipelineSchedule) -> int:
    """The number of microbatches that fill the pipeline; twice as many in a short pipeline."""
    return max(schedule.num_ranks, min(2 * schedule.num_ranks, _FEW))


def _fitting(schedule: PipelineSchedule, whole: int, size: int) -> int:
    """The smallest batch that the schedule accepts, from `size` microbatches up to `whole`, that of the
    configuration."""
    step = 1 if schedule.weights.drains and schedule.num_virtual_stages == 1 else schedule.num_ranks
    size = min(whole, -(-size // step) * step)
    return next(each for each in range(size, whole + 1) if resized(schedule, whole, each).accepts(each))


def _drawn(label: str, each: Kept, planner: Planner, schedule: PipelineSchedule, size: int, seconds: float) -> _Drawn:
    """Simulate a configuration from its start until `seconds` after the beginning of its steady state."""
    configuration = each.estimate.configuration
    whole, weights = configuration.num_microbatches, schedule.weights
    costs = planner.costs(configuration, schedule, planner.layers(configuration), each.estimate.verdict)
    settled = 2 * schedule.num_ranks if weights.updates_alone else weights.delay
    behind, smaller = -(-schedule.num_ranks // size), ""  # later batches overlap the ends of earlier ones
    if weights.drains:
        behind, smaller = 0, ", so its bubbles are smaller"
    of_batch = each.estimate.seconds * size / whole
    count = settled + math.ceil(seconds / of_batch) + behind
    timeline = simulate(resized(schedule, whole, size).build((size,) * count), costs)
    return _Drawn(label, timeline, timeline.batch_starts()[settled], size, whole, smaller)


def _figure(each: _Drawn, end: float, scale: float) -> str:
    title = f"batches of {counted(each.size, 'microbatch')} in the steady state"
    drawn = page_timeline(each.timeline, name=title, window=(each.start, each.start + end), scale=scale, hovers=True)
    said = [title]
    if each.size < each.whole:
        said.append(f"the configuration has {each.whole}{each.smaller}")
    if drawn.left_out:
        said.append(f"not drawn: {', '.join(drawn.left_out)}")
    return (
        f'<figure><h3>{escape(each.label)}</h3><div class="drawing">{drawn.svg}</div>'
        f"<figcaption>{escape('; '.join(said), quote=False)}.<br>{_legend(drawn.signs)}</figcaption></figure>"
    )


def _too_large(label: str, schedule: PipelineSchedule, size: int) -> str:
    return (
        f"<h3>{escape(label)}</h3><p>{counted(schedule.num_stages, 'stage')} with batches of at least "
        f"{counted(size, 'microbatch')} are {2 * schedule.num_stages * size:,} boxes, too many to draw here "
        "(<code>tools/schedule.py draw</code> draws them).</p>"
    )
