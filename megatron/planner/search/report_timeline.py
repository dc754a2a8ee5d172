"""Timelines on a search's page: programs that are small enough to be read, in the steady state, all on one axis.

A batch is shortened, so that its computations can be told apart, and each schedule's batch to about the same time. What
is drawn begins with a batch that meets the pipeline as later ones do: where batches drain any, else one whose weights
are as old as those of all that follow. All pictures show as many seconds, so that one sees which gets farther.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megatron.documents.numbers import counted
from megatron.pipeline.draw.page_timeline import legible_scale, page_timeline
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.timeline import Timeline
from megatron.planner.memory.schedule_demand import resized
from megatron.planner.planner import Planner
from megatron.planner.search.outcome import Kept

_FEW, _MOST_CELLS = 16, 20_000  # microbatches of a shortened batch; computations of a drawing, at most
_SHOWN = 1.25  # of the longest batch


@dataclass(frozen=True)
class _Drawn:
    """A configuration whose batches are shortened to `size` microbatches of `whole`."""

    label: str
    timeline: Timeline
    start: float
    size: int
    whole: int
    drains: bool


def timeline_figures(rows: Sequence[tuple[str, Kept, Planner]]) -> str:
    """A figure for each labelled configuration, with the signs and what is left out below it."""
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
    return each.estimate.configuration.pipeline_schedule(tied_embeddings=planner.model.tied_embeddings)


def _least(schedule: PipelineSchedule) -> int:
    """Microbatches that fill the pipeline, and some more of a short one."""
    return max(schedule.num_ranks, min(2 * schedule.num_ranks, _FEW))


def _fitting(schedule: PipelineSchedule, whole: int, size: int) -> int:
    """The first size from this one on that the schedule takes, up to that of the configuration."""
    step = 1 if schedule.weights.drains and schedule.num_virtual_stages == 1 else schedule.num_ranks
    size = min(whole, -(-size // step) * step)
    return next(each for each in range(size, whole + 1) if resized(schedule, whole, each).accepts(each))


def _drawn(label: str, each: Kept, planner: Planner, schedule: PipelineSchedule, size: int, seconds: float) -> _Drawn:
    """Simulated from its start until so many seconds behind the beginning of its steady state."""
    configuration = each.estimate.configuration
    whole, weights = configuration.num_microbatches, schedule.weights
    costs = planner.costs(configuration, schedule, planner.layers(configuration), each.estimate.verdict)
    settled = 2 * schedule.num_ranks if weights.updates_alone else weights.delay
    behind = 0 if weights.drains else -(-schedule.num_ranks // size)  # batches that others wait for when they end
    of_batch = each.estimate.seconds * size / whole
    count = settled + math.ceil(seconds / of_batch) + behind
    timeline = simulate(resized(schedule, whole, size).build((size,) * count), costs)
    return _Drawn(label, timeline, timeline.batch_starts()[settled], size, whole, weights.drains)


def _figure(each: _Drawn, end: float, scale: float) -> str:
    title = f"batches of {counted(each.size, 'microbatch')} in the steady state"
    drawn = page_timeline(each.timeline, name=title, window=(each.start, each.start + end), scale=scale, hovers=True)
    said = [title]
    if each.size < each.whole:
        said.append(f"the configuration has {each.whole}" + ", so its bubbles are smaller" * each.drains)
    if drawn.left_out:
        said.append(f"not drawn: {', '.join(drawn.left_out)}")
    signs = "".join(
        f'<span class="sign"><i style="background:{colour}"></i>{escape(meaning)}</span> '
        for colour, meaning in drawn.signs
    )
    return (
        f'<figure><h3>{escape(each.label)}</h3><div class="drawing">{drawn.svg}</div>'
        f"<figcaption>{escape('; '.join(said), quote=False)}.<br>{signs}</figcaption></figure>"
    )


def _too_large(label: str, schedule: PipelineSchedule, size: int) -> str:
    return (
        f"<h3>{escape(label)}</h3><p>{counted(schedule.num_stages, 'stage')} with batches of at least "
        f"{counted(size, 'microbatch')} are {2 * schedule.num_stages * size:,} boxes, too many to draw here "
        "(<code>tools/schedule.py draw</code> draws them).</p>"
    )
