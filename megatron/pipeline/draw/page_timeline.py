"""A timeline as a small SVG for a page: thousands of computations in some kilobytes, legible on light and dark.

A picture that has an element for each box and each number is megabytes large. Here all boxes of one colour are one
path, whose strokes are as thick as a row is high. Neighbours of one colour that are too narrow to be told apart are one
stroke. Numbers, moves and rows are drawn as far as there is room, and `left_out` says what is not. Writing and axes
take the colour of the page's text.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from megatron.pipeline.draw import legend
from megatron.pipeline.draw.cells import Cell, Update, cells_of, holds_of, names_of_rows, predictions_of, steps_of
from megatron.pipeline.program.instruction import COMPUTATIONS, OWN_MOVES, Kind
from megatron.pipeline.simulate.timeline import Timeline

MOST_ROWS = 64
_MOST_NUMBERS, _MOST_MOVES, _MOST_HOVERED = 4_000, 600, 4_000
_NARROWEST, _WIDEST = 640, 3_600  # pixels between the margins
_CELL = 13  # pixels that all but the shortest computations get where the picture may be as wide as that takes
_UNIT = 4  # of a pixel: coordinates are whole numbers
_LEFT, _RIGHT, _TOP, _FOOT = 64, 78, 28, 34  # pixels
_ALONE = 2.0  # pixels from which on a box stands by itself
_DIGIT = 5.4  # pixels
_MARK = 2.0  # pixels of a mark at least
_BUBBLE = "#80808040"  # of any page


@dataclass(frozen=True)
class PageTimeline:
    """What to put on a page.

    Attributes:
        svg: the element.
        signs: what is drawn, as (colour, meaning).
        left_out: what is not, a clause each.
    """

    svg: str
    signs: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]


def page_timeline(
    timeline: Timeline,
    *,
    name: str,
    time_label: str = "seconds",
    window: tuple[float, float] | None = None,
    scale: float | None = None,
    hovers: bool = False,
) -> PageTimeline:
    """Draw it.

    Args:
        name: what it shows, for readers that do not see it.
        window: from when to when, where the axis is zero at its start; None: from the first computation to the last.
        scale: pixels of a unit of time, for pictures on one axis; None: so that numbers can be read (`legible_scale`).
        hovers: with what a page's script needs to say which computation the pointer is on; some ten bytes for each.

    Raises:
        ValueError: no computation takes time.
    """
    start, end = window or (timeline.start, timeline.end)
    if not end > start:
        raise ValueError("there is nothing to draw; give a timeline in which a computation takes time")
    drawing = _Drawing(timeline.shifted(-start), end - start, scale)
    parts = [*drawing.boxes(), *drawing.moves(), *drawing.marks(), *drawing.batches(), *drawing.numbers()]
    parts += [*drawing.axis(time_label), *drawing.rows()]
    width, height = _LEFT + drawing.width + _RIGHT, _TOP + drawing.height + _FOOT
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(name)}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width * _UNIT} {height * _UNIT}" font-family="sans-serif" '
        f'fill="currentColor"{drawing.hover() if hovers else ""}>\n{chr(10).join(parts)}\n</svg>'
    )
    return PageTimeline(svg, tuple(drawing.signs()), tuple(drawing.left_out))


def legible_scale(timeline: Timeline, end: float) -> float:
    """Pixels of a unit of time with which all but the shortest computations have room for their microbatch's number,
    as far as a picture of so much time may be as wide as that takes."""
    cells = [cell for cell in cells_of(timeline) if cell.end > cell.start]
    lengths = sorted(cell.end - cell.start for cell in cells)
    digits = max(len(str(cell.microbatch)) for cell in cells)
    room = max(_CELL, _DIGIT * digits + 3)
    return min(max(room / lengths[len(lengths) // 10], _NARROWEST / end), _WIDEST / end)


class _Drawing:
    """One timeline with its scale, from 0 to `end`; each method gives the elements of one kind of sign."""

    def __init__(self, timeline: Timeline, end: float, scale: float | None) -> None:
        self.timeline, self.end = timeline, end
        self.left_out: list[str] = []
        self.every = math.ceil(timeline.num_ranks / MOST_ROWS)
        if self.every > 1:
            self.left_out.append(f"all but every {self.every}. row")
        self.shown = range(0, timeline.num_ranks, self.every)
        self.pitch = 20 if len(self.shown) <= 16 else 14 if len(self.shown) <= 32 else 10
        self.height = self.pitch * len(self.shown)
        self.cells = [cell for cell in cells_of(timeline) if cell.rank in self.shown and self._is_seen(cell)]
        self.width = round((scale or legible_scale(timeline, end)) * self.end)
        self.pixels = self.width / self.end  # of a unit of time

    def _is_seen(self, mark: Cell | Update) -> bool:
        return mark.end > 0 and (mark.start < self.end or mark.end <= self.end)  # a step may take no time

    def x(self, time: float) -> int:
        """Where a time is, or the nearer end of what is drawn."""
        return round((_LEFT + min(max(time, 0.0), self.end) * self.pixels) * _UNIT)

    def y(self, rank: float) -> int:
        """The middle of a row."""
        return round((_TOP + (rank / self.every + 0.5) * self.pitch) * _UNIT)

    def boxes(self) -> Iterator[str]:
        ends = [(self.x(0.0), self.x(self.end), self.y(rank)) for rank in self.shown]
        yield self._path(ends, colour=_BUBBLE)
        by_colour: dict[str, list[tuple[int, int, int]]] = {}
        for cell, start, end in self._merged():
            apart = _UNIT // 2 if end - start >= 2 * _ALONE * _UNIT else 0
            by_colour.setdefault(_colour(cell), []).append((start, end - apart, self.y(cell.rank)))
        for colour, boxes in by_colour.items():
            yield self._path(boxes, colour=colour)
        completing = [(self.x(cell.start), self.x(cell.end), self.y(cell.rank + 0.34 * self.every))
                      for cell in self.cells if cell.completes_batch]  # fmt: skip
        if completing:
            yield self._path(completing, colour=legend.HATCH, thickness=0.16)

    def _merged(self) -> Iterator[tuple[Cell, int, int]]:
        """The cells with where they begin and end; those that are too narrow to stand alone with what touches them."""
        last: tuple[Cell, int, int] | None = None
        for cell in self.cells:
            start, end = self.x(cell.start), self.x(cell.end)
            if last is not None:
                before, begun, ended = last
                alike = (before.rank, _colour(before)) == (cell.rank, _colour(cell))
                if alike and start - ended <= 1 and end - start < _ALONE * _UNIT:
                    last = before, begun, end
                    continue
                yield last
            last = cell, start, end
        if last is not None:
            yield last

    def _path(self, boxes: Sequence[tuple[int, int, int]], *, colour: str, thickness: float = 0.84) -> str:
        """Strokes from and to, at a height."""
        text, place = [], (0, 0)
        for start, end, y in boxes:
            text.append(f"m{start - place[0]} {y - place[1]}h{end - start}")
            place = end, y
        wide = round(thickness * self.pitch * _UNIT)
        return f'<path fill="none" stroke="{colour}" stroke-width="{wide}" d="{"".join(text)}"/>'

    def moves(self) -> Iterator[str]:
        """Evictions and loads as lines between the rows of a pair."""
        found = [span for span in self.timeline.spans if span.instruction.kind in OWN_MOVES and self._is_seen(span)]
        self.draws_moves = bool(found) and len(found) <= _MOST_MOVES and self.every == 1
        if found and not self.draws_moves:
            self.left_out.append(f"{len(found)} moves of saved activations between pairs of stages")
        for kind in (each for each in Kind if self.draws_moves and each in OWN_MOVES):
            lines = []
            for span in (each for each in found if each.instruction.kind is kind):
                pair = self.timeline.rank_of_stage[self.timeline.pairs.of_stage(span.instruction.stage)]
                ranks = (span.rank, pair) if kind.row.saved < 0 else (pair, span.rank)
                (x0, y0), (x1, y1) = zip(map(self.x, (span.start, span.end)), map(self.y, ranks), strict=True)
                lines.append(f"M{x0} {y0}L{x1} {y1}")
            yield (
                f'<path fill="none" stroke="{legend.MOVE_COLOURS[kind.row.saved]}" stroke-width="{_UNIT}" '
                f'opacity="0.5" d="{"".join(lines)}"/>'
            )

    def marks(self) -> Iterator[str]:
        """Steps, predictions and what is kept for these; above the rows, which weights the first rank makes."""
        steps = self._seen(steps_of(self.timeline))
        for marks, colour in (
            (self._seen(holds_of(self.timeline)), legend.HOLD),
            (self._seen(predictions_of(self.timeline)), legend.PREDICTION), (steps, legend.STEP),
        ):  # fmt: skip
            if marks:
                least = round(_MARK * _UNIT)
                boxes = [(min(self.x(each.start), self.x(each.end) - least), self.x(each.end), self.y(each.rank))
                         for each in marks]  # fmt: skip
                yield self._path(boxes, colour=colour)
        free_from = -math.inf
        for step in (each for each in steps if each.rank == 0):
            if self.x(step.end) >= free_from:
                yield self._text(self.x(step.end), (_TOP - 3) * _UNIT, f"W{step.version}", size=9, anchor="end",
                                 more=f' fill="{legend.STEP}" font-weight="bold"')  # fmt: skip
                free_from = self.x(step.end) + 26 * _UNIT

    def _seen(self, marks: Sequence[Update]) -> list[Update]:
        return [each for each in marks if each.rank in self.shown and self._is_seen(each)]

    def batches(self) -> Iterator[str]:
        """A dashed line that follows the first forward of each batch down the stages, named where there is room."""
        batch_of = {first: batch for batch, first in enumerate(self.timeline.batch_borders()[:-1])}
        places: dict[int, list[Cell]] = {}
        for cell in self.cells:
            is_first = cell.begins_batch and cell.start >= 0  # one that began before the picture has no beginning here
            if is_first and cell.stage == self.timeline.stages_of(cell.rank)[0]:
                places.setdefault(batch_of[cell.microbatch], []).append(cell)
        free_from = -math.inf
        for batch, cells in sorted(places.items()):
            half = self.pitch * _UNIT // 2
            points = [(self.x(cell.start), self.y(cell.rank) + side) for cell in cells for side in (-half, half)]
            yield (
                f'<polyline fill="none" stroke="currentColor" stroke-width="{_UNIT}" stroke-dasharray="12 8" '
                f'points="{" ".join(f"{x},{y}" for x, y in points)}"/>'
            )
            if points[0][0] >= free_from:
                yield self._text(points[0][0], 11 * _UNIT, f"batch {self.timeline.first_batch + batch}", size=10)
                free_from = points[0][0] + 60 * _UNIT

    def numbers(self) -> Iterator[str]:
        """The microbatch in each box that has room for it."""
        roomy = [
            cell for cell in self.cells
            if self.pitch >= 14
            and self.x(cell.end) - self.x(cell.start) >= (_DIGIT * len(str(cell.microbatch)) + 2) * _UNIT
        ]  # fmt: skip
        chosen = roomy if len(roomy) <= _MOST_NUMBERS else []
        if len(chosen) < len(self.cells):
            self.left_out.append("microbatches' numbers" + " where boxes are narrow" * bool(chosen))
        down = 3 * _UNIT
        for ink in (legend.INK, legend.LIGHT_INK):
            texts = [
                f'<text x="{(self.x(cell.start) + self.x(cell.end)) // 2}" y="{self.y(cell.rank) + down}">'
                f"{cell.microbatch}</text>"
                for cell in chosen
                if legend.ink_on(cell.shade) == ink
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
        """The rows' names, and the most microbatches whose activations each has saved at once."""
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
        """What a page's script needs to say which computation the pointer is on: attributes of the picture. Of each row
        a list of kind, stage, microbatch, version, pixels from the start of the one before, and pixels, in units."""
        if len(self.cells) > _MOST_HOVERED:
            self.left_out.append("what is under the pointer")
            return ""
        names, rows = list(dict.fromkeys(cell.kind.row.name for cell in self.cells)), []
        for rank in self.shown:
            before, written = 0, []
            for cell in (each for each in self.cells if each.rank == rank):
                start, version = self.x(cell.start), "" if cell.version is None else cell.named_version
                place = (names.index(cell.kind.row.name), cell.stage, cell.microbatch, version, start - before)
                written.append(",".join(map(str, (*place, self.x(cell.end) - start))))
                before = start
            rows.append(";".join(written))
        return (
            f' data-kinds="{escape(",".join(names))}" data-top="{_TOP * _UNIT}" data-pitch="{self.pitch * _UNIT}" '
            f'data-left="{_LEFT * _UNIT}" data-second="{self.pixels * _UNIT:.6g}" data-rows="{escape("|".join(rows))}"'
        )

    def signs(self) -> Iterator[tuple[str, str]]:
        """Colours and what they mean; a shade is a weight version, or a stage of the rank."""
        for kind in (each for each in Kind if each in COMPUTATIONS):
            drawn = [cell for cell in self.cells if cell.kind is kind]
            if any(cell.chunk is not None for cell in drawn):
                darkest = max(drawn, key=lambda cell: cell.shade % 4)
                yield _colour(darkest), f"{kind.row.name} (dark: the rank's first stage)"
                continue
            versions = sorted({cell.version for cell in drawn if cell.version is not None})
            for version in versions[:4]:
                more = ", ..." * (version == versions[:4][-1] and len(versions) > 4)
                yield legend.shade_of(kind, version), f"{kind.row.name} with weights W{version}{more}"
            if drawn and not versions:
                yield _colour(drawn[0]), kind.row.name
        if any(cell.completes_batch for cell in self.cells):
            yield legend.HATCH, "completes the batch's gradient"
        if self._seen(steps_of(self.timeline)):
            yield legend.STEP, "optimizer step; makes weights Wn"
        if self._seen(predictions_of(self.timeline)):
            yield legend.PREDICTION, "prediction of weights"
        if self._seen(holds_of(self.timeline)):
            yield legend.HOLD, Kind.HOLD.row.name
        yield _BUBBLE, "bubble"
        moving = {span.instruction.kind for span in self.timeline.spans} if self.draws_moves else set()
        for kind in (each for each in Kind if each in OWN_MOVES & moving):
            yield legend.MOVE_COLOURS[kind.row.saved], kind.row.name


def _colour(cell: Cell) -> str:
    return legend.shade_of(cell.kind, cell.shade)


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... times a power of ten that is no less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
