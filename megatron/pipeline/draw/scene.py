"""The content of a drawing, before any picture: cells, marks, moves, borders of batches, and their legend.

The picture, the page and the text of a timeline show the same content, and tests should count it without looking at
pixels. So it is derived here once, by the rows of the words' table: a computation of a microbatch is a cell; an update
that a rank computes is a mark; a move goes from row to row; a lane carries a word to or from the host.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.pipeline.draw import colours
from megatron.pipeline.program.copies import numbered
from megatron.pipeline.program.instruction import (
    COMPUTATIONS,
    ENDS_BACKWARD,
    HOST_WORDS,
    OWN_MOVES,
    OWN_UPDATES,
    REDUCTIONS,
    SENDS,
    Kind,
    Lane,
)
from megatron.pipeline.simulate.timeline import Span, Timeline

HOST_LANES = tuple(lane for lane in Lane if any(kind.row.lane is lane for kind in HOST_WORDS))
AT_END = "#"
"""The sign of an update that is marked at its end, where it takes effect: a step."""


@dataclass(frozen=True, slots=True)
class Cell(Span):
    """A computation of a microbatch in a rank's row; times in the timeline's unit.

    Attributes:
        completes_batch: whether it is the last backward of its batch at its stage, which completes the gradient.
        begins_batch: whether it is the first forward of its batch at its stage.
        chunk: the index of its stage among the stages of its rank; None if the rank has one stage.
        shade: 0 (lightest) and up, for its weight version, or for its chunk, with the first chunk darkest, as in
            Megatron-LM's figures; versions are written below the microbatches, too.

    If every batch is a single microbatch, each cell would begin and complete a batch; then both flags are False.
    """

    completes_batch: bool
    begins_batch: bool
    chunk: int | None
    shade: int

    @property
    def named_version(self) -> str:
        """The version and how far the weights are ahead of it, such as 1+2 or 1~3; "" if no version is named."""
        return "" if self.instruction.version is None else f"{self.instruction.version}{self.instruction.ahead}"

    @property
    def colour(self) -> str:
        return colours.colour_of(self.instruction.kind, self.shade)


@dataclass(frozen=True)
class Sign:
    """An entry of a legend. `form`: box, hatch, line, tick or frame."""

    colours: tuple[str, ...]
    meaning: str
    form: str = "box"


@dataclass(frozen=True)
class Scene:
    """The content of a timeline's drawing; `is_seen` selects the spans to draw, `names` name the rows otherwise."""

    timeline: Timeline
    is_seen: Callable[[Span], bool] = lambda span: True
    names: Sequence[str] = ()

    @property
    def names_of_rows(self) -> list[str]:
        return list(self.names) or names_of_rows(self.timeline)

    @cached_property
    def cells(self) -> list[Cell]:
        """All computations to draw, rank by rank in the order of the rows."""
        return [cell for cell in cells_of(self.timeline) if self.is_seen(cell)]

    @cached_property
    def spans(self) -> list[Span]:
        """The spans of all words that take time, and of words with a sign even if they take no time."""
        spans = self.timeline.spans
        return [each for each in spans if (each.end > each.start or _is_signed(each)) and self.is_seen(each)]

    @cached_property
    def marks(self) -> dict[Kind, list[Span]]:
        """The updates that ranks compute, by kind; an update without a sign is included only if it takes time."""
        found = {kind: [each for each in self.spans if each.instruction.kind is kind] for kind in Kind
                 if kind in OWN_UPDATES}  # fmt: skip
        return {kind: marks for kind, marks in found.items() if marks}

    @cached_property
    def moves(self) -> list[Span]:
        """Evictions and loads, as spans of the evictor."""
        return [each for each in self.spans if each.instruction.kind in OWN_MOVES]

    def ends_of_move(self, move: Span) -> tuple[int, int]:
        """The rank from which a move goes, and the rank to which it goes."""
        pair = self.timeline.rank_of_stage[self.timeline.pairs.of_stage(move.instruction.stage)]
        return (move.rank, pair) if move.instruction.kind.row.saved < 0 else (pair, move.rank)

    @cached_property
    def carried(self) -> list[Span]:
        """The words to and from the host that take time."""
        return [each for each in self.spans if each.instruction.kind in HOST_WORDS and each.end > each.start]

    @cached_property
    def borders(self) -> dict[int, list[Cell]]:
        """Batch -> its first forward at the first stage of each rank; empty for a single batch."""
        borders, first_batch = self.timeline.batch_borders(), self.timeline.first_batch
        first_stages = [self.timeline.stages_of(rank)[0] for rank in range(self.timeline.num_ranks)]
        found: dict[int, list[Cell]] = {}
        for cell in self.cells if len(self.timeline.batches) > 1 else ():
            if cell.begins_batch and cell.start >= 0 and cell.instruction.stage == first_stages[cell.rank]:
                batch = first_batch + bisect_right(borders, cell.instruction.microbatch) - 1
                found.setdefault(batch, []).append(cell)
        return dict(sorted(found.items()))


def _is_signed(span: Span) -> bool:
    kind = span.instruction.kind
    return kind in COMPUTATIONS or (bool(kind.row.sign) and kind in OWN_UPDATES | OWN_MOVES)


