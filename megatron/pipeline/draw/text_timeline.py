"""A timeline as lines of text, for a terminal, a log or a message.

One line per pipeline rank and one character grid for all: the shortest computation gets just enough characters for
its label, all others in proportion. With colours (a terminal), forwards are blue and backwards green; without (a
pipe), the letter of the kind says so:

    stage 0 |F0|F1|B0---|   |B1---|#F2
    stage 1 |   F0|B0---|F1|B1---|

`#` instead of `|` before a cell: an optimizer step stands there. Dots are bubbles. Lines that are too long go on in
further blocks. A rank that moves saved activations to its pair has a second line, with `>1` where the eviction of
microbatch 1 begins and `<1` where its load does, and dashes until either is complete:

    stage 0 |F0|F1|F2|F3..................|B0---|F4|B1---
      moves       >1 >3                         <1

One that predicts its weights has `~2` there where the prediction of version 2 begins, and dashes while it takes time:

    stage 0 |F0|F1......|B0---|F2|B1---|F3|B2---#..|B3---#
    weights                   ~1                ~2

One whose weights live on the host has a line for each lane that takes time, with the stage that it is about:

    rank 0           ......|0F0|0F1|1F0|1B0---
    host to device   |0----|1----
"""

import math

from rich.style import Style
from rich.text import Text

from megatron.pipeline.draw.cells import Cell, Update, cells_of, names_of_rows, predictions_of, steps_of
from megatron.pipeline.draw.host import LANES, Carried, carried_of, extent
from megatron.pipeline.program.instruction import OWN_MOVES
from megatron.pipeline.simulate.timeline import Timeline

_COLOURS = {  # by a word's colour; weight versions take them in turn
    "blue": ("blue", "dodger_blue2", "deep_sky_blue4", "slate_blue1"),
    "green": ("green4", "green", "dark_green", "chartreuse4"),
    "olive": ("dark_cyan", "light_sea_green", "dark_turquoise", "turquoise4"),
    "purple": ("purple", "magenta", "dark_violet", "medium_orchid"),
    "grey": ("grey37", "grey50", "grey30", "grey58"),
}
_MOVES, _WEIGHTS = "moves", "weights"
_FURTHER = (_MOVES, _WEIGHTS, *(lane.value for lane in LANES))  # the heads of a rank's further lines
_MOVE_SIGNS = {-1: (">", "red"), +1: ("<", "blue")}  # by what the move does to what the rank saves
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
    first, last = extent(timeline)
    timeline = timeline.shifted(-first)
    cells, steps, predictions = cells_of(timeline), steps_of(timeline), predictions_of(timeline)
    stages = {rank: timeline.stages_of(rank) for rank in range(timeline.num_ranks)}
    labels = [_label(cell, one_based=one_based, versions=versions, stage=len(stages[cell.rank]) > 1) for cell in cells]
    lengths = [cell.end - cell.start for cell in cells if cell.end > cell.start]
    scale = (max(map(len, labels), default=1) + 1) / min(lengths, default=1.0)
    length = (last - first) * scale  # infinite where the shortest computation is next to nothing
    if length > _LONGEST:
        size = f"{length:.3g}" if math.isfinite(length) else "more than 1e308"
        raise ValueError(f"as text this timeline is {size} characters long; draw fewer batches, or a picture")
    total = round(length) + 1
    rows = [_Row(total) for _ in range(timeline.num_ranks)]
    for cell, label in zip(cells, labels, strict=True):
        first, last = (round(time * scale) for time in (cell.start, cell.end))
        rows[cell.rank].put(first, last, label, _style(cell))
    for step in steps:
        rows[step.rank].mark(round(step.end * scale))
    carried = carried_of(timeline)
    lines: list[tuple[str, _Row]] = []
    for rank, name in enumerate(names_of_rows(timeline)):
        lines.append((name, rows[rank]))
        moves = _moves(timeline, rank, scale, total, one_based=one_based)
        if moves is not None:
            lines.append((_MOVES, moves))
        predicted = [each for each in predictions if each.rank == rank]
        if predicted:
            lines.append((_WEIGHTS, _predictions(predicted, scale, total)))
        for lane in LANES:
            found = [each for each in carried if each.rank == rank and each.lane is lane]
            if found:
                lines.append((lane.value, _carried(found, scale, total)))
    return _blocks(lines, total, width)


