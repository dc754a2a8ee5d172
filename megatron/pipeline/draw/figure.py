"""A timeline as a picture, in the manner of Figures 1 to 3 of the 2BW paper (`docs/schedules.md` lists the signs).

Each rank has one row, with time to the right. Forwards are blue, backwards green, recomputations violet, bubbles grey.
The number in a cell is its microbatch. The lightness shows the weight version, which is also written below the number
if there is room; on a rank with several stages the lightness shows the stage, dark for the first. The hatched backward
completes the gradient of a batch. The red mark is the optimizer step that makes the version written beside it, and the
thin line with ~n is the prediction of version n. With weights on the host, panels below show the lanes to and from the
host, and the stages on the device. A dashed line follows the first forward of each batch down the stages. Arrows
between the rows of a pair are moves of saved activations. The critical path is framed, and a line between two rows
connects the end of one computation on the path with the start of the next. Several timelines are drawn below one
another on one scale of time, so that a plan can be compared with its measurement.

Collections have a gid, by which tests and tools can find them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.documents.picture import new_figure, save
from megatron.pipeline.draw import colours
from megatron.pipeline.draw.panels import Panel, device_panel, host_panel, memory_panel, saved_panel
from megatron.pipeline.draw.scene import AT_END, Scene, Sign, extent, has_host, signs_of
from megatron.pipeline.program.instruction import BUSY, OWN_MOVES, REDUCTIONS, SENDS, Kind
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.simulate.memory_curve import MemorySizes, memory_curves
from megatron.pipeline.simulate.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW = 0.40  # inches
_LEFT, _RIGHT = 0.85, 0.3  # inches beside the panels
_LARGEST = 400  # inches; a side of an image must have fewer than 2^16 dots
_NARROWEST, _WIDEST = 7.0, 22.0  # inches
_SMALLEST_LABEL, _LARGEST_LABEL, _SMALL = 4.5, 9.0, 5.5  # points
_INNER = 0.92  # share of a row's height that its cells take


def draw_timeline(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path | None = None,
    *,
    title: str = "",
    names: Sequence[str] = (),
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
        timelines: simulated or measured timelines. Each is drawn from its first computation or fetch on; if there are
            several, each has its name as a heading.
        path: the file to write; the suffix chooses the format (.png, .svg, .pdf). None only returns the figure.
        title: text above the picture.
        names: the names of the rows, the same for all timelines; default: by their stages.
        one_based: number microbatches from 1, as the paper does; programs number from 0.
        saved_microbatches: show below each timeline the number of microbatches whose activations each rank holds; with
            weights on the host, also the stages whose weights and gradients are on the device.
        lanes: draw transfers as lines between the rows and reductions as bars below them, if they take time; with
            weights on the host, show the copies between device and host below each timeline.
        critical_path: the critical path of the first timeline (`critical_path.critical_path`), to be marked there.
        memory: show below each timeline the memory of each rank over time: the sizes, and the weight policy of the
            executed program.
        time_label, time_scale: name of the axis, and its units per unit of the timeline (1000 for milliseconds).
        width: width in inches; default: as wide as the labels need, 7 to 22.

    Returns:
        The figure. Its collections have gids: "F@1" for the cells of a kind and version, the names of updates in small
        letters, the names of moves, "bubble", and others.

    Raises:
        ValueError: if there is nothing to draw, the picture is too large for an image, or the suffix is not that of an
            image format.
    """
    timelines = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    origin = extent(timelines[0])[0] if timelines else 0.0
    marked = [
        replace(span, start=(span.start - origin) * time_scale, end=(span.end - origin) * time_scale)
        for span in critical_path
    ]
    scenes = [Scene(each.shifted(-extent(each)[0]).scaled(time_scale), names=names) for each in timelines]
    ends = [extent(scene.timeline)[1] for scene in scenes]
    if not all(map(math.isfinite, ends)):
        raise ValueError(f"times that are multiplied by {time_scale:g} are more than a number can hold; give less")
    span = max(ends, default=0.0)
    if not any(scene.timeline.end for scene in scenes):
        raise ValueError("there is nothing to draw; give timelines in which a computation takes time")
    width = width or _width(scenes, span)
    if not _LEFT + _RIGHT + 1 <= width <= _LARGEST:
        raise ValueError(
            f"a picture {width:g} inches wide cannot be drawn; give {_LEFT + _RIGHT + 1:g} to {_LARGEST} inches"
        )
    hosts = any(has_host(scene.timeline) for scene in scenes)
    makers = [*[host_panel] * (lanes and hosts), *[saved_panel] * saved_microbatches,
              *[device_panel] * (saved_microbatches and hosts)]  # fmt: skip
    panels = [[make(scene) for make in makers] for scene in scenes]
    if memory is not None:
        for scene, below in zip(scenes, panels, strict=True):
            below.append(memory_panel(scene, memory_curves(scene.timeline, *memory)))
    signs = signs_of(scenes, lanes=lanes) + [Sign((colours.CRITICAL,), "critical path", "frame")] * bool(marked)
    held = {area.gid for below in panels for panel in below for area in panel.areas}
    signs += [Sign((colour,), part) for part, colour in colours.MEMORY.items() if f"memory {part}" in held]
    num_columns = min(len(signs), max(1, int(width / 2.4)))

    foot = 0.62 + 0.19 * math.ceil(len(signs) / num_columns)  # the axis with its label, and the legend
    head = (0.3 + 0.18 * title.count("\n") if title else 0.04) + (0.36 if len(scenes) > 1 else 0.2)
    heights, gaps = [], []
    for scene, below in zip(scenes, panels, strict=True):
        heights += [scene.timeline.num_ranks * row for row in (_ROW, *(panel.row for panel in below))]
        gaps += [0.3] * len(below) + [0.55]
    height = head + sum(heights) + sum(gaps[:-1]) + foot
    if height > _LARGEST:
        ranks = sum(scene.timeline.num_ranks for scene in scenes)
        raise ValueError(
            f"the rows of {ranks} ranks are {height:.0f} inches high, more than the {_LARGEST} that an image holds; "
            "draw fewer stages"
        )

    figure = new_figure(width, height)
    left, right = max([_LEFT, *(0.1 + 0.068 * len(name) for name in names)]) / width, 1.0 - _RIGHT / width
    points = 72.0 * width * (right - left) / span  # typographic, of a unit of the axis
    every: list[Axes] = []
    top = height - head
    for panel_height, gap in zip(heights, gaps, strict=True):
        every.append(figure.add_axes((left, (top - panel_height) / height, right - left, panel_height / height)))
        top -= panel_height + gap
    for axes in every:
        axes.set_xlim(0, span)
        axes.tick_params(labelsize=8, length=2, labelbottom=axes is every[-1])
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    every[-1].set_xlabel(time_label, fontsize=9)
    remaining = iter(every)
    for index, (scene, below) in enumerate(zip(scenes, panels, strict=True)):
        axes = next(remaining)
        _draw_cells(axes, scene, points, one_based)
        _draw_moves(axes, scene, one_based)
        if lanes:
            _draw_transfers(axes, scene)
        _draw_borders(axes, scene, points)
        _draw_marks(axes, scene, points)
        if len(scenes) > 1:
            name = scene.timeline.name or f"timeline {index}"
            axes.set_title(name, loc="left", fontsize=9, fontweight="bold", pad=12)
        if marked and not index:
            _draw_critical_path(axes, marked)
        for panel in below:
            _draw_panel(next(remaining), panel, points)
    if title:
        figure.suptitle(title, fontsize=11, x=left, ha="left", y=1 - 0.08 / height, va="top")
    _draw_legend(figure, signs, num_columns=num_columns, left=_RIGHT / width)
    numbers = f"in a cell: microbatch, counted from {int(one_based)}; below it: weight version"
    figure.text(right, (foot - 0.45) / height, numbers, ha="right", va="center", fontsize=7.5, color="#555555")
    if path is not None:
        save(figure, Path(path), dpi=140)
    return figure


