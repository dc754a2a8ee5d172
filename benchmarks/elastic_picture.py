"""A run with all parts on as a picture: p, d and frozen layers as steps, over predicted and measured samples/s."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.elastic_plan import Phase, Setting, seconds_of
from megatron.documents.picture import new_figure, save

_COLOURS = {"predicted": "#3873b8", "measured": "#c8102e", "p": "#8457ae", "d": "#3d9140", "frozen": "#e58a00"}
_SAMPLES = 400
"""Samples in a batch, the paper's."""


def draw(rows: Sequence[dict], phases: Sequence[Phase], setting: Setting, path: Path) -> None:
    """`rows`: of the phases, as `elastic_tables` has them. Time is what was measured, else what is predicted."""
    begin, spans = 0.0, []
    for row, phase in zip(rows, phases, strict=True):
        transition = row.get("measured_transition", phase.transition)
        seconds = row.get("measured_seconds", seconds_of(phase, setting))
        spans.append((begin, begin + transition, begin + seconds))
        begin += seconds
    figure = new_figure(9, 5, layout="constrained")
    measured = "measured_batch" in rows[0]
    figure.suptitle("Layers freeze, the pipeline shrinks, replicas are added", fontsize=11)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    for axes in (above, below):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        for start, end, _ in spans:
            axes.axvspan(start, end, color="#d9d9d9", linewidth=0)
    for name, label in (("p", "pipeline ranks p"), ("d", "replicas d"), ("frozen", "frozen layers")):
        _steps(above, spans, [row[name] for row in rows], color=_COLOURS[name], linewidth=1.6, label=label)
    above.set_ylabel("number", fontsize=8.5)
    above.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _steps(below, spans, [_SAMPLES / row["batch"] for row in rows], color=_COLOURS["predicted"], linewidth=2.2,
           label="predicted")  # fmt: skip
    if measured:
        _steps(below, spans, [_SAMPLES / row["measured_batch"] for row in rows], color=_COLOURS["measured"],
               linewidth=1.0, linestyle="--", label="measured")  # fmt: skip
    below.set_ylim(bottom=0)
    below.set_ylabel(f"samples/s, batches of {_SAMPLES}", fontsize=8.5)
    below.set_xlabel(f"seconds, intervals of {setting.batches} batches; transitions are grey", fontsize=8.5)
    below.legend(fontsize=7.5, frameon=False, loc="upper left")
    save(figure, path, dpi=110)


def _steps(axes, spans: Sequence[tuple[float, float, float]], values: Sequence[float], **style) -> None:
    """A level for each phase, with nothing in a transition."""
    xs, ys = [], []
    for (_, begin, end), value in zip(spans, values, strict=True):
        xs += [begin, end, end]
        ys += [value, value, float("nan")]
    axes.plot(xs, ys, **style)
