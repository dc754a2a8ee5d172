"""What a drawing shows of weights that live on the host: the lanes to and from it, and what is on the device.

Below the ranks stand two panels. The first has three lines for each rank, one for each lane, with the stage that a word
is about. The second has a line for each of the rank's slots, with the stage whose weights are there: pale while they
are fetched, and up to their FREE; and one for each of its gradient buffers, with the stage that adds to it: from its
first backward of a batch until STORE_GRAD has brought them to the host, pale meanwhile.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.pipeline.draw import legend
from megatron.pipeline.draw.cells import names_of_rows
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, HOST_WORDS, Instruction, Kind, Lane
from megatron.pipeline.program.lane_order import GRADIENT_BUFFERS
from megatron.pipeline.simulate.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LANES = tuple(lane for lane in Lane if any(kind.row.lane is lane for kind in HOST_WORDS))
_SHORT = {Lane.H2D: "to device", Lane.D2H: "to host", Lane.HOST: "optimizer"}  # beside a line


@dataclass(frozen=True, slots=True)
class Carried:
    """A word of a lane of a rank, with its times."""

    rank: int
    lane: Lane
    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Resident:
    """The weights of a stage in a slot of a rank: fetched from `start` to `fetched`, and there until `end`."""

    rank: int
    slot: int
    stage: int
    version: int
    start: float
    fetched: float
    end: float


@dataclass(frozen=True, slots=True)
class Accumulated:
    """The gradients of a stage in a buffer of a rank: added up from `start` on, and leaving from `stored` to `end`."""

    rank: int
    buffer: int
    stage: int
    start: float
    stored: float
    end: float


def carried_of(timeline: Timeline) -> list[Carried]:
    """The words that take time, rank by rank in the order of the rows."""
    return [
        Carried(span.rank, span.instruction.kind.row.lane, span.instruction, span.start, span.end)
        for span in timeline.spans
        if span.instruction.kind in HOST_WORDS and span.end > span.start
    ]


def residents_of(timeline: Timeline) -> list[Resident]:
    """What is in the slots of each rank, slots counted from 0: a stage takes the lowest one that is free."""
    found: list[Resident] = []
    taken: dict[tuple[int, int], tuple[int, float, float]] = {}  # rank, stage -> slot, start, fetched
    for span in timeline.spans:
        place = span.rank, span.instruction.stage
        if span.instruction.kind is Kind.FETCH:
            used = {slot for (rank, _), (slot, _, _) in taken.items() if rank == span.rank}
            slot = next(each for each in range(len(used) + 1) if each not in used)
            taken[place] = slot, span.start, span.end
        elif span.instruction.kind is Kind.FREE:
            slot, start, fetched = taken.pop(place)
            found.append(Resident(span.rank, slot, place[1], span.instruction.version, start, fetched, span.end))
    return found


def accumulated_of(timeline: Timeline) -> list[Accumulated]:
    """What is in the gradient buffers of each rank, counted from 0: a stage takes the one that was given back first."""
    found: list[Accumulated] = []
    free = [deque(range(min(GRADIENT_BUFFERS, len(timeline.stages_of(rank))))) for rank in range(timeline.num_ranks)]
    taken: dict[int, tuple[int, float]] = {}  # stage -> buffer, start
    for span in timeline.spans:
        kind, stage = span.instruction.kind, span.instruction.stage
        if kind in BEGINS_BACKWARD and stage not in taken:
            taken[stage] = free[span.rank].popleft(), span.start
        elif kind is Kind.STORE_GRAD:
            buffer, start = taken.pop(stage)
            free[span.rank].append(buffer)
            found.append(Accumulated(span.rank, buffer, stage, start, span.start, span.end))
    return found


def has_host(timeline: Timeline) -> bool:
    return any(each.kind in HOST_WORDS for row in timeline.rows for each in row)


def extent(timeline: Timeline) -> tuple[float, float]:
    """When the first and the last of all that is drawn begins and ends: computations, and what lanes carry beside."""
    carried = carried_of(timeline)
    starts, ends = [each.start for each in carried], [each.end for each in carried]
    return min([timeline.start, *starts]), max([timeline.end, *ends])


def draw_host_lanes(axes: "Axes", timeline: Timeline, *, points: float) -> None:
    """Bars in three lines for each rank. `points`: typographic points per unit of the axis."""
    from matplotlib.collections import PolyCollection

    carried = carried_of(timeline)
    for lane in LANES:
        of_lane = [each for each in carried if each.lane is lane]
        lines = [each.rank * len(LANES) + LANES.index(lane) for each in of_lane]
        boxes = [_bar(each.start, each.end, line) for each, line in zip(of_lane, lines, strict=True)]
        colours = [legend.host_colour(each.instruction.kind) for each in of_lane]
        axes.add_collection(
            PolyCollection(boxes, facecolors=colours, edgecolors=legend.EDGE, linewidths=0.4, gid=lane.value)
        )
        for each, line in zip(of_lane, lines, strict=True):
            _label(axes, str(each.instruction.stage), each.start, each.end, line, points)
    names = [f"{name}: {lane}" if not index else lane for name in names_of_rows(timeline) for index, lane in
             enumerate(map(_SHORT.get, LANES))]  # fmt: skip
    _finish(axes, names, "between device and host: stages")


def draw_resident(axes: "Axes", timeline: Timeline, *, points: float) -> None:
    """Bars in a line for each slot. `points`: as above."""
    from matplotlib.collections import PolyCollection

    residents, gradients, ranks = residents_of(timeline), accumulated_of(timeline), range(timeline.num_ranks)
    slots = [1 + max((each.slot for each in residents if each.rank == rank), default=0) for rank in ranks]
    buffers = [1 + max((each.buffer for each in gradients if each.rank == rank), default=0) for rank in ranks]
    foot = [sum(slots[:rank]) + sum(buffers[:rank]) for rank in ranks]
    lines_of_weights = [foot[each.rank] + each.slot for each in residents]
    lines_of_gradients = [foot[each.rank] + slots[each.rank] + each.buffer for each in gradients]
    for gid, colour, lines, bounds in (
        ("resident", legend.RESIDENT, lines_of_weights, [(each.fetched, each.end) for each in residents]),
        ("fetched", legend.FETCHED, lines_of_weights, [(each.start, each.fetched) for each in residents]),
        ("accumulated", legend.ACCUMULATED, lines_of_gradients, [(each.start, each.stored) for each in gradients]),
        ("stored", legend.STORED, lines_of_gradients, [(each.stored, each.end) for each in gradients]),
    ):
        boxes = [_bar(*times, line) for times, line in zip(bounds, lines, strict=True)]
        axes.add_collection(PolyCollection(boxes, facecolors=colour, edgecolors=legend.EDGE, linewidths=0.4, gid=gid))
    for each, line in zip([*residents, *gradients], [*lines_of_weights, *lines_of_gradients], strict=True):
        _label(axes, str(each.stage), each.start, each.end, line, points)
    names = []
    for name, num_slots, num_buffers in zip(names_of_rows(timeline), slots, buffers, strict=True):
        places = [f"slot {slot}" for slot in range(num_slots)] + [f"gradients {each}" for each in range(num_buffers)]
        names += [f"{name}: {places[0]}", *places[1:]]
    _finish(axes, names, "stages whose weights and gradients are on the device; pale while they come or leave")


def _bar(start: float, end: float, line: int) -> list[tuple[float, float]]:
    return [(start, line - 0.42), (end, line - 0.42), (end, line + 0.42), (start, line + 0.42)]


def _label(axes: "Axes", text: str, start: float, end: float, line: int, points: float) -> None:
    """The text in the middle of a bar that has room for it."""
    if (end - start) * points >= 4.0 * len(text) + 2:
        middle = (start + end) / 2
        axes.text(middle, line + 0.02, text, ha="center", va="center", fontsize=6, color=legend.INK, gid="stage")


def _finish(axes: "Axes", names: list[str], title: str) -> None:
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set_title(title, loc="left", fontsize=8, pad=2)