def cells_of(timeline: Timeline) -> list[Cell]:
    """All computations of a timeline as cells, rank by rank in the order of the rows."""
    borders = timeline.batch_borders()
    batch_of = {
        microbatch: batch
        for batch in range(len(borders) - 1)
        for microbatch in range(borders[batch], borders[batch + 1])
    }
    found = [span for span in timeline.computations() if span.instruction.kind in COMPUTATIONS]
    last_backward, first_forward = {}, {}
    for index, span in enumerate(found if max(timeline.batches, default=1) > 1 else ()):
        key = (span.instruction.stage, batch_of.get(span.instruction.microbatch))
        if span.instruction.kind in ENDS_BACKWARD:
            last_backward[key] = index
        elif span.instruction.kind is Kind.FORWARD:
            first_forward.setdefault(key, index)
    completing, beginning = set(last_backward.values()), set(first_forward.values())
    stages = [timeline.stages_of(rank) for rank in range(timeline.num_ranks)]
    cells = []
    for index, span in enumerate(found):
        owned, chunk, shade = stages[span.rank], None, span.instruction.version or 0
        if len(owned) > 1:
            chunk = owned.index(span.instruction.stage)
            shade = len(owned) - 1 - chunk
        whole = (span.rank, span.instruction, span.start, span.end)
        cells.append(Cell(*whole, index in completing, index in beginning, chunk, shade))
    return cells


def names_of_rows(timeline: Timeline) -> list[str]:
    """The names of the rows: `stage N` if each rank has one stage, otherwise `rank N`.

    With copies, a row has the names of its rank's stages: `stage 1.0` is the first copy of stage 1 of the model, and
    `0.1 2.1` a rank with the second copies of stages 0 and 2.
    """
    owned = [timeline.stages_of(rank) for rank in range(timeline.num_ranks)]
    if timeline.copies:
        names = [f"{stage}.{copy}" for stage, copy in numbered(timeline.copies)]
        word = "" if any(len(stages) > 1 for stages in owned) else "stage "
        return [word + " ".join(names[stage] for stage in stages) for stages in owned]
    if all(len(stages) == 1 for stages in owned):
        return [f"stage {stages[0]}" for stages in owned]
    return [f"rank {rank}" for rank in range(timeline.num_ranks)]


def has_host(timeline: Timeline) -> bool:
    return any(each.kind in HOST_WORDS for row in timeline.rows for each in row)


def extent(timeline: Timeline) -> tuple[float, float]:
    """The start and the end of everything that is drawn: computations, and words on lanes to and from the host."""
    carried = Scene(timeline).carried
    starts, ends = [each.start for each in carried], [each.end for each in carried]
    return min([timeline.start, *starts]), max([timeline.end, *ends])


def signs_of(scenes: Sequence[Scene], *, version: str = "v", moves: bool = True, lanes: bool = False) -> list[Sign]:
    """The legend of scenes; a computation has a colour for each of its shades, with its weight versions or stages.

    `version`: the letter before the number of a version. `moves`, `lanes`: whether moves and lanes are drawn.
    """
    cells = [cell for scene in scenes for cell in scene.cells]
    signs = []
    for kind in (each for each in Kind if each in COMPUTATIONS):
        drawn = [cell for cell in cells if cell.instruction.kind is kind]
        chunks = dict(sorted((cell.chunk, cell.colour) for cell in drawn if cell.chunk is not None))
        if chunks:
            signs.append(Sign(tuple(chunks.values())[:4], f"{kind.row.name}, first to last stage of the rank"))
        versions = {cell.instruction.version for cell in drawn if cell.chunk is None}
        known = sorted(each for each in versions if each is not None)
        if known:
            named = ", ".join(f"{version}{each}" for each in known[:4]) + ", ..." * (len(known) > 4)
            shades = tuple(colours.colour_of(kind, each) for each in known[:4])
            signs.append(Sign(shades, f"{kind.row.name} with weights {named}"))
        elif versions:
            signs.append(Sign((colours.colour_of(kind),), kind.row.name))
    if any(cell.completes_batch for cell in cells):
        signs.append(Sign((colours.HATCH,), "completes the batch's gradient", "hatch"))
    kinds = {span.instruction.kind for scene in scenes for span in scene.spans}
    timed = {span.instruction.kind for scene in scenes for span in scene.spans if span.end > span.start}
    for kind in (each for each in Kind if any(each in scene.marks for scene in scenes)):
        form = "tick" if kind.row.sign not in (AT_END, "") else "box"
        signs.append(Sign((colours.colour_of(kind),), kind.row.name, form))
    signs.append(Sign((colours.BUBBLE,), "bubble"))
    if moves:
        moving = (kind for kind in Kind if kind in kinds & OWN_MOVES)
        signs += [Sign((colours.colour_of(kind),), kind.row.name, "line") for kind in moving]
    if lanes:
        signs += [Sign((colours.TRANSFER,), "transfer", "line")] * bool(timed & SENDS)
        signs += [Sign((colours.REDUCTION,), "reduction in the background")] * bool(timed & REDUCTIONS)
        carried = (kind for kind in Kind if kind in timed & HOST_WORDS)
        signs += [Sign((colours.colour_of(kind),), kind.row.name) for kind in carried]
    return signs
