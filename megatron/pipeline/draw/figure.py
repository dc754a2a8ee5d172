"""A timeline as a picture, in the manner of Figures 1 to 3 of the 2BW paper (`docs/schedules.md` lists the signs).

One row per rank, time to the right. Forwards are blue, backwards green, recomputations violet, bubbles grey; the
number in a cell is its microbatch, and the lightness its weight version, which stands below the number where there is
room. On a rank with several stages the lightness is the stage, dark for the first. The hatched backward completes the
gradient of a batch; the red mark is the optimizer step that makes the version written beside it, and the thin line
with ~n the prediction of version n. Where weights live on the host, panels below show the lanes to and from it and what
is on the device. A dashed line follows the first forward of each batch down the stages. Arrows
between the rows of a pair are moves of saved activations. The critical path is framed, and between two rows a line goes
from where its one computation ends to where the next begins. Several timelines stand below one another on one scale of
time, so that a plan can be compared with its measurement.

matplotlib takes longer to import than all the rest of the room, so it is imported only when something is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.pipeline.draw import legend
from megatron.pipeline.draw.cells import Cell, cells_of, holds_of, names_of_rows, predictions_of, steps_of
from megatron.pipeline.draw.host import draw_host_lanes, draw_resident, extent, has_host
from megatron.pipeline.draw.legend import draw_legend, legend_entries, more_entries
from megatron.pipeline.draw.rows import (
    box,
    draw_batches,
    draw_labels,
    draw_lanes,
    draw_moves,
    draw_predictions,
    draw_rows,
    draw_saved,
    draw_steps,
)
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.simulate.memory_curve import PARTS, MemoryCurve, MemorySizes, memory_curves
from megatron.pipeline.simulate.timeline import BUSY, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW, _SAVED_ROW, _MEMORY_ROW = 0.40, 0.24, 0.36  # inches
_LANES_ROW, _RESIDENT_ROW = 0.45, 0.6
_LEFT, _RIGHT = 0.85, 0.3  # inches beside the panels
_DOTS_PER_INCH = 140
_LARGEST = 400  # inches; a side of an image has fewer than 2^16 dots
_NARROWEST, _WIDEST = 7.0, 22.0  # inches


def draw_timeline(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path | None = None,
    *,
    title: str = "",
    one_based: bool = False,
    saved_microbatches: bool = False,
    lanes: bool = False,
    critical_path: Sequence[Span] = (),
    memory: tuple[MemorySizes, WeightPolicy] | None = None,
    time_label: str = "time",
    time_scale: float = 1.0,
    width: float | None = None,
) -> "Figure":
    """Draw one timeline, or several below one another on one scale of time.

    Args:
        timelines: simulated or measured; each is drawn from its first computation or fetch on, and headed by its name
            where there are several.
        path: where to write; the suffix chooses the format (.png, .svg, .pdf). None: only return the figure.
        title: above the picture.
        one_based: number microbatches from 1, as the paper does; programs number from 0.
        saved_microbatches: below each timeline, how many microbatches' activations each rank holds, and whose weights
            and gradients are on the device where weights live on the host.
        lanes: draw transfers as lines between the rows, and reductions as bars below them, where they take time; below
            each timeline, what runs between device and host.
        critical_path: of the first timeline (`critical_path.critical_path`), to be marked there.
        memory: below each timeline, what each rank holds over time: sizes, and the weight policy of what ran.
        time_label, time_scale: name of the axis, and its units per unit of the timeline (1000 for milliseconds).
        width: inches; default: as wide as the labels need, 7 to 22.

    Returns:
        The figure. Its collections have gids: "F@1" for the cells of a kind and version, "step", "prediction",
        "bubble", and others.

    Raises:
        ValueError: there is nothing to draw, no image holds it, or the suffix is no image format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timelines = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    origin = extent(timelines[0])[0] if timelines else 0.0
    marked = [
        replace(span, start=(span.start - origin) * time_scale, end=(span.end - origin) * time_scale)
        for span in critical_path
    ]
    timelines = [timeline.shifted(-extent(timeline)[0]).scaled(time_scale) for timeline in timelines]
    ends = [extent(timeline)[1] for timeline in timelines]
    if not all(map(math.isfinite, ends)):
        raise ValueError(f"times that are multiplied by {time_scale:g} are more than a number can hold; give less")
    all_cells = [cells_of(timeline) for timeline in timelines]
    span = max(ends, default=0.0)
    if not any(timeline.end for timeline in timelines):
        raise ValueError("there is nothing to draw; give timelines in which a computation takes time")
    width = width or _width(all_cells, span)
    if not _LEFT + _RIGHT + 1 <= width <= _LARGEST:
        raise ValueError(
            f"a picture {width:g} inches wide cannot be drawn; give {_LEFT + _RIGHT + 1:g} to {_LARGEST} inches"
        )
    curves = [memory_curves(timeline, *memory) if memory else None for timeline in timelines]
    entries = legend_entries(timelines, all_cells, lanes=lanes)
    entries += more_entries(is_critical=bool(marked), curves=curves)
    num_columns = min(len(entries), max(1, int(width / 2.4)))

    foot = 0.62 + 0.19 * math.ceil(len(entries) / num_columns)  # the axis with its label, and the legend
    head = (0.3 if title else 0.04) + (0.36 if len(timelines) > 1 else 0.2)
    left, right = _LEFT / width, 1.0 - _RIGHT / width
    points = 72.0 * width * (right - left) / span
    hosts = any(map(has_host, timelines))
    wanted = (  # below each timeline: the height of a rank's row, who draws it, whether it is there
        (_LANES_ROW, lambda axes, index: draw_host_lanes(axes, timelines[index], points=points), lanes and hosts),
        (_SAVED_ROW, lambda axes, index: draw_saved(axes, timelines[index]), saved_microbatches),
        (_RESIDENT_ROW, lambda axes, index: draw_resident(axes, timelines[index], points=points),
         saved_microbatches and hosts),
        (_MEMORY_ROW, lambda axes, index: _draw_memory(axes, timelines[index], curves[index]), memory is not None),
    )  # fmt: skip
    below = [(height, draw) for height, draw, is_wanted in wanted if is_wanted]
    heights, gaps = [], []
    for timeline in timelines:
        heights += [timeline.num_ranks * height for height in (_ROW, *(height for height, _ in below))]
        gaps += [0.3] * len(below) + [0.55]
    height = head + sum(heights) + sum(gaps[:-1]) + foot
    if height > _LARGEST:
        ranks = sum(timeline.num_ranks for timeline in timelines)
        raise ValueError(
            f"the rows of {ranks} ranks are {height:.0f} inches high, more than the {_LARGEST} that an image holds; "
            "draw fewer stages"
        )

    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    panels: list[Axes] = []
    top = height - head
    for panel_height, gap in zip(heights, gaps, strict=True):
        panels.append(figure.add_axes((left, (top - panel_height) / height, right - left, panel_height / height)))
        top -= panel_height + gap
    _finish_axes(panels, span, time_label)
    for index, (timeline, cells) in enumerate(zip(timelines, all_cells, strict=True)):
        axes, *others = panels[index * (1 + len(below)) : (index + 1) * (1 + len(below))]
        draw_rows(axes, timeline, cells)
        draw_labels(axes, cells, points=points, one_based=one_based)
        draw_moves(axes, timeline, one_based=one_based)
        if lanes:
            draw_lanes(axes, timeline)
        if len(timeline.batches) > 1:
            draw_batches(axes, timeline, cells, points=points)
        draw_predictions(axes, predictions_of(timeline), holds_of(timeline), points=points)
        draw_steps(axes, steps_of(timeline), points=points)
        if len(timelines) > 1:
            axes.set_title(timeline.name or f"timeline {index}", loc="left", fontsize=9, fontweight="bold", pad=12)
        if marked and not index:
            _draw_critical_path(axes, marked)
        for (_, draw), other in zip(below, others, strict=True):
            draw(other, index)
    if title:
        figure.suptitle(title, fontsize=11, x=left, ha="left", y=1 - 0.08 / height, va="top")
    draw_legend(figure, entries, num_columns=num_columns, left=_RIGHT / width)
    numbers = f"in a cell: microbatch, counted from {int(one_based)}; below it: weight version"
    figure.text(right, (foot - 0.45) / height, numbers, ha="right", va="center", fontsize=7.5, color="#555555")
    if path is not None:
        _save(figure, Path(path))
    return figure


