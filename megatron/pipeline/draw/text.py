"""A timeline as lines of text, for a terminal, a log or a message.

One line per pipeline rank and one character grid for all: the shortest computation gets just enough characters for
its label, all others in proportion. With colours (a terminal), forwards are blue and backwards green; without (a
pipe), the letter of the kind says so:

    stage 0 |F0|F1|B0---|   |B1---|#F2
    stage 1 |   F0|B0---|F1|B1---|

`#` instead of `|` before a cell: an optimizer step stands there. Dots are bubbles. Lines that are too long go on in
    further blocks.
"""

from rich.style import Style
from rich.text import Text

from megatron.pipeline.draw.cells import Cell, cells_of, steps_of
from megatron.pipeline.instruction import Kind
from megatron.pipeline.timeline import Timeline

_COLOURS = {
    Kind.FORWARD: ("blue", "dodger_blue2"),
    Kind.BACKWARD: ("green4", "green"),
    Kind.BACKWARD_INPUT: ("green4", "green"),
    Kind.BACKWARD_WEIGHT: ("dark_cyan", "cyan4"),
    Kind.RECOMPUTE: ("purple", "magenta"),
}
_LONGEST = 20_000  # characters of a line before it is cut into blocks; a longer drawing helps nobody


def timeline_text(timeline: Timeline, *, width: int = 120, one_based: bool = False, versions: bool = False) -> Text:
    """Draw a timeline as styled text; `.plain` is the same without colours.

    Args:
        timeline: simulated or measured.
        width: characters of a line of the terminal.
        one_based: number microbatches from 1.
        versions: write the weight version behind each microbatch, as in F5@1.

    Raises:
        ValueError: the timeline is too long for its shortest computation to be legible.
    """
    cells, steps = cells_of(timeline), steps_of(timeline)
    stages = {rank: timeline.stages_of(rank) for rank in range(timeline.num_ranks)}
    labels = [_label(cell, one_based=one_based, versions=versions, stage=len(stages[cell.rank]) > 1) for cell in cells]
    lengths = [cell.end - cell.start for cell in cells if cell.end > cell.start]
    scale = (max(map(len, labels), default=1) + 1) / min(lengths, default=1.0)
    total = round(timeline.makespan * scale) + 1
    if total > _LONGEST:
        raise ValueError(f"as text this timeline is {total} characters long; draw fewer batches, or a picture")
    rows = [_Row(total) for _ in range(timeline.num_ranks)]
    for cell, label in zip(cells, labels, strict=True):
        first, last = (round((time - timeline.start) * scale) for time in (cell.start, cell.end))
        rows[cell.rank].put(first, last, label, _style(cell))
    for step in steps:
        rows[step.rank].mark(round((step.end - timeline.start) * scale))
    heads = [
        ("stage " if len(owned) == 1 else "rank ") + (str(owned[0]) if len(owned) == 1 else str(rank))
        for rank, owned in stages.items()
    ]
    return _blocks(heads, rows, total, width)


class _Row:
    def __init__(self, length: int) -> None:
        self.characters = ["."] * length
        self.styles: list[Style | None] = [None] * length

    def put(self, first: int, last: int, label: str, style: Style) -> None:
        """Write a cell: a separator, its label, and dashes up to its end."""
        if last > first:
            self.characters[first:last] = ("|" + label).ljust(last - first, "-")[: last - first]
            self.styles[first:last] = [style] * (last - first)

    def mark(self, place: int) -> None:
        self.characters[place] = "#"
        self.styles[place] = Style(color="white", bgcolor="red", bold=True)


def _label(cell: Cell, *, one_based: bool, versions: bool, stage: bool) -> str:
    version = f"@{cell.version}" if versions and cell.version is not None else ""
    return f"{cell.stage if stage else ''}{cell.kind.value}{cell.microbatch + one_based}{version}"


def _style(cell: Cell) -> Style:
    return Style(color="white", bgcolor=_COLOURS[cell.kind][(cell.version or 0) % 2], bold=cell.begins_batch)


def _blocks(heads: list[str], rows: list[_Row], total: int, width: int) -> Text:
    margin = max(map(len, heads)) + 1
    span = max(20, width - margin)
    text = Text()
    for begin in range(0, total, span):
        if begin:
            text.append("\n")
        for head, row in zip(heads, rows, strict=True):
            text.append(head.ljust(margin))
            for place in range(begin, min(begin + span, total)):
                text.append(row.characters[place], row.styles[place])
            text.append("\n")
    return text
