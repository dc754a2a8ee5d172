"""A sweep as one HTML page that needs nothing else: the curve and the table."""

from collections.abc import Sequence
from html import escape

from megatron.planner.search.picture import as_svg
from megatron.planner.search.report import html_page, linked
from megatron.planner.search.sweep import Sweep
from megatron.planner.search.sweep_picture import draw_sweep
from megatron.planner.search.sweep_table import TEXTS, sweep_rows


def sweep_page(
    sweep: Sweep, *, title: str, summary: Sequence[str], notes: Sequence[str] = (), docs: str | None = None
) -> str:
    """The page. The arguments are those of `html_report`."""
    picture = as_svg(draw_sweep(sweep), salt="sweep", themed=True)
    body = [
        f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in summary),
        *(f'<p class="note">{linked(note, docs)}</p>' for note in notes),
        f"<h2>Time against cost: {escape(sweep.time_name)}, {escape(sweep.cost_name)}</h2>",
        f'<div class="wide picture">{picture}</div>',
        "<h2>The best of each</h2>", _table(sweep),
    ]  # fmt: skip
    return html_page(title, "\n".join(body))


def _table(sweep: Sweep) -> str:
    names, rows = sweep_rows(sweep)
    head = "".join(f"<th scope=col{_kind(name)}>{escape(name)}" for name in names)
    lines = ("".join(f"<td{_kind(name)}>{escape(text)}" for name, text in zip(names, row, strict=True)) for row in rows)
    body = "\n".join(f"<tr>{line}" for line in lines)
    return f'<div class="wide"><table id="sweep">\n<thead><tr>{head}</thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _kind(name: str) -> str:
    return " class=text" if name in TEXTS else ""
