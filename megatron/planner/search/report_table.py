"""The configurations of a search as a table of its page, which sorts and filters it (`report.js`).

All rows are there, however many: cells and rows have no end tags, which HTML does not ask for, so that a thousand of
them are a fraction of a megabyte.
"""

from collections.abc import Sequence
from html import escape

from megatron.planner.search.delay import is_delayed
from megatron.planner.search.outcome import Kept, Outcome
from megatron.planner.search.table import HEADINGS, INTERVAL, TEXTS, cells, reasons, says

_WORDS = {"gain, %": "over the best of the ranking, beside which it stands",
          "layers": "whose they are, TE: Transformer Engine's, local: megatron.core's own; and which attention",
          "t": "tensor parallel ranks", "p": "pipeline ranks", "d": "replicas",
          "cp": "context parallel ranks", "ep": "expert parallel ranks", "v": "stages on each rank",
          "s/iteration": "~: estimated; the others were simulated", "days": "for all tokens, without a pause",
          INTERVAL: "where so many of the published runs of its kind were; not validated: none was compared",
          "cost": "for all tokens", "cost/M tokens": "for a million tokens",
          "GiB": "memory of the fullest GPU"}  # fmt: skip


def configurations_table(
    outcome: Outcome, rows: Sequence[tuple[int | None, Kept]], *, name: str, filtered: bool = False
) -> str:
    """A row for each of these of `Outcome.rows`. `name`: an id. `filtered`: the page offers a choice of schedules."""
    texts = [cells(each, rank, outcome.gain(each)) for rank, each in rows]
    shown = [index for index, _ in enumerate(HEADINGS) if any(says(index, row[index]) for row in texts)]
    if "notes" not in (HEADINGS[index] for index in shown) and any(_is_delayed(each) for _, each in rows):
        shown.append(HEADINGS.index("notes"))
    head = "".join(f"<th scope=col{_hint(HEADINGS[index])}>{_heading(HEADINGS[index])}" for index in shown)
    lines = []
    for (_, each), row in zip(rows, texts, strict=True):
        written = [_cell(each, HEADINGS[index], row[index]) for index in shown]
        kind = " class=pressure" if each.estimate.under_pressure else ""
        lines.append(f"<tr{kind}>{''.join(written)}")
    kind = "configurations filtered" if filtered else "configurations"
    return (
        f'<div class="wide"><table id="{escape(name)}" class="{kind}">\n'
        f"<thead><tr>{head}</thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody></table></div>"
    )


def reasons_table(outcome: Outcome, most: int) -> str:
    """Why choices were rejected, the commonest kinds first."""
    counted = reasons(outcome.rejected, most)
    rows = "\n".join(f"<tr><td>{count}<td class=notes>{escape(reason)}" for reason, count in counted)
    head = "<thead><tr><th>choices<th class=text>reason</thead>"
    return f'<div class="wide"><table class="reasons">{head}\n<tbody>{rows}</tbody></table></div>'


def _heading(text: str) -> str:
    """It may be broken behind a slash and in its longest word."""
    return escape(text).replace("/", "/<wbr>").replace("microbatch", "micro&shy;batch")


def _hint(heading: str) -> str:
    kind = " class=text" if heading in TEXTS else ""
    return f'{kind} title="{escape(_WORDS[heading])}"' if heading in _WORDS else kind


def _cell(each: Kept, heading: str, text: str) -> str:
    kind = f" class={'notes' if heading == 'notes' else 'text'}" if heading in TEXTS else ""
    written = escape(text)
    if heading == "notes" and _is_delayed(each):
        written = '<a href="#delay">delayed weights</a>' + f"; {written}" * bool(written)
    return f"<td{kind}>{written}"


def _is_delayed(each: Kept) -> bool:
    return is_delayed(each.choice.schedule, each.estimate.configuration)
