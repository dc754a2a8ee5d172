"""Throughput against memory: a point for each configuration that fits."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from megatron.planner.job.estimate import LOST
from megatron.planner.search.outcome import Choice, Outcome
from megatron.planner.search.space import offered

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_outcome(outcome: Outcome, *, memory_gib: float, title: str = "") -> Figure:
    """A colour for each schedule, hollow beside the ranking; the Pareto front is a line, the best is ringed, and
    crosses are under pressure.

    The legend, which names the best, stands below the axes, so that it hides no point. `memory_gib`: of a GPU.
    Collections of points have the schedules as gids, the front "pareto".
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9, 5.6), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    pairs = matplotlib.color_sequences["tab20"]
    colours = [*pairs[::2], *pairs[1::2]]
    entries = []
    for index, schedule in enumerate(offered()):
        colour = colours[index % len(colours)]
        if any(each.choice.schedule == schedule for each in outcome.kept):
            hollow = {"markerfacecolor": "none", "label": f"{schedule} (delays weights)"}
            words = hollow if schedule in outcome.unasked else {"label": schedule}
            entries.append(Line2D([], [], linestyle="none", marker="o", markersize=5, color=colour, **words))
        for pressed, marker in ((False, "o"), (True, "x")):
            points = [
                (each.memory_gib, each.sequences_per_second)
                for each in outcome.kept
                if each.choice.schedule == schedule and each.estimate.under_pressure is pressed
            ]
            if points:
                is_hollow = schedule in outcome.unasked and not pressed
                ink = {"edgecolors": colour, "facecolors": "none"} if is_hollow else {"color": colour}
                drawn = axes.scatter(*zip(*points, strict=True), s=22, marker=marker, alpha=0.75, **ink)
                drawn.set_gid(f"{schedule}{'!' * pressed}")
    front = outcome.pareto_front()
    if front:
        (line,) = axes.step(
            [each.memory_gib for each in front], [each.sequences_per_second for each in front], where="pre",
            color="black", linewidth=1, label="Pareto front",
        )  # fmt: skip
        line.set_gid("pareto")
        entries.append(line)
    if any(each.estimate.under_pressure for each in outcome.kept):
        cross = {"linestyle": "none", "marker": "x", "markersize": 5, "color": "black"}
        entries.append(Line2D([], [], label="slowed for want of memory", **cross))
    axes.axvspan((1 - LOST) * memory_gib, memory_gib, color="#e8a33d", alpha=0.2, linewidth=0, zorder=0)
    axes.axvline(memory_gib, color="#b03030", linewidth=1)
    if outcome.best:
        entries += axes.plot(
            outcome.best.memory_gib, outcome.best.sequences_per_second, linestyle="none", marker="o", markersize=10,
            markerfacecolor="none", color="black", gid="best",
            label=f"the {outcome.superlative}: {describe(outcome.best.choice)}",
        )  # fmt: skip
    axes.set_xlabel(f"memory of the fullest GPU, GiB (of {memory_gib:g}; shaded: the last {LOST:.0%})")
    axes.set_ylabel("sequences per second")
    axes.set_ylim(0, 1.12 * max((each.sequences_per_second for each in outcome.kept), default=1.0))
    axes.grid(alpha=0.3)
    if entries:
        figure.legend(handles=entries, fontsize=7.5, loc="outside lower center", ncols=3, frameon=False)
    if title:
        axes.set_title(title, loc="left", fontsize=10)
    return figure


def describe(choice: Choice) -> str:
    """A configuration in few words."""
    buffers = " with one gradient buffer" if choice.single_gradient_buffer else ""
    parts = [choice.schedule + buffers, f"t={choice.tensor}", f"p={choice.pipeline}", f"d={choice.data}"]
    parts += [f"{name}={size}" for name, size in (("cp", choice.context), ("ep", choice.expert)) if (size or 1) > 1]
    if choice.virtual > 1:
        parts.append(f"v={choice.virtual}")
    parts.append(f"microbatches of {choice.micro_batch_size}")
    if choice.recompute.value != "none":
        parts.append(f"recompute {choice.recompute.value}")
    return ", ".join(parts)


def as_png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=140)
    return stream.getvalue()


def as_svg(figure: Figure, *, salt: str, themed: bool = False) -> str:
    """An element for a page: without a head, with text as text.

    Args:
        salt: makes its ids its own among those of a page.
        themed: on no ground, and black is the colour of the page's text; the page has to fill its texts so.
    """
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(
            stream, format="svg", transparent=themed, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    text = stream.getvalue()
    element = text[text.index("<svg") :]
    return element.replace("#000000", "currentColor") if themed else element
