"""Pictures of a search and of a sweep: throughput against memory, and time against cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.documents.picture import new_figure
from megatron.planner.job.estimate import LOST
from megatron.planner.search.bill import amount
from megatron.planner.search.outcome import Outcome
from megatron.planner.search.space import offered
from megatron.planner.search.sweep import Sweep, SweepPoint
from megatron.planner.search.table import describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = {"linestyle": "none", "marker": "o"}
_HOLLOW = {**_POINTS, "markerfacecolor": "none"}


def draw_outcome(outcome: Outcome, *, memory_gib: float, title: str = "") -> Figure:
    """A colour for each schedule, hollow beside the ranking; the Pareto front is a line, the best is ringed, and
    crosses are under pressure.

    The legend, which names the best, stands below the axes, so that it hides no point. `memory_gib`: of a GPU.
    Collections of points have the schedules as gids, the front "pareto".
    """
    import matplotlib
    from matplotlib.lines import Line2D

    figure, axes = _figure()
    pairs = matplotlib.color_sequences["tab20"]
    colours = [*pairs[::2], *pairs[1::2]]
    entries = []
    for index, schedule in enumerate(offered()):
        colour = colours[index % len(colours)]
        found = [each for each in outcome.kept if each.choice.schedule == schedule]
        is_hollow = schedule in outcome.unasked
        if found:
            label = f"{schedule} (delays weights)" if is_hollow else schedule
            entries.append(Line2D([], [], markersize=5, color=colour, label=label, **_HOLLOW if is_hollow else _POINTS))
        for pressed, marker in ((False, "o"), (True, "x")):
            points = [_place(each) for each in found if each.estimate.under_pressure is pressed]
            if points:
                ink = {"edgecolors": colour, "facecolors": "none"} if is_hollow and not pressed else {"color": colour}
                drawn = axes.scatter(*zip(*points, strict=True), s=22, marker=marker, alpha=0.75, **ink)
                drawn.set_gid(f"{schedule}{'!' * pressed}")
    if front := outcome.pareto_front():
        places = zip(*map(_place, front), strict=True)
        entries += axes.step(*places, where="pre", color="black", linewidth=1, label="Pareto front", gid="pareto")
    if any(each.estimate.under_pressure for each in outcome.kept):
        cross = {"linestyle": "none", "marker": "x", "markersize": 5, "color": "black"}
        entries.append(Line2D([], [], label="slowed for want of memory", **cross))
    axes.axvspan((1 - LOST) * memory_gib, memory_gib, color="#e8a33d", alpha=0.2, linewidth=0, zorder=0)
    axes.axvline(memory_gib, color="#b03030", linewidth=1)
    if outcome.best:
        name = f"the {outcome.superlative}: {describe(outcome.best.choice)}"
        entries += axes.plot(*_place(outcome.best), markersize=10, color="black", gid="best", label=name, **_HOLLOW)
    axes.set_xlabel(f"memory of the fullest GPU, GiB (of {memory_gib:g}; shaded: the last {LOST:.0%})")
    axes.set_ylabel("sequences per second")
    axes.set_ylim(0, 1.12 * max((each.sequences_per_second for each in outcome.kept), default=1.0))
    _finish(figure, axes, entries, title, num_columns=3)
    return figure


def draw_sweep(sweep: Sweep, *, title: str = "") -> Figure:
    """A curve for each sequence length, a point for each number of GPUs; both axes begin at zero. The front is a line;
    hollow points are beaten by one of it; a ring is the knee, with its time and its cost.

    Lines have gids "front LENGTH", rings "knee LENGTH", and what is beaten "beaten LENGTH".
    """
    import matplotlib
    from matplotlib.ticker import FuncFormatter

    figure, axes = _figure()
    colours = matplotlib.color_sequences["tab10"]
    entries = []
    for index, (length, points) in enumerate(sweep.curves.items()):
        if not points:
            continue
        colour, front = colours[index % len(colours)], sweep.fronts[length]
        line = {"marker": "o", "markersize": 5, "label": f"sequences of {length}", "gid": f"front {length}"}
        entries += axes.plot(*_places(front), color=colour, **line)
        beaten = [each for each in points if each not in front]
        if beaten:
            axes.plot(*_places(beaten), markersize=5, color=colour, gid=f"beaten {length}", **_HOLLOW)
        near = {"textcoords": "offset points", "fontsize": 8}
        for each in points:
            axes.annotate(str(each.num_gpus), (each.time, each.cost), xytext=(5, 5), **near)
        if knee := sweep.knees.get(length):
            axes.plot(*_places([knee]), markersize=12, color="black", gid=f"knee {length}", **_HOLLOW)
            text = f"knee: {knee.time:.3g} {sweep.time_name}, {amount(knee.cost)} {sweep.cost_name}"
            axes.annotate(text, (knee.time, knee.cost), xytext=(8, -16), **near)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"))
    drawn = [each for points in sweep.curves.values() for each in points]
    axes.set_xlim(0, 1.12 * max((each.time for each in drawn), default=1.0))
    axes.set_ylim(0, 1.12 * max((each.cost for each in drawn), default=1.0))
    axes.set_xlabel(f"{sweep.time_name}; numbers at points: GPUs; a ring: the knee; hollow: neither faster nor cheaper")
    axes.set_ylabel(sweep.cost_name)
    _finish(figure, axes, entries, title, num_columns=4)
    return figure


def _place(each) -> tuple[float, float]:
    return each.memory_gib, each.sequences_per_second


def _places(points: Sequence[SweepPoint]) -> tuple[list[float], list[float]]:
    return [each.time for each in points], [each.cost for each in points]


def _figure() -> tuple[Figure, Axes]:
    figure = new_figure(9, 5.6, layout="constrained")
    return figure, figure.add_subplot()


def _finish(figure: Figure, axes: Axes, entries: list, title: str, *, num_columns: int) -> None:
    axes.grid(alpha=0.3)
    if entries:
        figure.legend(handles=entries, fontsize=7.5, loc="outside lower center", ncols=num_columns, frameon=False)
    if title:
        axes.set_title(title, loc="left", fontsize=10)
