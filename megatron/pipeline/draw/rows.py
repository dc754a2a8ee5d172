"""What stands in the panels of a picture: the rows of cells with their labels and marks, and the saved microbatches.

Each function draws one kind of sign of one timeline into one panel. Times are on the panel's axis already. Collections
carry a gid, so that tests and tools can find what they show.
"""

from typing import TYPE_CHECKING

from megatron.pipeline.draw import legend
from megatron.pipeline.draw.cells import Cell, Update, names_of_rows
from megatron.pipeline.program.instruction import MOVES, OWN_MOVES, REDUCTIONS, SENDS, Kind
from megatron.pipeline.simulate.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMALLEST_LABEL, _LARGEST_LABEL, _SMALL = 4.5, 9.0, 5.5  # points
_INNER = 0.92  # share of a row's height that its cells take


def draw_rows(axes: "Axes", timeline: Timeline, cells: list[Cell]) -> None:
    """Bubbles as one grey bar per row, and the cells on it, in one collection per kind, version and shade."""
    from matplotlib.collections import PolyCollection

    ranks = range(timeline.num_ranks)
    bars = [box(0.0, timeline.end, rank) for rank in ranks]
    axes.add_collection(PolyCollection(bars, facecolors=legend.BUBBLE, edgecolors="none", gid="bubble"))
    groups: dict[tuple[Kind, int | None, int], list] = {}
    for cell in cells:
        groups.setdefault((cell.kind, cell.version, cell.shade), []).append(box(cell.start, cell.end, cell.rank))
    for (kind, version, shade), boxes in groups.items():
        name = kind.value if version is None else f"{kind.value}@{version}"
        colour = legend.shade_of(kind, shade)
        axes.add_collection(PolyCollection(boxes, facecolors=colour, edgecolors=legend.EDGE, linewidths=0.5, gid=name))
    completing = [box(cell.start, cell.end, cell.rank) for cell in cells if cell.completes_batch]
    hatching = {"facecolors": "none", "edgecolors": legend.HATCH, "linewidths": 0.0, "hatch": "xxxx", "alpha": 0.3}
    axes.add_collection(PolyCollection(completing, gid="completes", **hatching))
    axes.set_ylim(timeline.num_ranks - 0.45, -0.55)
    axes.set_yticks(list(ranks), names_of_rows(timeline), fontsize=8)


def draw_labels(axes: "Axes", cells: list[Cell], *, points: float, one_based: bool) -> None:
    """The microbatch in each cell that has room for it, and the weight version below it.

    Args:
        points: typographic points per unit of the axis.
    """
    below = {"ha": "center", "va": "bottom", "fontsize": _SMALL, "gid": "version"}
    for cell in cells:
        text, room = str(cell.microbatch + one_based), (cell.end - cell.start) * points
        size = min(_LARGEST_LABEL, room / (0.62 * len(text) + 0.25))
        if size < _SMALLEST_LABEL:
            continue
        ink, middle = legend.ink_on(cell.shade), (cell.start + cell.end) / 2
        axes.text(middle, cell.rank - 0.04, text, ha="center", va="center", fontsize=size, color=ink, gid="microbatch")
        if cell.version is not None and room >= 3.6 * len(cell.named_version) + 6:
            axes.text(middle, cell.rank + 0.40, f"v{cell.named_version}", color=ink, **below)


def draw_batches(axes: "Axes", timeline: Timeline, cells: list[Cell], *, points: float) -> None:
    """A dashed line that follows the first forward of each batch down the stages, named where names do not collide."""
    batch_of = {microbatch: batch for batch, microbatch in enumerate(timeline.batch_borders()[:-1])}
    places: dict[int, list[tuple[int, float]]] = {}
    for cell in cells:
        if cell.begins_batch and cell.stage == timeline.stages_of(cell.rank)[0]:
            places.setdefault(batch_of[cell.microbatch], []).append((cell.rank, cell.start))
    dashes = {"color": legend.BORDER, "linewidth": 1.0, "linestyle": (0, (3, 2)), "clip_on": False}
    small = {"color": legend.BORDER, "fontsize": 7, "xytext": (2, 1), "textcoords": "offset points"}
    free_from = 0.0
    for batch, starts in sorted(places.items()):
        starts.sort()
        across = [start for _, start in starts for _ in range(2)]
        down = [rank + side for rank, _ in starts for side in (-0.5, 0.5)]
        axes.plot(across, down, gid="batch", zorder=4, **dashes)
        name = f"batch {timeline.first_batch + batch}"
        if across[0] >= free_from:
            axes.annotate(name, (across[0], down[0]), annotation_clip=False, **small)
            free_from = across[0] + (4.4 * len(name) + 4) / points


