"""A search's result as one HTML page that needs nothing else: tables, the picture, timelines of the best.

The page's style and its script lie beside this file and are written into it, so that it can be sent, and opened from a
disk without a network. Without the script the tables stand there whole.
"""

import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from megatron.planner.planner import Planner
from megatron.planner.search import delay
from megatron.planner.search.expectation import expectation
from megatron.planner.search.outcome import Kept, Outcome
from megatron.planner.search.picture import as_svg, describe, draw_outcome
from megatron.planner.search.report_bars import memory_bars, time_bars
from megatron.planner.search.report_table import configurations_table, reasons_table
from megatron.planner.search.report_timeline import timeline_figures
from megatron.planner.search.space import offer
from megatron.planner.search.table import BESIDE

_STYLE, _SCRIPT = (Path(__file__).with_suffix(suffix) for suffix in (".css", ".js"))
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"  # a page that asks for nothing


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
    """The page.

    Args:
        title: of the page.
        summary: lines that say what was searched.
        notes: what there is to know of what was found; docs/*.md in them are linked.
        docs: where the documentation lies, as a URL; None: not known, and nothing is linked.
        script: the text of the best's script.
        num_timelines: of how many, the best of each order of computations, timelines and bars are drawn.
    """
    memory_gib = planner_of(1).cluster.device.memory_gib
    ranked = outcome.rows
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in summary)]
    if outcome.best is not None:
        parts.append(_best(outcome))
    delayed = delay.sentence(outcome.kept)
    for note in notes:
        anchor = ' id="delay"' if note == delayed else ""  # what rows with delayed weights link to
        parts.append(f'<p class="note"{anchor}>{linked(note, docs)}</p>')
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
    return html_page(title, "\n".join(parts))


def _label(outcome: Outcome, rank: int | None, each: Kept) -> str:
    """Of a bar and a timeline, with its layers where they are not the best's."""
    others = f", {each.layers}" if outcome.best and each.layers != outcome.best.layers else ""
    return f"{BESIDE if rank is None else rank}: {describe(each.choice)}{others}"


def _orders(outcome: Outcome, most: int) -> list[tuple[int | None, Kept]]:
    """The best of each order of computations and weight policy, with its rank; the first that stands beside the ranking
    is among them."""
    found: dict[tuple[str, str], tuple[int | None, Kept]] = {}
    for rank, each in outcome.best_of_schedules():
        preset = offer(each.choice.schedule)
        found.setdefault((preset.order, preset.weights), (rank, each))
    ranked = [row for row in found.values() if row[0] is not None]
    beside = [row for row in found.values() if row[0] is None]
    return [*ranked[: max(most - len(beside[:1]), 0)], *beside][:most]


def html_page(title: str, body: str) -> str:
    """A whole page, which loads nothing, around the elements of its body."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style></head>\n<body>\n{body}\n"
        f"<script>\n{_SCRIPT.read_text(encoding='utf-8')}</script>\n</body>\n</html>\n"
    )


def _best(outcome: Outcome) -> str:
    best = outcome.best
    more = "".join(f" {escape(each[:1].upper() + each[1:])}." for each in expectation(best))
    return (
        f'<p class="best">The {outcome.superlative}: <b>{escape(describe(best.choice))}</b>, '
        f"{best.estimate.seconds:.3g} s an iteration, {best.sequences_per_second:.3g} sequences/s, "
        f"{best.memory_gib:.1f} GiB on the fullest GPU.{more}</p>"
    )


def linked(note: str, docs: str | None) -> str:
    """A note as a sentence of the page; with `docs`, where the documentation lies, pages in it are links."""
    text = f"{escape(note[:1].upper() + note[1:])}."
    return text if docs is None else re.sub(r"docs/([\w/]+\.md)", rf'<a href="{escape(docs)}/\1">docs/\1</a>', text)