def _width(all_cells: list[list[Cell]], span: float) -> float:
    """Inches at which the label of a typical short cell has its full size."""
    lengths = sorted(cell.end - cell.start for cells in all_cells for cell in cells if cell.end > cell.start)
    return min(_WIDEST, max(_NARROWEST, _LEFT + _RIGHT + 0.21 * span / lengths[len(lengths) // 10]))


def _finish_axes(panels: "list[Axes]", span: float, time_label: str) -> None:
    for axes in panels:
        axes.set_xlim(0, span)
        axes.tick_params(labelsize=8, length=2, labelbottom=axes is panels[-1])
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    panels[-1].set_xlabel(time_label, fontsize=9)


def _save(figure: "Figure", path: Path) -> None:
    import matplotlib

    suffix = path.suffix.lstrip(".").lower()
    if suffix not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"{path} is no image that can be written; end its name in .png or .svg")
    with matplotlib.rc_context({"svg.hashsalt": "timeline"}):  # the same picture gives the same bytes
        figure.savefig(path, dpi=_DOTS_PER_INCH, metadata={"Date": None} if suffix == "svg" else None)


# --- the critical path, and the memory of each rank


def _draw_critical_path(axes: "Axes", path: Sequence[Span]) -> None:
    """Mark the spans of a path, whose times are on the panel's axis."""
    from matplotlib.collections import LineCollection, PolyCollection

    frames = [box(span.start, span.end, span.rank) for span in path if span.instruction.kind in BUSY]
    style = {"edgecolors": legend.CRITICAL, "linewidths": 1.6, "zorder": 5.5}
    axes.add_collection(PolyCollection(frames, facecolors="none", gid="critical", **style))
    lines, last = [], None
    for span in path:
        if span.instruction.kind not in BUSY:
            continue
        if last is not None and (last.rank != span.rank or last.end < span.start):
            lines.append([(last.end, last.rank), (span.start, span.rank)])
        last = span
    axes.add_collection(
        LineCollection(lines, colors=legend.CRITICAL, linewidths=1.6, gid="critical wait", zorder=5.5)
    )  # fmt: skip


def _draw_memory(axes: "Axes", timeline: Timeline, curves: Sequence[MemoryCurve]) -> None:
    """A row for each rank, all on one scale; parts that a rank does not have are not drawn."""
    highest = max(curve.peak for curve in curves) or 1.0
    peaks = {"transform": axes.get_yaxis_transform(), "fontsize": 7, "va": "center", "clip_on": False}
    for rank, curve in enumerate(curves):
        foot = rank + 0.45
        times = [*curve.times, max(timeline.end, curve.times[-1])]
        below = [0.0] * len(times)
        for part in (each for each in PARTS if each in curve.parts):
            values = [*curve.parts[part], curve.parts[part][-1]]
            top = [low + value for low, value in zip(below, values, strict=True)]
            if any(values):
                heights = [[foot - 0.85 * each / highest for each in side] for side in (below, top)]
                axes.fill_between(
                    times, *heights, step="post", color=legend.MEMORY[part], linewidth=0, gid=f"memory {part}"
                )
            below = top
        axes.text(1.0, foot - 0.4, f" {curve.peak:.4g}", gid="peak memory", **peaks)
    axes.set_ylim(timeline.num_ranks - 0.4, -0.6)
    axes.set_yticks(range(timeline.num_ranks), names_of_rows(timeline), fontsize=8)
    axes.set_title("memory, with the peak", loc="left", fontsize=8, pad=2)
