"""A timeline as lines of text, for a terminal, a log or a message.

Each pipeline rank has one line, on a common grid of characters: the shortest computation gets just enough characters
for its label, and all others are in proportion. In a terminal, forwards are blue and backwards green; in a pipe, which
has no colours, the letter of a cell shows its kind:

    stage 0 |F0|F1|B0---|   |B1---|#F2
    stage 1 |   F0|B0---|F1|B1---|

A `#` instead of `|` before a cell is an optimizer step. Dots are bubbles. Lines that are too long continue in further
blocks. A rank that moves saved activations to its pair has a second line, with `>1` where the eviction of microbatch 1
begins, `<1` where its load begins, and dashes until the move is complete:

    stage 0 |F0|F1|F2|F3..................|B0---|F4|B1---
      moves       >1 >3                         <1

A rank that predicts its weights has a second line with `~2` where the prediction of version 2 begins, and dashes until
its end:

    stage 0 |F0|F1......|B0---|F2|B1---|F3|B2---#..|B3---#
    weights                   ~1                ~2

A rank whose weights live on the host has a line for each lane that takes time, with the stages of its words:

    rank 0           ......|0F0|0F1|1F0|1B0---
    host to device   |0----|1----
"""

import math

from rich.style import Style
from rich.text import Text

from megatron.pipeline.draw.colours import terminal_colour_of
from megatron.pipeline.draw.scene import AT_END, HOST_LANES, Cell, Scene, extent, names_of_rows
from megatron.pipeline.program.instruction import OWN_MOVES
from megatron.pipeline.simulate.timeline import Span, Timeline

_MOVES, _WEIGHTS = "moves", "weights"
_FURTHER = (_MOVES, _WEIGHTS, *(lane.value for lane in HOST_LANES))  # the names of a rank's further lines
_LONGEST = 20_000  # characters of a line before it is cut into blocks; a longer text is not readable


def timeline_text(timeline: Timeline, *, width: int = 120, one_based: bool = False, versions: bool = False) -> Text:
    """Draw a timeline as styled text; `.plain` is the same without colours.

    Args:
        timeline: simulated or measured.
        width: characters of a line of the terminal.
        one_based: number microbatches from 1.
        versions: write the weight version after each microbatch, as in F5@1.

    Raises:
        ValueError: if the text would be too long, because the shortest computation is too short.
    """
    first, last = extent(timeline)
    scene = Scene(timeline.shifted(-first))
    of_model = {stage: copy.stage for stage, copy in enumerate(timeline.copies)}
    several = [len(timeline.stages_of(rank)) > 1 for rank in range(timeline.num_ranks)]

    def label(cell: Cell) -> str:
        word, version = cell.instruction, f"@{cell.named_version}" if versions and cell.named_version else ""
        stage = of_model.get(word.stage, word.stage) if several[cell.rank] else ""
        return f"{stage}{word.kind.value}{word.microbatch + one_based}{version}"

    labels = [label(cell) for cell in scene.cells]
    lengths = [cell.end - cell.start for cell in scene.cells if cell.end > cell.start]
    scale = (max(map(len, labels), default=1) + 1) / min(lengths, default=1.0)
    length = (last - first) * scale  # infinite if the shortest computation takes almost no time
    if length > _LONGEST:
        size = f"{length:.3g}" if math.isfinite(length) else "more than 1e308"
        raise ValueError(f"as text this timeline is {size} characters long; draw fewer batches, or a picture")
    total = round(length) + 1
    rows = [_Row(total) for _ in several]
    for cell, text in zip(scene.cells, labels, strict=True):
        colour = terminal_colour_of(cell.instruction.kind, cell.instruction.version or 0)
        style = Style(color="white", bgcolor=colour, bold=cell.begins_batch)
        rows[cell.rank].put(round(cell.start * scale), round(cell.end * scale), text, style)
    further: list[dict[str, _Row]] = [{} for _ in several]
    updates = [span for marks in scene.marks.values() for span in marks]
    for span in (*scene.moves, *updates, *scene.carried):
        word, colour = span.instruction.kind.row, terminal_colour_of(span.instruction.kind)
        begin, end = round(span.start * scale), round(span.end * scale)
        if word.sign == AT_END:
            rows[span.rank].write(end, AT_END, Style(color="white", bgcolor=colour, bold=True))
        elif (head := _head(span)) in (_MOVES, _WEIGHTS):
            line = further[span.rank].setdefault(head, _Row(total, blank=" "))
            stage = f"{span.instruction.stage}:" if several[span.rank] and head == _MOVES else ""
            number = span.instruction.microbatch + one_based if head == _MOVES else span.instruction.version
            line.push(begin, end, f"{word.sign}{stage}{number}", Style(color=colour, bold=True))
        elif head:
            line = further[span.rank].setdefault(head, _Row(total, blank=" "))
            line.put(begin, end, str(span.instruction.stage), Style(color=colour))
    lines: list[tuple[str, _Row]] = []
    for name, row, more in zip(names_of_rows(timeline), rows, further, strict=True):
        lines += [(name, row), *((head, more[head]) for head in _FURTHER if head in more)]
    return _blocks(lines, total, width)


def _head(span: Span) -> str:
    """The name of the line below its rank's row that shows a word; "" for an update without a sign."""
    kind = span.instruction.kind
    if kind in OWN_MOVES:
        return _MOVES
    return kind.row.lane.value if kind.row.lane in HOST_LANES else _WEIGHTS if kind.row.sign else ""


class _Row:
    """The characters of a line, and the styles of parts of it."""

    def __init__(self, length: int, blank: str = ".") -> None:
        self.characters = [blank] * length
        self.styles: list[tuple[Style, int, int]] = []
        self.free = 0

    def put(self, first: int, last: int, label: str, style: Style) -> None:
        """Write a cell: a separator, the label, and dashes up to its end."""
        if last > first:
            self.write(first, ("|" + label).ljust(last - first, "-")[: last - first], style)

    def push(self, first: int, last: int, label: str, style: Style) -> None:
        """Write a complete label, and dashes up to `last`; if the earlier label is in the way, write after it."""
        first = max(first, self.free)
        self.free = max(last, first + len(label) + 1)
        self.write(first, label.ljust(last - first, "-"), style)

    def write(self, first: int, text: str, style: Style) -> None:
        text = text[: max(len(self.characters) - first, 0)]
        self.characters[first : first + len(text)] = text
        self.styles.append((style, first, first + len(text)))

    def text(self) -> Text:
        text = Text("".join(self.characters))
        for style in self.styles:
            text.stylize(*style)
        return text


def _blocks(lines: list[tuple[str, _Row]], total: int, width: int) -> Text:
    margin = max(len(head) for head, _ in lines) + 1
    span = max(20, width - margin)
    heads = [(head.rjust(margin - 1) if head in _FURTHER else head).ljust(margin) for head, _ in lines]
    cut = [row.text().divide(range(span, total, span)) for _, row in lines]
    blocks = ([part for head, block in zip(heads, parts, strict=True) for part in (Text(head), block, Text("\n"))]
              for parts in zip(*cut, strict=True))  # fmt: skip
    return Text("\n").join(Text().join(block) for block in blocks)
