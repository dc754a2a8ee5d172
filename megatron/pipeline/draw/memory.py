"""The memory of each rank over time, stacked by what it is for, with its peak."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.pipeline.draw import legend
from megatron.pipeline.draw.cells import names_of_rows
from megatron.pipeline.simulate.memory_curve import PARTS, MemoryCurve
from megatron.pipeline.simulate.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_memory(axes: "Axes", timeline: Timeline, curves: Sequence[MemoryCurve]) -> None:
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