def _moves(timeline: Timeline, rank: int, scale: float, total: int, *, one_based: bool) -> "_Row | None":
    """The evictions and loads of a rank; None where it has none."""
    found = zip(timeline.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    found = [span for span in found if span[0].kind in OWN_MOVES]
    if not found:
        return None
    line, free = _Row(total, blank=" "), 0
    several = len(timeline.stages_of(rank)) > 1
    for instruction, start, end in found:
        first, last = (round(time * scale) for time in (start, end))
        sign, colour = _MOVE_SIGNS[instruction.kind.row.saved]
        label = f"{sign}{f'{instruction.stage}:' if several else ''}{instruction.microbatch + one_based}"
        first = max(first, free)  # one that takes no time, behind the one before it
        free = max(last, first + len(label) + 1)
        line.write(first, label.ljust(last - first, "-"), Style(color=colour, bold=True))
    return line


def _predictions(predictions: list[Update], scale: float, total: int) -> "_Row":
    """The predictions of a rank's weights."""
    line = _Row(total + max(len(str(each.version)) for each in predictions), blank=" ")
    for each in predictions:
        first, last = (round(time * scale) for time in (each.start, each.end))
        line.write(first, f"~{each.version}".ljust(last - first, "-"), Style(color="dark_cyan", bold=True))
    return line


def _carried(carried: list[Carried], scale: float, total: int) -> "_Row":
    """The words of a lane."""
    line = _Row(total, blank=" ")
    for each in carried:
        first, last = (round(time * scale) for time in (each.start, each.end))
        line.put(first, last, str(each.instruction.stage), Style(color="blue"))
    return line


class _Row:
    def __init__(self, length: int, blank: str = ".") -> None:
        self.characters = [blank] * length
        self.styles: list[Style | None] = [None] * length

    def put(self, first: int, last: int, label: str, style: Style) -> None:
        """Write a cell: a separator, its label, and dashes up to its end."""
        if last > first:
            self.write(first, ("|" + label).ljust(last - first, "-")[: last - first], style)

    def write(self, first: int, text: str, style: Style) -> None:
        text = text[: len(self.characters) - first]
        self.characters[first : first + len(text)] = text
        self.styles[first : first + len(text)] = [style] * len(text)

    def mark(self, place: int) -> None:
        self.characters[place] = "#"
        self.styles[place] = Style(color="white", bgcolor="red", bold=True)


def _label(cell: Cell, *, one_based: bool, versions: bool, stage: bool) -> str:
    version = f"@{cell.named_version}" if versions and cell.version is not None else ""
    return f"{cell.stage if stage else ''}{cell.kind.value}{cell.microbatch + one_based}{version}"


def _style(cell: Cell) -> Style:
    colours = _COLOURS[cell.kind.row.colour]
    return Style(color="white", bgcolor=colours[(cell.version or 0) % len(colours)], bold=cell.begins_batch)


def _blocks(lines: list[tuple[str, _Row]], total: int, width: int) -> Text:
    margin = max(len(head) for head, _ in lines) + 1
    span = max(20, width - margin)
    text = Text()
    for begin in range(0, total, span):
        if begin:
            text.append("\n")
        for head, row in lines:
            text.append((head.rjust(margin - 1) if head in _FURTHER else head).ljust(margin))
            for place in range(begin, min(begin + span, total)):
                text.append(row.characters[place], row.styles[place])
            text.append("\n")
    return text