def draw_steps(axes: "Axes", steps: list[Update], *, points: float) -> None:
    """A red bar at the end of each optimizer step, as wide as the step took, with the version that it makes."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patheffects import withStroke

    least = 2.2 / points
    starts = [min(step.start, step.end - least) for step in steps]
    boxes = [box(start, step.end, step.rank) for start, step in zip(starts, steps, strict=True)]
    axes.add_collection(PolyCollection(boxes, facecolors=legend.STEP, edgecolors="none", gid="step", zorder=5))
    halo = [withStroke(linewidth=1.5, foreground="white")]
    small = {"fontsize": _SMALL, "fontweight": "bold", "color": legend.STEP, "path_effects": halo}
    for start, step in zip(starts, steps, strict=True):
        place = (start - 1.5 / points, step.rank - 0.42)
        axes.text(*place, f"W{step.version}", ha="right", va="top", gid="made", zorder=6, **small)


def draw_predictions(axes: "Axes", predictions: list[Update], holds: list[Update], *, points: float) -> None:
    """A thin line from where each prediction begins, as wide as it took, with the version that it predicts at its foot;
    a pale bar where gradients are kept for one.

    A step may end where a prediction begins, so the line goes to the right and its version below the step's. A batch
    begins where a prediction ends, so the dashed line of the batch stays above it.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.patheffects import withStroke

    kept = [box(hold.start, hold.end, hold.rank) for hold in holds]
    axes.add_collection(PolyCollection(kept, facecolors=legend.HOLD, edgecolors="none", gid="hold", zorder=3))
    least = 1.6 / points
    boxes = [box(each.start, max(each.end, each.start + least), each.rank) for each in predictions]
    style = {"facecolors": legend.PREDICTION, "edgecolors": "none", "gid": "prediction", "zorder": 3.5}
    axes.add_collection(PolyCollection(boxes, **style))
    halo = [withStroke(linewidth=1.5, foreground="white")]
    small = {"fontsize": _SMALL, "fontweight": "bold", "color": legend.PREDICTION, "path_effects": halo}
    for each in predictions:
        place = (each.start - 1.0 / points, each.rank + 0.43)
        axes.text(*place, f"~{each.version}", ha="right", va="bottom", gid="predicted", zorder=6, **small)


def draw_lanes(axes: "Axes", timeline: Timeline) -> None:
    """Transfers as lines from sender to receiver, arcs where they pass the rows of other ranks; reductions as bars at
    the foot of a row; only what takes time.
    """
    from matplotlib.collections import LineCollection, PathCollection, PolyCollection
    from matplotlib.path import Path

    lines, arcs, bars = [], [], []
    for span in timeline.spans:
        kind, start, end = span.instruction.kind, span.start, span.end
        if end <= start:
            continue
        if kind in SENDS:
            to = timeline.rank_of_stage[timeline.graph.peer_of(span.instruction)]
            toward = 0.46 if to > span.rank else -0.46
            ends = (start, span.rank + toward), (end, to - toward)
            if abs(to - span.rank) == 1:
                lines.append(ends)
            else:
                arcs.append(Path([ends[0], (ends[1][0], (ends[0][1] + ends[1][1]) / 2), ends[1]], [1, 3, 3]))
        elif kind in REDUCTIONS:
            low, high = span.rank + 0.38, span.rank + 0.46
            bars.append([(start, low), (end, low), (end, high), (start, high)])
    axes.add_collection(LineCollection(lines, colors=legend.TRANSFER, linewidths=0.7, gid="transfer", zorder=4))
    if arcs:
        style = {"facecolors": "none", "edgecolors": legend.TRANSFER, "linewidths": 0.7, "gid": "transfer past ranks"}
        axes.add_collection(PathCollection(arcs, zorder=4, **style))
    axes.add_collection(PolyCollection(bars, facecolors=legend.REDUCTION, edgecolors="none", gid="reduction", zorder=4))


