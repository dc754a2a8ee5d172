"""A timeline as a small SVG for an HTML page: thousands of computations in a few kilobytes, for light and dark pages.

A picture that has an element for each box and each number would have megabytes. Here all boxes of one colour are one
path, whose strokes are as thick as a row is high. Neighbours of one colour that are too narrow to be distinguished are
one stroke. Numbers, moves and rows are drawn if there is room; `left_out` names the parts that are not drawn. Text and
axes have the colour of the page's text.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from megatron.pipeline.draw import colours
from megatron.pipeline.draw.scene import AT_END, Cell, Scene, Sign, names_of_rows, signs_of
from megatron.pipeline.program.instruction import OWN_MOVES, Kind
from megatron.pipeline.simulate.timeline import Span, Timeline

MOST_ROWS = 64
_MOST_NUMBERS, _MOST_MOVES, _MOST_HOVERED = 4_000, 600, 4_000
_NARROWEST, _WIDEST = 640, 3_600  # pixels between the margins
_CELL = 13  # least width in pixels of all but the shortest computations, if the picture may be so wide
_UNIT = 4  # units of a pixel: coordinates are whole numbers
_LEFT, _RIGHT, _TOP, _FOOT = 64, 78, 28, 34  # pixels
_ALONE = 2.0  # least width in pixels of a box that is not merged with its neighbour
_DIGIT = 5.4  # pixels
_MARK = 2.0  # least width of a mark in pixels
_BUBBLE = "#80808040"  # visible on light and dark pages


@dataclass(frozen=True)
class PageTimeline:
    """A drawn timeline for a page.

    Attributes:
        svg: the SVG element.
        signs: the entries of its legend.
        left_out: a clause for each part that is not drawn.
    """

    svg: str
    signs: tuple[Sign, ...]
    left_out: tuple[str, ...]


def page_timeline(
    timeline: Timeline,
    *,
    name: str,
    window: tuple[float, float] | None = None,
    scale: float | None = None,
    hovers: bool = False,
) -> PageTimeline:
    """Draw a timeline as an SVG.

    Args:
        name: a description for screen readers.
        window: start and end of the drawn time; the axis is zero at the start. None: from the first computation to the
            last.
        scale: pixels per unit of time, for several pictures on one scale; None: `legible_scale`.
        hovers: add the data from which the page's script describes the computation under the pointer, about ten bytes
            for each computation.

    Raises:
        ValueError: if no computation takes time.
    """
    start, end = window or (timeline.start, timeline.end)
    if not end > start:
        raise ValueError("there is nothing to draw; give a timeline in which a computation takes time")
    drawing = _Drawing(timeline.shifted(-start), end - start, scale)
    parts = [*drawing.boxes(), *drawing.moves(), *drawing.marks(), *drawing.borders(), *drawing.numbers()]
    parts += [*drawing.axis("seconds"), *drawing.rows()]
    width, height = _LEFT + drawing.width + _RIGHT, _TOP + drawing.height + _FOOT
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(name)}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width * _UNIT} {height * _UNIT}" font-family="sans-serif" '
        f'fill="currentColor"{drawing.hover() if hovers else ""}>\n{chr(10).join(parts)}\n</svg>'
    )
    return PageTimeline(svg, drawing.signs(), tuple(drawing.left_out))


def legible_scale(timeline: Timeline, end: float) -> float:
    """The pixels per unit of time at which all but the shortest computations have room for their microbatch's number.

    It is limited such that a picture of `end` units of time keeps to the smallest and the largest width.
    """
    cells = [cell for cell in Scene(timeline).cells if cell.end > cell.start]
    lengths = sorted(cell.end - cell.start for cell in cells)
    digits = max(len(str(cell.instruction.microbatch)) for cell in cells)
    room = max(_CELL, _DIGIT * digits + 3)
    return min(max(room / lengths[len(lengths) // 10], _NARROWEST / end), _WIDEST / end)


class _Drawing:
    """The drawing of one timeline from 0 to `end`; each method yields the SVG elements of one kind of sign."""

    def __init__(self, timeline: Timeline, end: float, scale: float | None) -> None:
        self.timeline, self.end = timeline, end
        self.left_out: list[str] = []
        self.every = math.ceil(timeline.num_ranks / MOST_ROWS)
        if self.every > 1:
            self.left_out.append(f"{self.every - 1} of every {self.every} rows")
        self.shown = range(0, timeline.num_ranks, self.every)
        self.pitch = 20 if len(self.shown) <= 16 else 14 if len(self.shown) <= 32 else 10
        self.height = self.pitch * len(self.shown)
        self.scene = Scene(timeline, self._is_seen)
        self.draws_moves = 0 < len(self.scene.moves) <= _MOST_MOVES and self.every == 1
        self.width = round((scale or legible_scale(timeline, end)) * self.end)
        self.pixels = self.width / self.end  # per unit of time

    def _is_seen(self, span: Span) -> bool:  # a step may take no time
        return span.rank in self.shown and span.end > 0 and (span.start < self.end or span.end <= self.end)

    def x(self, time: float) -> int:
        """The coordinate of a time, or of the nearer end of the drawn time if it is outside."""
        return round((_LEFT + min(max(time, 0.0), self.end) * self.pixels) * _UNIT)

    def y(self, rank: float) -> int:
        """The coordinate of the middle of a row."""
        return round((_TOP + (rank / self.every + 0.5) * self.pitch) * _UNIT)

    def boxes(self) -> Iterator[str]:
        ends = [(self.x(0.0), self.x(self.end), self.y(rank)) for rank in self.shown]
        yield self._path(ends, colour=_BUBBLE)
        by_colour: dict[str, list[tuple[int, int, int]]] = {}
        for cell, start, end in self._merged():
            apart = _UNIT // 2 if end - start >= 2 * _ALONE * _UNIT else 0
            by_colour.setdefault(cell.colour, []).append((start, end - apart, self.y(cell.rank)))
        for colour, boxes in by_colour.items():
            yield self._path(boxes, colour=colour)
        completing = [(self.x(cell.start), self.x(cell.end), self.y(cell.rank + 0.34 * self.every))
                      for cell in self.scene.cells if cell.completes_batch]  # fmt: skip
        if completing:
            yield self._path(completing, colour=colours.HATCH, thickness=0.16)

    def _merged(self) -> Iterator[tuple[Cell, int, int]]:
        """Yield cells with their first and last coordinates; narrow neighbours of one colour are merged."""
        last: tuple[Cell, int, int] | None = None
        for cell in self.scene.cells:
            start, end = self.x(cell.start), self.x(cell.end)
            if last is not None:
                before, begun, ended = last
                alike = (before.rank, before.colour) == (cell.rank, cell.colour)
                if alike and start - ended <= 1 and end - start < _ALONE * _UNIT:
                    last = before, begun, end
                    continue
                yield last
            last = cell, start, end
        if last is not None:
            yield last

    def _path(self, boxes: Sequence[tuple[int, int, int]], *, colour: str, thickness: float = 0.84) -> str:
        """A path with a stroke for each box. `boxes`: (start, end, height)."""
        text, place = [], (0, 0)
        for start, end, y in boxes:
            text.append(f"m{start - place[0]} {y - place[1]}h{end - start}")
            place = end, y
        wide = round(thickness * self.pitch * _UNIT)
        return f'<path fill="none" stroke="{colour}" stroke-width="{wide}" d="{"".join(text)}"/>'

    def moves(self) -> Iterator[str]:
        """Yield evictions and loads as lines between the rows of a pair."""
        found = self.scene.moves
        if found and not self.draws_moves:
            self.left_out.append(f"{len(found)} moves of saved activations between pairs of stages")
        for kind in (each for each in Kind if self.draws_moves and each in OWN_MOVES):
            lines = []
            for span in (each for each in found if each.instruction.kind is kind):
                first, last = map(self.y, self.scene.ends_of_move(span))
                lines.append(f"M{self.x(span.start)} {first}L{self.x(span.end)} {last}")
            yield (
                f'<path fill="none" stroke="{colours.colour_of(kind)}" stroke-width="{_UNIT}" '
                f'opacity="0.5" d="{"".join(lines)}"/>'
            )

    def marks(self) -> Iterator[str]:
        """Yield updates, with steps on top of all others, and above the rows the weight versions of the first rank."""
        for kind, marks in sorted(self.scene.marks.items(), key=lambda item: item[0].row.sign == AT_END):
            ends = [(self.x(each.start), self.x(each.end)) for each in marks]
            boxes = [(min(start, end - round(_MARK * _UNIT)), end, self.y(each.rank))
                     for (start, end), each in zip(ends, marks, strict=True)]  # fmt: skip
            colour, free_from = colours.colour_of(kind), -math.inf
            yield self._path(boxes, colour=colour)
            for step in (each for each in marks if each.rank == 0 and kind.row.sign == AT_END):
                if self.x(step.end) >= free_from:
                    yield self._text(self.x(step.end), (_TOP - 3) * _UNIT, f"W{step.instruction.version}", size=9,
                                     anchor="end", more=f' fill="{colour}" font-weight="bold"')  # fmt: skip
                    free_from = self.x(step.end) + 26 * _UNIT

    def borders(self) -> Iterator[str]:
        """Yield a dashed line along the first forward of each batch down the stages, with its name if there is room."""
        free_from, half = -math.inf, self.pitch * _UNIT // 2
        for batch, cells in self.scene.borders.items():
            points = [(self.x(cell.start), self.y(cell.rank) + side) for cell in cells for side in (-half, half)]
            yield (
                f'<polyline fill="none" stroke="currentColor" stroke-width="{_UNIT}" stroke-dasharray="12 8" '
                f'points="{" ".join(f"{x},{y}" for x, y in points)}"/>'
            )
            if points[0][0] >= free_from:
                yield self._text(points[0][0], 11 * _UNIT, f"batch {batch}", size=10)
                free_from = points[0][0] + 60 * _UNIT

    def numbers(self) -> Iterator[str]:
        """Yield the number of the microbatch in each box that has room for it."""
        roomy = [
            cell for cell in self.scene.cells
            if self.pitch >= 14
            and self.x(cell.end) - self.x(cell.start) >= (_DIGIT * len(str(cell.instruction.microbatch)) + 2) * _UNIT
        ]  # fmt: skip
        chosen = roomy if len(roomy) <= _MOST_NUMBERS else []
        if len(chosen) < len(self.scene.cells):
            self.left_out.append("microbatches' numbers" + " where boxes are narrow" * bool(chosen))
        down = 3 * _UNIT
        for ink in (colours.INK, colours.LIGHT_INK):
            texts = [
                f'<text x="{(self.x(cell.start) + self.x(cell.end)) // 2}" y="{self.y(cell.rank) + down}">'
                f"{cell.instruction.microbatch}</text>"
                for cell in chosen
                if colours.ink_on(cell.shade) == ink
            ]
            if texts:
                yield f'<g fill="{ink}" font-size="{9 * _UNIT}" text-anchor="middle">{"".join(texts)}</g>'

    def axis(self, label: str) -> Iterator[str]:
        foot = (_TOP + self.height) * _UNIT
        step = round_step(110 / self.pixels)
        ticks = [index * step for index in range(int(self.end / step) + 1)]
        marks = "".join(f"M{self.x(time)} {foot}v{4 * _UNIT}" for time in ticks)
        yield f'<path stroke="currentColor" stroke-width="{_UNIT}" d="{marks}"/>'
        for time in ticks:
            yield self._text(self.x(time), foot + 15 * _UNIT, f"{time:.6g}", size=10, anchor="middle")
        yield self._text(self.x(self.end / 2), foot + 30 * _UNIT, label, size=10, anchor="middle")

    def rows(self) -> Iterator[str]:
        """Yield the names of the rows, and the largest number of microbatches whose activations each row has saved."""
        names, every = names_of_rows(self.timeline), math.ceil(12 / self.pitch)
        edge = self.x(self.end) + 8 * _UNIT
        yield self._text(edge, (_TOP - 3) * _UNIT, "most saved", size=10)
        for rank in self.shown[::every]:
            foot = self.y(rank) + 3 * _UNIT
            yield self._text((_LEFT - 6) * _UNIT, foot, names[rank], size=10, anchor="end")
            yield self._text(edge, foot, str(self.timeline.peak_saved_on_rank(rank)), size=10)

    def _text(self, x: int, y: int, text: str, *, size: int, anchor: str = "start", more: str = "") -> str:
        placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
        return f'<text x="{x}" y="{y}" font-size="{size * _UNIT}"{placed}{more}>{escape(text)}</text>'

    def hover(self) -> str:
        """Attributes of the SVG from which the page's script describes the computation under the pointer.

        Each row has a list of (kind, stage, microbatch, version, distance from the start of the previous computation,
        width), with lengths in units.
        """
        cells = self.scene.cells
        if len(cells) > _MOST_HOVERED:
            self.left_out.append("what is under the pointer")
            return ""
        names, rows = list(dict.fromkeys(cell.instruction.kind.row.name for cell in cells)), []
        of_model = [copy.stage for copy in self.timeline.copies] or range(self.timeline.num_stages)
        for rank in self.shown:
            before, written = 0, []
            for cell in (each for each in cells if each.rank == rank):
                start, what = self.x(cell.start), cell.instruction
                place = (names.index(what.kind.row.name), of_model[what.stage], what.microbatch, cell.named_version)
                written.append(",".join(map(str, (*place, start - before, self.x(cell.end) - start))))
                before = start
            rows.append(";".join(written))
        return (
            f' data-kinds="{escape(",".join(names))}" data-top="{_TOP * _UNIT}" data-pitch="{self.pitch * _UNIT}" '
            f'data-left="{_LEFT * _UNIT}" data-second="{self.pixels * _UNIT:.6g}" data-rows="{escape("|".join(rows))}"'
        )

    def signs(self) -> tuple[Sign, ...]:
        signs = signs_of([self.scene], version="W", moves=self.draws_moves)
        return tuple(Sign((_BUBBLE,), sign.meaning) if sign.colours == (colours.BUBBLE,) else sign for sign in signs)


def round_step(least: float) -> float:
    """The smallest number among 1, 2 and 5 times powers of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
