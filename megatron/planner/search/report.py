"""The HTML pages and the plots of a search and a sweep. A page needs no other file.

The style and the script are files in this folder and are copied into each page, so that a page can be sent to others
and opened without a network. The script sorts and filters tables; without it all rows are shown. Cells and rows have no
end tags, which HTML does not require, so that a thousand rows take a fraction of a megabyte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.documents.picture import as_svg, new_figure
from megatron.planner.job.estimate import LOST
from megatron.planner.planner import Planner
from megatron.planner.search.notes import delay_sentence, is_delayed
from megatron.planner.search.outcome import Kept, Outcome, Sweep, SweepPoint, amount
from megatron.planner.search.report_figures import memory_bars, time_bars, timeline_figures
from megatron.planner.search.space import offer, offered
from megatron.planner.search.table import (
    BESIDE,
    SWEEP_TEXTS,
    Column,
    columns_of,
    describe,
    expectation,
    reasons,
    sweep_rows,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_POINTS = {"linestyle": "none", "marker": "o"}
_HOLLOW = {**_POINTS, "markerfacecolor": "none"}


def draw_outcome(outcome: Outcome, *, memory_gib: float, title: str = "") -> Figure:
    """Plot the throughput of all kept configurations over their memory.

    Each schedule has a colour. Hollow points are not ranked, because they delay weights unasked. Crosses are
    slowed by a shortage of memory, the line is the Pareto front, and the ring marks the best. The legend is below
    the axes, so that it hides no point. The gid of a collection of points is its schedule, followed by "!" for crosses;
    the gid of the front is "pareto", and that of the ring "best".

    `memory_gib`: the memory of one GPU.
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
    """Plot cost over time: a curve for each sequence length, and a point for each number of GPUs.

    Both axes begin at zero. The line is the front, hollow points are dominated by a point of the front, and the ring
    marks the knee, with its time and cost. The gids are "front LENGTH", "beaten LENGTH" and "knee LENGTH".
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
    axes.set_xlabel(f"{sweep.time_name}; numbers at points: GPUs; a ring: the knee; hollow: not on the Pareto front")
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


_STYLE, _SCRIPT = (Path(__file__).with_suffix(suffix) for suffix in (".css", ".js"))
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"  # a page loads nothing


def html_report(
    outcome: Outcome,
    planner_of: Callable[[int], Planner],
    *,
    title: str,
    summary: Sequence[str],
    notes: Sequence[str] = (),
    docs: str | None = None,
    script: str | None = None,
    num_timelines: int = 5,
) -> str:
    """The page of a search, as HTML.

    Args:
        title: the title of the page.
        summary: lines that say what was searched.
        notes: sentences on the result; names of docs/*.md in them become links.
        docs: the URL of the documentation; None: not known, so nothing is linked.
        script: the text of the script that starts the best configuration; None: no script.
        num_timelines: the number of configurations with timelines and bars, the best of each order of computations.
    """
    memory_gib = planner_of(1).cluster.device.memory_gib
    ranked = outcome.rows
    parts = []
    if outcome.best is not None:
        parts.append(_best(outcome))
    delayed = delay_sentence(outcome.kept)
    for note in notes:
        parts.append(_note(note, docs, anchor=' id="delay"' if note == delayed else ""))  # rows link to it
    parts += [f"<h2>The {outcome.superlative} of each schedule</h2>"]
    parts += [configurations_table(outcome, outcome.best_of_schedules(), name="schedules")]
    parts += ["<h2>Throughput against memory</h2>"]
    picture = as_svg(draw_outcome(outcome, memory_gib=memory_gib), salt="outcome", themed=True)
    parts += [f'<div class="wide picture">{picture}</div>']
    looked_at = [
        (_label(outcome, rank, each), each, planner_of(each.choice.tensor))
        for rank, each in _orders(outcome, num_timelines)
    ]
    if looked_at:
        parts += ["<h2>Where an iteration's time goes</h2>", time_bars(looked_at)]
        parts += ["<h2>What takes the memory of the fullest GPU</h2>", memory_bars(looked_at, memory_gib)]
        parts += ["<h2>Timelines on one axis</h2>", f'<div class="wide timelines">{timeline_figures(looked_at)}</div>']
    if script is not None:
        parts += ["<h2>A script for the best</h2>", f'<div class="wide"><pre>{escape(script)}</pre></div>']
    parts += [f"<h2>All {len(ranked)} that fit</h2>", configurations_table(outcome, ranked, name="all", filtered=True)]
    parts += [f"<h2>Why {len(outcome.rejected)} choices were rejected</h2>", reasons_table(outcome, 40)]
    return _page(title, summary, parts)


def sweep_page(
    sweep: Sweep, *, title: str, summary: Sequence[str], notes: Sequence[str] = (), docs: str | None = None
) -> str:
    """The page of a sweep, as HTML. The arguments are those of `html_report`."""
    names, rows = sweep_rows(sweep)
    kinds = {name: " class=text" for name in SWEEP_TEXTS}
    parts = [_note(note, docs) for note in notes]
    parts += [f"<h2>Time against cost: {escape(sweep.time_name)}, {escape(sweep.cost_name)}</h2>"]
    parts += [f'<div class="wide picture">{as_svg(draw_sweep(sweep), salt="sweep", themed=True)}</div>']
    lines = ("".join(f"<td{kinds.get(name, '')}>{escape(text)}" for name, text in zip(names, row, strict=True))
             for row in rows)  # fmt: skip
    heads = "".join(f"<th scope=col{kinds.get(name, '')}>{escape(name)}" for name in names)
    parts += ["<h2>The best of each</h2>", _table('id="sweep"', heads, (f"<tr>{line}" for line in lines))]
    return _page(title, summary, parts)


def _label(outcome: Outcome, rank: int | None, each: Kept) -> str:
    """The label of a bar and a timeline. It names the layers if they differ from those of the best configuration."""
    others = f", {each.layers}" if outcome.best and each.layers != outcome.best.layers else ""
    return f"{BESIDE if rank is None else rank}: {describe(each.choice)}{others}"


def _orders(outcome: Outcome, most: int) -> list[tuple[int | None, Kept]]:
    """The best configurations of each order of computations and weight policy, with their ranks, at most `most`.

    If any are beside the ranking, the first of them is included.
    """
    found: dict[tuple[str, str], tuple[int | None, Kept]] = {}
    for rank, each in outcome.best_of_schedules():
        preset = offer(each.choice.schedule)
        found.setdefault((preset.order, preset.weights), (rank, each))
    ranked = [row for row in found.values() if row[0] is not None]
    beside = [row for row in found.values() if row[0] is None]
    return [*ranked[: max(most - len(beside[:1]), 0)], *beside][:most]


def _best(outcome: Outcome) -> str:
    best = outcome.best
    more = "".join(f" {escape(each[:1].upper() + each[1:])}." for each in expectation(best))
    return (
        f'<p class="best">The {outcome.superlative}: <b>{escape(describe(best.choice))}</b>, '
        f"{best.estimate.seconds:.3g} s an iteration, {best.sequences_per_second:.3g} sequences/s, "
        f"{best.memory_gib:.1f} GiB on the fullest GPU.{more}</p>"
    )


def configurations_table(
    outcome: Outcome, rows: Sequence[tuple[int | None, Kept]], *, name: str, filtered: bool = False
) -> str:
    """The HTML table of the given rows of `Outcome.rows`.

    Args:
        name: the id of the table.
        filtered: the page lets the reader filter the rows by schedule.
    """
    wanted = ("notes",) if any(_is_delayed(each) for _, each in rows) else ()
    shown = columns_of(outcome, rows, wanted=wanted)
    head = "".join(f"<th scope=col{_hint(column)}>{_heading(column.heading)}" for column, _ in shown)
    lines = []
    for index, (_, each) in enumerate(rows):
        written = [_cell(each, column, texts[index]) for column, texts in shown]
        kind = " class=pressure" if each.estimate.under_pressure else ""
        lines.append(f"<tr{kind}>{''.join(written)}")
    kind = "configurations filtered" if filtered else "configurations"
    return _table(f'id="{escape(name)}" class="{kind}"', head, lines)


def reasons_table(outcome: Outcome, most: int) -> str:
    """The HTML table of the `most` commonest kinds of reasons for rejection."""
    counted = reasons(outcome.rejected, most)
    rows = (f"<tr><td>{count}<td class=notes>{escape(reason)}" for reason, count in counted)
    return _table('class="reasons"', "<th>choices<th class=text>reason", rows)


def _table(attributes: str, head: str, rows: Iterable[str]) -> str:
    body = "\n".join(rows)
    return f'<div class="wide"><table {attributes}>\n<thead><tr>{head}</thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _heading(text: str) -> str:
    """The HTML of a heading, which may break after a slash and within its longest word."""
    return escape(text).replace("/", "/<wbr>").replace("microbatch", "micro&shy;batch")


def _hint(column: Column) -> str:
    kind = " class=text" if column.is_text else ""
    return f'{kind} title="{escape(column.hint)}"' if column.hint else kind


def _cell(each: Kept, column: Column, text: str) -> str:
    is_notes = column.heading == "notes"
    kind = f" class={'notes' if is_notes else 'text'}" if column.is_text else ""
    written = escape(text)
    if is_notes and _is_delayed(each):
        written = '<a href="#delay">delayed weights</a>' + f"; {written}" * bool(written)
    return f"<td{kind}>{written}"


def _is_delayed(each: Kept) -> bool:
    return is_delayed(each.choice.schedule, each.estimate.configuration)


def _page(title: str, summary: Sequence[str], parts: Iterable[str]) -> str:
    """The HTML of a whole page with the given elements in its body. The page loads no other file."""
    heads = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in summary)]
    body = "\n".join([*heads, *parts])
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style></head>\n<body>\n{body}\n"
        f"<script>\n{_SCRIPT.read_text(encoding='utf-8')}</script>\n</body>\n</html>\n"
    )


def _note(note: str, docs: str | None, anchor: str = "") -> str:
    """The HTML of a note. With `docs`, the URL of the documentation, names of docs/*.md become links."""
    text = f"{escape(note[:1].upper() + note[1:])}."
    if docs is not None:
        text = re.sub(r"docs/([\w/]+\.md)", rf'<a href="{escape(docs)}/\1">docs/\1</a>', text)
    return f'<p class="note"{anchor}>{text}</p>'
