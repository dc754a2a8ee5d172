"""A search's result as one HTML page that needs nothing else: tables, the picture, timelines of the best."""

from collections.abc import Callable, Sequence
from html import escape

from megatron.pipeline.draw import draw_timeline
from megatron.pipeline.simulate import simulate
from megatron.planner.memory.sizes import resized
from megatron.planner.planner import Planner
from megatron.planner.search.outcome import Kept, Outcome
from megatron.planner.search.picture import as_svg, describe, draw_outcome
from megatron.planner.search.table import HEADINGS, cells, reasons

_MANY_CELLS, _MOST_CELLS = 2_000, 8_000  # of a drawing: what can be read, and what can be drawn
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: 2px 9px; text-align: right; }
th { border-bottom: 1px solid #888; vertical-align: bottom; } tr:nth-child(even) td { background: #f5f5f5; }
td.text, th.text { text-align: left; } tr.pressure td { color: #a05a00; }
pre { background: #f5f5f5; padding: 0.8em; overflow-x: auto; } svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
"""


def html_report(
    outcome: Outcome,
    planner_of: Callable[[int], Planner],
    *,
    title: str,
    summary: Sequence[str],
    script: str | None = None,
    num_timelines: int = 3,
    num_rows: int = 100,
) -> str:
    """The page.

    Args:
        title: of the page.
        summary: lines that say what was searched.
        script: the text of the best's script.
        num_timelines: how many of the best are drawn.
        num_rows: of the table of what was kept.
    """
    memory_gib = planner_of(1).cluster.device.memory_gib
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in summary)]
    ranked = list(enumerate(outcome.kept, start=1))
    of_schedules = {id(each) for each in outcome.best_of_schedules()}
    parts += ["<h2>The fastest of each schedule</h2>", _table([row for row in ranked if id(row[1]) in of_schedules])]
    figure = draw_outcome(outcome, memory_gib=memory_gib)
    parts += ["<h2>Throughput against memory</h2>", as_svg(figure, salt="outcome")]
    parts += ["<h2>Timelines of the best</h2>"]
    for rank, each in ranked[:num_timelines]:
        planner = planner_of(each.choice.tensor)
        parts += [f"<h3>{rank}. {escape(describe(each.choice))}</h3>", _timeline(each, planner, f"timeline{rank}")]
    if script is not None:
        parts += ["<h2>A script for the best</h2>", f"<pre>{escape(script)}</pre>"]
    shown = ranked[:num_rows]
    parts += [f"<h2>The fastest {len(shown)} of {len(ranked)} that fit</h2>", _table(shown)]
    parts += [f"<h2>Why {len(outcome.rejected)} choices were rejected</h2>", _reasons(outcome)]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _table(rows: Sequence[tuple[int, Kept]]) -> str:
    text = {"schedule", "recompute", "split optimizer", "rank mapping", "memory", "notes"}
    kinds = [' class="text"' if heading in text else "" for heading in HEADINGS]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(HEADINGS, kinds, strict=True))
    lines = []
    for rank, each in rows:
        row = "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(cells(each, rank), kinds, strict=True))
        kind = ' class="pressure"' if each.estimate.under_pressure else ""
        lines.append(f"<tr{kind}>{row}</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>\n{chr(10).join(lines)}\n</table></div>'


def _reasons(outcome: Outcome) -> str:
    rows = "".join(
        f'<tr><td>{count}</td><td class="text">{escape(reason)}</td></tr>'
        for reason, count in reasons(outcome.rejected, 40)
    )
    return f'<table><tr><th>choices</th><th class="text">reason</th></tr>{rows}</table>'


def _timeline(each: Kept, planner: Planner, salt: str) -> str:
    """The drawing of the first batches, shortened to what can be read."""
    configuration = each.estimate.configuration
    schedule = configuration.pipeline_schedule(tied_embeddings=planner.model.tied_embeddings)
    drains = schedule.weights.drains
    num_batches = 3 * schedule.num_ranks if schedule.weights.updates_alone else 1 + schedule.weights.delay
    cells_of_microbatch = 2 * schedule.num_stages * num_batches
    step = 1 if drains and schedule.num_virtual_stages == 1 else schedule.num_ranks
    size = min(configuration.num_microbatches, max(_MANY_CELLS // cells_of_microbatch // step, 1) * step)
    whole = configuration.num_microbatches
    size = next(each for each in range(size, whole + 1) if resized(schedule, whole, each).runs(each))
    if size * cells_of_microbatch > _MOST_CELLS:
        return f"<p>{schedule.num_stages} stages are too many to draw.</p>"
    program = resized(schedule, whole, size).build((size,) * num_batches)
    layers = planner.layers(configuration)
    timeline = simulate(program, planner.cost_model.costs(configuration, layers))
    shortened = (
        f", with {size} of {configuration.num_microbatches} microbatches"
        if size < configuration.num_microbatches
        else ""
    )
    figure = draw_timeline(
        timeline, title=f"{num_batches} batch{'es' * (num_batches > 1)}{shortened}", time_label="seconds",
        saved_microbatches=any(program.num_evictions),
    )  # fmt: skip
    return as_svg(figure, salt=salt)