def _width(scenes: list[Scene], span: float) -> float:
    """The width in inches at which the label of a typical short cell has its full size."""
    lengths = sorted(cell.end - cell.start for scene in scenes for cell in scene.cells if cell.end > cell.start)
    return min(_WIDEST, max(_NARROWEST, _LEFT + _RIGHT + 0.21 * span / lengths[len(lengths) // 10]))


# --- signs in the rows of a timeline


def _box(start: float, end: float, line: float, low: float = -_INNER / 2, high: float = _INNER / 2) -> list[tuple]:
    """The corners of a rectangle in a line, from `start` to `end` and from height `low` to height `high`."""
    return [(start, line + low), (end, line + low), (end, line + high), (start, line + high)]


def _draw_boxes(axes: "Axes", boxes: list, colour: "str | list[str]", gid: str, **style: object) -> None:
    from matplotlib.collections import PolyCollection

    axes.add_collection(PolyCollection(boxes, facecolors=colour, gid=gid, **{"edgecolors": "none"} | style))


def _draw_lines(axes: "Axes", lines: list, colour: str, gid: str, **style: object) -> None:
    from matplotlib.collections import LineCollection

    axes.add_collection(LineCollection(lines, colors=colour, gid=gid, **style))


def _small(colour: str) -> dict:
    """The style of text beside cells."""
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=1.5, foreground="white")]
    return {"fontsize": _SMALL, "fontweight": "bold", "color": colour, "path_effects": halo, "zorder": 6}


def _draw_cells(axes: "Axes", scene: Scene, points: float, one_based: bool) -> None:
    """Draw bubbles as one grey bar per row, and the cells on top, in one collection per kind, version and shade.

    A cell with enough room has its microbatch as a label, and below it the weight version.
    """
    timeline, ranks = scene.timeline, range(scene.timeline.num_ranks)
    _draw_boxes(axes, [_box(0.0, timeline.end, rank) for rank in ranks], colours.BUBBLE, "bubble")
    groups: dict[tuple[str, str], list] = {}
    for cell in scene.cells:
        version = cell.instruction.version
        name = cell.instruction.kind.value + ("" if version is None else f"@{version}")
        groups.setdefault((name, cell.colour), []).append(_box(cell.start, cell.end, cell.rank))
    for (name, colour), boxes in groups.items():
        _draw_boxes(axes, boxes, colour, name, edgecolors=colours.EDGE, linewidths=0.5)
    completing = [_box(cell.start, cell.end, cell.rank) for cell in scene.cells if cell.completes_batch]
    hatching = {"edgecolors": colours.HATCH, "linewidths": 0.0, "hatch": "xxxx", "alpha": 0.3}
    _draw_boxes(axes, completing, "none", "completes", **hatching)
    axes.set_ylim(timeline.num_ranks - 0.45, -0.55)
    axes.set_yticks(list(ranks), scene.names_of_rows, fontsize=8)
    for cell in scene.cells:
        text, room = str(cell.instruction.microbatch + one_based), (cell.end - cell.start) * points
        size = min(_LARGEST_LABEL, room / (0.62 * len(text) + 0.25))
        if size < _SMALLEST_LABEL:
            continue
        middle, style = (cell.start + cell.end) / 2, {"ha": "center", "color": colours.ink_on(cell.shade)}
        axes.text(middle, cell.rank - 0.04, text, va="center", fontsize=size, gid="microbatch", **style)
        if cell.named_version and room >= 3.6 * len(cell.named_version) + 6:
            version = f"v{cell.named_version}"
            axes.text(middle, cell.rank + 0.40, version, va="bottom", fontsize=_SMALL, gid="version", **style)


def _draw_borders(axes: "Axes", scene: Scene, points: float) -> None:
    """Draw a dashed line along the first forward of each batch down the stages, with a name unless names overlap."""
    dashes = {"color": colours.BORDER, "linewidth": 1.0, "linestyle": (0, (3, 2)), "clip_on": False}
    small = {"color": colours.BORDER, "fontsize": 7, "xytext": (2, 1), "textcoords": "offset points"}
    free_from = 0.0
    for batch, cells in scene.borders.items():
        across, down = zip(*((cell.start, cell.rank + side) for cell in cells for side in (-0.5, 0.5)), strict=True)
        axes.plot(across, down, gid="batch", zorder=4, **dashes)
        name = f"batch {batch}"
        if across[0] >= free_from:
            axes.annotate(name, (across[0], down[0]), annotation_clip=False, **small)
            free_from = across[0] + (4.4 * len(name) + 4) / points


def _draw_marks(axes: "Axes", scene: Scene, points: float) -> None:
    """Draw updates as bars with the width of their time, or a least width.

    A step has a bar that ends with it, and above the version that it makes. A prediction has a thinner bar that begins
    with it, and at its foot the predicted version. A step may end where a prediction begins, so a prediction's bar goes
    to the right, and its version is below the step's. A batch begins where a prediction ends, so the dashed line of the
    batch is drawn above it.
    """
    for kind, marks in scene.marks.items():
        word, colour = kind.row, colours.colour_of(kind)
        if word.sign == AT_END:
            boxes = [(min(each.start, each.end - 2.2 / points), each.end) for each in marks]
            side, height, label, va, zorder = 1.5, -0.42, "W", "top", 5.0
        else:
            least = 1.6 / points if word.sign else 0.0
            boxes = [(each.start, max(each.end, each.start + least)) for each in marks]
            side, height, label, va, zorder = 1.0, 0.43, word.sign, "bottom", 3.5 if word.sign else 3.0
        gid = kind.value.lower()
        bars = [_box(*box, each.rank) for box, each in zip(boxes, marks, strict=True)]
        _draw_boxes(axes, bars, colour, gid, zorder=zorder)
        for (start, _), each in zip(boxes, marks if word.sign else (), strict=False):
            text = f"{label}{each.instruction.version}"
            place = start - side / points, each.rank + height
            axes.text(*place, text, ha="right", va=va, gid=f"{gid} label", **_small(colour))


def _draw_transfers(axes: "Axes", scene: Scene) -> None:
    """Draw transfers as lines from sender to receiver, and reductions as bars at the foot of a row, if they take time.

    A transfer that passes the rows of other ranks is an arc.
    """
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path

    timeline, lines, arcs, bars = scene.timeline, [], [], []
    for span in (each for each in scene.spans if each.end > each.start):
        kind, start, end = span.instruction.kind, span.start, span.end
        if kind in SENDS:
            to = timeline.rank_of_stage[timeline.graph.peer_of(span.instruction)]
            toward = 0.46 if to > span.rank else -0.46
            ends = (start, span.rank + toward), (end, to - toward)
            if abs(to - span.rank) == 1:
                lines.append(ends)
            else:
                arcs.append(Path([ends[0], (ends[1][0], (ends[0][1] + ends[1][1]) / 2), ends[1]], [1, 3, 3]))
        elif kind in REDUCTIONS:
            bars.append(_box(start, end, span.rank, 0.38, 0.46))
    _draw_lines(axes, lines, colours.TRANSFER, "transfer", linewidths=0.7, zorder=4)
    if arcs:
        style = {"facecolors": "none", "edgecolors": colours.TRANSFER, "linewidths": 0.7, "gid": "transfer past ranks"}
        axes.add_collection(PathCollection(arcs, zorder=4, **style))
    _draw_boxes(axes, bars, colours.REDUCTION, "reduction", zorder=4)


def _draw_moves(axes: "Axes", scene: Scene, one_based: bool) -> None:
    """Draw evictions and loads as arrows between the rows of a pair, from their start to their end, with a microbatch.

    The number of the microbatch is at the evictor's row, next to the computations beside which the move runs. It comes
    after the start of an eviction and before the end of a load, so that an eviction after a load does not cover it.
    """
    for kind in (each for each in Kind if each in OWN_MOVES):
        lines, colour = [], colours.colour_of(kind)
        for span in (each for each in scene.moves if each.instruction.kind is kind):
            first, last = scene.ends_of_move(span)
            edge = _INNER / 2 if last > first else -_INNER / 2
            lines.append([(span.start, first + edge), (span.end, last - edge)])
            leaves = first == span.rank
            place = (span.start, first + edge * 0.78) if leaves else (span.end, last - edge * 0.78)
            axes.annotate(
                str(span.instruction.microbatch + one_based), place, xytext=(1.5 if leaves else -1.5, 0),
                textcoords="offset points", ha="left" if leaves else "right", va="center", gid=f"{kind.value} label",
                annotation_clip=False, **_small(colour),
            )  # fmt: skip
        _draw_lines(axes, lines, colour, kind.value, linewidths=0.9, zorder=2.5)  # under the numbers of cells
        for marker, sign in (("v", 1), ("^", -1)):
            heads = [end for start, end in lines if (end[1] - start[1]) * sign > 0]
            if heads:
                axes.scatter(*zip(*heads, strict=True), marker=marker, color=colour, s=12, linewidths=0, zorder=5)


def _draw_critical_path(axes: "Axes", path: Sequence[Span]) -> None:
    """Mark the spans of a path, whose times are in the units of the axis."""
    busy = [span for span in path if span.instruction.kind in BUSY]
    frames = [_box(span.start, span.end, span.rank) for span in busy]
    style = {"linewidths": 1.6, "zorder": 5.5}
    _draw_boxes(axes, frames, "none", "critical", edgecolors=colours.CRITICAL, **style)
    lines = [
        [(last.end, last.rank), (span.start, span.rank)]
        for last, span in pairwise(busy)
        if last.rank != span.rank or last.end < span.start
    ]
    _draw_lines(axes, lines, colours.CRITICAL, "critical wait", **style)


# --- panels below the rows, and the legend


def _draw_panel(axes: "Axes", panel: Panel, points: float) -> None:
    bars = sorted(panel.bars, key=lambda bar: bar.gid)
    for gid, each in groupby(bars, key=lambda bar: bar.gid):
        drawn = list(each)
        boxes = [_box(bar.start, bar.end, bar.line, -0.42, 0.42) for bar in drawn]
        shades = [bar.colour for bar in drawn]
        _draw_boxes(axes, boxes, shades, gid, edgecolors=colours.EDGE, linewidths=0.4)
    for line, start, end, text in panel.labels:
        if (end - start) * points >= 4.0 * len(text) + 2:
            style = {"ha": "center", "va": "center", "fontsize": 6, "color": colours.INK, "gid": "stage"}
            axes.text((start + end) / 2, line + 0.02, text, **style)
    for area in panel.areas:
        heights = [[area.line + 0.45 - 0.85 * share for share in side] for side in (area.low, area.high)]
        axes.fill_between(area.times, *heights, step="post", color=area.colour, linewidth=0, gid=area.gid)
    at_right = {"transform": axes.get_yaxis_transform(), "fontsize": 7, "va": "center", "clip_on": False}
    for line, text in enumerate(panel.peaks):
        axes.text(1.0, line + 0.05, f" {text}", gid=panel.peak, **at_right)
    axes.set_ylim(len(panel.names) - 0.4, -0.6)
    axes.set_yticks(range(len(panel.names)), panel.names, fontsize=6 if panel.bars else 8)
    axes.set_title(panel.title, loc="left", fontsize=8, pad=2)


def _draw_legend(figure: "Figure", signs: list[Sign], *, num_columns: int, left: float) -> None:
    """Draw the legend at the foot of the figure. `left`: distance from its left edge, as a share of its width."""
    from matplotlib.legend_handler import HandlerTuple

    figure.legend(
        handles=[_handle(sign) for sign in signs], labels=[sign.meaning for sign in signs],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, loc="lower left", bbox_to_anchor=(left, 0.0),
        ncols=num_columns, fontsize=7.5, frameon=False, handlelength=2.2, handleheight=1.0, columnspacing=1.6,
        borderaxespad=0.3,
    )  # fmt: skip


def _handle(sign: Sign) -> tuple:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colour = sign.colours[0]
    match sign.form:
        case "line":
            return (Line2D([], [], color=colour, linewidth=1.2),)
        case "tick":
            return (Line2D([], [], color=colour, marker="|", markersize=8, markeredgewidth=1.6, linestyle="none"),)
        case "frame":
            return (Patch(facecolor="none", edgecolor=colour, linewidth=1.6),)
        case "hatch":
            return (Patch(facecolor=colours.HATCHED, edgecolor=colour, hatch="xxxx", linewidth=0),)
    return tuple(Patch(facecolor=each) for each in sign.colours)
