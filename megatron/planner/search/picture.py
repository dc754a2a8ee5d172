"""Throughput against memory: a point for each configuration that fits."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from megatron.planner.job.devices import BORDERLINE
from megatron.planner.search.offers import offered
from megatron.planner.search.outcome import Choice, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_outcome(outcome: Outcome, *, memory_gib: float, title: str = "") -> Figure:
    """A colour for each schedule; the Pareto front is a line, the best is named, and crosses are under pressure.

    `memory_gib`: of a GPU. Collections of points have the schedules as gids, the front "pareto".
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, schedule in enumerate(offered()):
        for pressed, marker in ((False, "o"), (True, "x")):
            points = [
                (each.memory_gib, each.sequences_per_second)
                for each in outcome.kept
                if each.choice.schedule == schedule and each.estimate.under_pressure is pressed
            ]
            if points:
                label = f"{schedule}, may be slower" if pressed else schedule
                drawn = axes.scatter(
                    *zip(*points, strict=True), s=22, marker=marker, color=f"C{index}", label=label, alpha=0.75
                )
                drawn.set_gid(f"{schedule}{'!' * pressed}")
    front = outcome.pareto_front()
    if front:
        (line,) = axes.step(
            [each.memory_gib for each in front], [each.sequences_per_second for each in front], where="pre",
            color="black", linewidth=1, label="Pareto front",
        )  # fmt: skip
        line.set_gid("pareto")
    axes.axvspan((1 - BORDERLINE) * memory_gib, memory_gib, color="#f4d9b0", alpha=0.5, linewidth=0)
    axes.axvline(memory_gib, color="#b03030", linewidth=1)
    if outcome.best:
        axes.annotate(
            describe(outcome.best.choice), (outcome.best.memory_gib, outcome.best.sequences_per_second),
            xytext=(-6, 8), textcoords="offset points", fontsize=8, ha="right",
        )  # fmt: skip
    axes.set_xlabel(f"memory of the fullest GPU, GiB (of {memory_gib:g}; shaded: the last {BORDERLINE:.0%})")
    axes.set_ylabel("sequences per second")
    axes.set_ylim(0, 1.12 * max((each.sequences_per_second for each in outcome.kept), default=1.0))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7.5, loc="lower left", ncols=2)
    if title:
        axes.set_title(title, loc="left", fontsize=10)
    return figure


def describe(choice: Choice) -> str:
    """A configuration in few words."""
    parts = [choice.schedule, f"t={choice.tensor}", f"p={choice.pipeline}", f"d={choice.data}"]
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


def as_svg(figure: Figure, *, salt: str) -> str:
    """An element for a page: without a head, with text as text. `salt`: makes its ids its own among those of a page."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = stream.getvalue()
    return text[text.index("<svg") :]
