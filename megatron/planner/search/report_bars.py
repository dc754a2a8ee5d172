"""Bars on a search's page: where an iteration's time goes, and what takes the memory, of the few that are looked at.

Each configuration is a row; all rows of a picture share an axis that begins at zero. A part says what it is when the
pointer rests on it, and in a table below for those who have none.
"""

from collections.abc import Sequence
from html import escape

from megatron.pipeline.draw import legend
from megatron.pipeline.draw.page_timeline import round_step
from megatron.planner.planner import Planner
from megatron.planner.search import breakdown
from megatron.planner.search.outcome import Kept

COLOURS = {
    breakdown.FORWARD: "#5b94d3", breakdown.BACKWARD: "#66b35c", breakdown.COMPUTED: "#5b94d3",
    breakdown.RECOMPUTED: "#adc74d", breakdown.UPDATE: legend.STEP, breakdown.REDUCTIONS: legend.REDUCTION,
    breakdown.TRANSFERS: "#8457ae", breakdown.WAITS: "#80808066",
    **legend.MEMORY, "workspace": "#8457ae", "communicators": "#00727a", "step": legend.STEP,
    breakdown.LOST: "#80808066",
}  # fmt: skip
_WIDE, _RIGHT, _ROW, _TOP, _FOOT, _LETTER = 620, 70, 22, 6, 34, 5.8  # pixels


def bars(rows: Sequence[tuple[str, dict[str, float]]], *, name: str, unit: str, most: float | None = None) -> str:
    """A figure of rows, each a label and its parts.

    Args:
        name: what it shows, for readers that do not see it.
        unit: of the numbers.
        most: where the axis ends, with a line; None: behind the longest row.
    """
    left = round(_LETTER * max((len(label) for label, _ in rows), default=0)) + 16
    shown = [part for part in COLOURS if any(parts.get(part, 0.0) > 0 for _, parts in rows)]
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    end = 1.02 * max(most or 0.0, longest)
    scale = _WIDE / end
    height = _TOP + _ROW * len(rows) + _FOOT
    drawn = []
    for index, (label, parts) in enumerate(rows):
        y, x = _TOP + _ROW * index, float(left)
        drawn.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        total = sum(value for part, value in parts.items() if part != breakdown.LOST)
        for part in shown:
            value = parts.get(part, 0.0)
            if value * scale < 0.05:
                continue
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="{_ROW - 5}" fill="{COLOURS[part]}">'
                f"<title>{escape(part)}: {value:.3g} {unit}, {100 * value / total:.1f}%</title></rect>"
            )
            x += value * scale
        drawn.append(f'<text x="{x + 5:.1f}" y="{y + 14}">{total:.3g}</text>')
    foot = _TOP + _ROW * len(rows)
    step = round_step(end / 6)
    for tick in range(int(end / step) + 1):
        x = left + tick * step * scale
        drawn.append(f'<path stroke="currentColor" d="M{x:.1f} {foot}v4"/>')
        drawn.append(f'<text x="{x:.1f}" y="{foot + 16}" text-anchor="middle">{tick * step:g}</text>')
    drawn.append(f'<text x="{left + _WIDE / 2}" y="{foot + 30}" text-anchor="middle">{escape(unit)}</text>')
    if most is not None:
        drawn.append(f'<path stroke="#b03030" d="M{left + most * scale:.1f} {_TOP - 4}V{foot}"/>')
    width = left + _WIDE + _RIGHT
    signs = "".join(
        f'<span class="sign"><i style="background:{COLOURS[part]}"></i>{escape(part)}</span> ' for part in shown
    )
    return (
        f'<figure><div class="wide bars"><svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{escape(name)}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" fill="currentColor">\n{chr(10).join(drawn)}\n</svg></div>'
        f"<figcaption>{signs}</figcaption></figure>"
    )


def time_bars(rows: Sequence[tuple[str, Kept, Planner]]) -> str:
    parts = [(label, breakdown.time_parts(each.estimate, planner)) for label, each, planner in rows]
    return bars(parts, name="where an iteration's time goes", unit="seconds of an iteration")


def memory_bars(rows: Sequence[tuple[str, Kept, Planner]], memory_gib: float) -> str:
    """`memory_gib`: of a GPU, where a line is."""
    parts = [(label, breakdown.memory_parts(each.estimate, memory_gib)) for label, each, _ in rows]
    return bars(parts, name="what takes the memory of the fullest GPU", unit="GiB", most=memory_gib)
