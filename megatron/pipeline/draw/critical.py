"""The critical path in a panel: computations framed, and transfers, moves and reductions on it as lines.

Between two rows the line goes from where the one computation ends to where the next begins, so the eye can follow it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.pipeline.draw import legend
from megatron.pipeline.draw.rows import box
from megatron.pipeline.simulate.timeline import BUSY, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_critical_path(axes: "Axes", path: Sequence[Span]) -> None:
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
