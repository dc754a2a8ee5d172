"""Time against cost: a curve for each sequence length, a point for each number of GPUs, and the knees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.planner.search.bill import amount
from megatron.planner.search.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_sweep(sweep: Sweep, *, title: str = "") -> Figure:
    """Both axes begin at zero. The front is a line; hollow points are beaten by one of it; a ring is the knee, with its
    time and its cost.

    Lines have gids "front LENGTH", rings "knee LENGTH", and what is beaten "beaten LENGTH".
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9, 5.6), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = matplotlib.color_sequences["tab10"]
    for index, (length, points) in enumerate(sweep.curves.items()):
        if not points:
            continue
        colour, front = colours[index % len(colours)], sweep.fronts[length]
        label = f"sequences of {length}"
        axes.plot(*_places(front), marker="o", markersize=5, color=colour, label=label, gid=f"front {length}")
        beaten = [each for each in points if each not in front]
        if beaten:
            axes.plot(
                *_places(beaten), linestyle="none", marker="o", markersize=5, markerfacecolor="none", color=colour,
                gid=f"beaten {length}",
            )  # fmt: skip
        for each in points:
            axes.annotate(
                str(each.num_gpus), (each.time, each.cost), xytext=(5, 5), textcoords="offset points", fontsize=8
            )
        if length in sweep.knees:
            knee = sweep.knees[length]
            axes.plot(
                *_places([knee]), linestyle="none", marker="o", markersize=12, markerfacecolor="none", color="black",
                gid=f"knee {length}",
            )  # fmt: skip
            axes.annotate(
                f"knee: {knee.time:.3g} {sweep.time_name}, {amount(knee.cost)} {sweep.cost_name}",
                (knee.time, knee.cost), xytext=(8, -16), textcoords="offset points", fontsize=8,
            )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"))
    drawn = [each for points in sweep.curves.values() for each in points]
    axes.set_xlim(0, 1.12 * max((each.time for each in drawn), default=1.0))
    axes.set_ylim(0, 1.12 * max((each.cost for each in drawn), default=1.0))
    axes.set_xlabel(f"{sweep.time_name}; numbers at points: GPUs; a ring: the knee; hollow: neither faster nor cheaper")
    axes.set_ylabel(sweep.cost_name)
    axes.grid(alpha=0.3)
    if any(sweep.curves.values()):
        figure.legend(fontsize=7.5, loc="outside lower center", ncols=4, frameon=False)
    if title:
        axes.set_title(title, loc="left", fontsize=10)
    return figure


def _places(points) -> tuple[list[float], list[float]]:
    return [each.time for each in points], [each.cost for each in points]
