"""What a drawing shows of a timeline, before any picture: cells, marks and borders.

The picture and the text of a timeline show the same things, and a test wants to count them without looking at pixels.
So they are derived here once: each computation is a cell; each STEP and each PREDICT a mark; each batch begins at a
border in every row.
"""

from dataclasses import dataclass

from megatron.pipeline.program.instruction import COMPUTATIONS, ENDS_BACKWARD, Kind
from megatron.pipeline.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Cell:
    """A computation in a rank's row; times in the timeline's unit.

    Attributes:
        completes_batch: it is the last backward of its batch at its stage: the gradient of the batch is complete.
        begins_batch: it is the first forward of its batch at its stage.
        chunk: the place of its stage among those of its rank; None where the rank has one.
        shade: 0 (lightest) and up: of its weight version, or of its chunk, the first one darkest, as in Megatron-LM's
            figures; versions are written below the microbatches, too.
        ahead: how its weights are ahead of its version, as in the text of a program: +2, ~3 or nothing.

    Where every batch is a single microbatch, every cell would do both, which says nothing: there, none does.
    """

    rank: int
    kind: Kind
    stage: int
    microbatch: int
    version: int | None
    start: float
    end: float
    completes_batch: bool
    begins_batch: bool
    chunk: int | None
    shade: int
    ahead: str = ""

    @property
    def named_version(self) -> str:
        """The version and how the weights are ahead of it: 1+2, 1~3."""
        return f"{self.version}{self.ahead}"


@dataclass(frozen=True, slots=True)
class Update:
    """A STEP, a PREDICT or a HOLD of a rank: an optimizer step makes weight version `version` of all its stages, a
    prediction says what it will be, and gradients are kept for that.
    """

    rank: int
    stage: int
    version: int
    start: float
    end: float


def cells_of(timeline: Timeline) -> list[Cell]:
    """All computations, rank by rank in the order of the rows."""
    last_backward, first_forward = {}, {}
    borders = timeline.batch_borders()
    batch_of = {
        microbatch: batch
        for batch in range(len(borders) - 1)
        for microbatch in range(borders[batch], borders[batch + 1])
    }
    found = [span for span in timeline.computations() if span.instruction.kind in COMPUTATIONS]
    for index, span in enumerate(found):
        key = (span.instruction.stage, batch_of.get(span.instruction.microbatch))
        if span.instruction.kind in ENDS_BACKWARD:
            last_backward[key] = index
        elif span.instruction.kind is Kind.FORWARD:
            first_forward.setdefault(key, index)
    completing, beginning = set(last_backward.values()), set(first_forward.values())
    if max(timeline.batches, default=1) == 1:
        completing = beginning = set()
    stages = [timeline.stages_of(rank) for rank in range(timeline.num_ranks)]
    cells = []
    for index, span in enumerate(found):
        what = span.instruction
        times = (span.start, span.end)
        borders_of_batch = (index in completing, index in beginning)
        chunk, shade = None, what.version or 0
        if len(stages[span.rank]) > 1:
            chunk = stages[span.rank].index(what.stage)
            shade = len(stages[span.rank]) - 1 - chunk
        place = (span.rank, what.kind, what.stage, what.microbatch, what.version)
        cells.append(Cell(*place, *times, *borders_of_batch, chunk, shade, what.ahead))
    return cells


def steps_of(timeline: Timeline) -> list[Update]:
    """All optimizer steps, rank by rank in the order of the rows."""
    return _updates_of(timeline, Kind.STEP)


def predictions_of(timeline: Timeline) -> list[Update]:
    """All predictions of weights, likewise."""
    return _updates_of(timeline, Kind.PREDICT)


def holds_of(timeline: Timeline) -> list[Update]:
    """Where gradients are kept for a prediction and that takes time, likewise."""
    return [hold for hold in _updates_of(timeline, Kind.HOLD) if hold.end > hold.start]


def _updates_of(timeline: Timeline, kind: Kind) -> list[Update]:
    return [
        Update(span.rank, span.instruction.stage, span.instruction.version, span.start, span.end)
        for span in timeline.computations()
        if span.instruction.kind is kind
    ]


def names_of_rows(timeline: Timeline) -> list[str]:
    """Where each rank has one stage, a row is called by its stage."""
    owned = [timeline.stages_of(rank) for rank in range(timeline.num_ranks)]
    if all(len(stages) == 1 for stages in owned):
        return [f"stage {stages[0]}" for stages in owned]
    return [f"rank {rank}" for rank in range(timeline.num_ranks)]
