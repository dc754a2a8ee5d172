"""Time against cost: a curve for each sequence length, a point for each number of GPUs, and the knees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.planner.search.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_sweep(sweep: Sweep, *, title: str = "") -> Figure:
    """Both axes are logarithmic. The front is a line; hollow points are beaten by one of it; a ring is the knee.

    Lines have gids "front LENGTH", rings "knee LENGTH", and what is beaten "beaten LENGTH".
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

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
            axes.plot(
                *_places([sweep.knees[length]]), linestyle="none", marker="o", markersize=12, markerfacecolor="none",
                color="black", gid=f"knee {length}",
            )  # fmt: skip
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"))
        axis.set_minor_formatter(NullFormatter())
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