def draw_moves(axes: "Axes", timeline: Timeline, *, one_based: bool) -> None:
    """Evictions and loads as arrows between the rows of a pair, from the start of each to its end, with its microbatch.

    The number stands at the evictor's row, so that one can see which computations the move runs beside: behind the
    beginning of an eviction, before the end of a load, so that an eviction that follows a load does not cover it.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.patheffects import withStroke

    for kind in (each for each in Kind if each in OWN_MOVES):
        lines, evicts = [], kind.row.saved < 0
        colour = legend.MOVE_COLOURS[kind.row.saved]
        label = {"va": "center", "fontsize": _SMALL, "fontweight": "bold", "color": colour, "zorder": 6}
        label["path_effects"] = [withStroke(linewidth=1.5, foreground="white")]
        for span in timeline.spans:
            if span.instruction.kind is not kind:
                continue
            pair = timeline.rank_of_stage[timeline.pairs.of_stage(span.instruction.stage)]
            edge = _INNER / 2 if pair > span.rank else -_INNER / 2
            rows = [span.rank + edge, pair - edge]
            times = [span.start, span.end]
            lines.append(list(zip(times, rows if evicts else rows[::-1], strict=True)))
            number, side = str(span.instruction.microbatch + one_based), 1 if evicts else -1
            axes.annotate(
                number, (times[0] if evicts else times[1], span.rank + edge * 0.78), xytext=(1.5 * side, 0),
                textcoords="offset points", ha="left" if evicts else "right", gid=f"{kind.value} label",
                annotation_clip=False, **label,
            )  # fmt: skip
        # under the numbers of the cells that they cross
        axes.add_collection(LineCollection(lines, colors=colour, linewidths=0.9, gid=kind.value, zorder=2.5))
        for marker, sign in (("v", 1), ("^", -1)):
            heads = [end for start, end in lines if (end[1] - start[1]) * sign > 0]
            times, rows = zip(*heads, strict=True) if heads else ((), ())
            axes.scatter(times, rows, marker=marker, color=colour, s=12, linewidths=0, zorder=5)


def draw_saved(axes: "Axes", timeline: Timeline) -> None:
    """Per rank, the number of microbatches whose activations it holds over time, and the highest number.

    Of a rank with several stages all are counted together, and below them, darker, its first ones alone.
    """
    ranks = range(timeline.num_ranks)
    owned = [timeline.stages_of(rank) for rank in ranks]
    highest = max(map(timeline.peak_saved_on_rank, ranks), default=0) or 1
    peaks = {"transform": axes.get_yaxis_transform(), "fontsize": 7, "va": "center", "clip_on": False}
    for rank, stages in enumerate(owned):
        foot = rank + 0.45
        for count in range(len(stages), 0, -1):
            events = timeline.saved_on_rank(rank, stages[:count])
            times = [0.0, *(time for time, _ in events), timeline.end]
            heights = [foot - 0.85 * saved / highest for saved in (0, *(saved for _, saved in events), 0)]
            colour = legend.SAVED[(len(stages) - count) % len(legend.SAVED)]
            axes.fill_between(times, heights, foot, step="post", color=colour, linewidth=0, gid="saved")
        axes.text(1.0, foot - 0.4, f" {timeline.peak_saved_on_rank(rank)}", gid="peak", **peaks)
    axes.set_ylim(timeline.num_ranks - 0.4, -0.6)
    axes.set_yticks(list(ranks), names_of_rows(timeline), fontsize=8)
    title = "microbatches whose activations are saved, with the peak"
    if timeline.num_stages > timeline.num_ranks:
        title += "; over all stages of a rank, its first ones darker"
    if any(span.instruction.kind in MOVES for span in timeline.spans):
        title += " (a microbatch that is awaited from the pair has its memory already)"
    axes.set_title(title, loc="left", fontsize=8, pad=2)


def box(start: float, end: float, rank: int) -> list[tuple[float, float]]:
    """The corners of a cell."""
    low, high = rank - _INNER / 2, rank + _INNER / 2
    return [(start, low), (end, low), (end, high), (start, high)]
