"""The panels below the rows of a picture: bars and areas in lines of their own.

With weights on the host, the speed of a rank depends on its lanes and on the stages on its device. So one panel has
three lines for each rank, one for each lane, with the stage of each word. Another panel has a line for each of the
rank's slots, with the stage whose weights are there, up to their FREE; the bar is pale while the weights are fetched.
It also has a line for each gradient buffer, with the stage that adds to it, from its first backward of a batch until
STORE_GRAD has copied the gradients to the host; the bar is pale during that copy. Two more panels show a rank over
time: its microbatches with saved activations, and its memory.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.pipeline.draw import colours
from megatron.pipeline.draw.scene import HOST_LANES, Scene
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, MOVES, Kind, Lane
from megatron.pipeline.program.lane_order import GRADIENT_BUFFERS
from megatron.pipeline.simulate.memory_curve import MemoryCurve
from megatron.pipeline.simulate.timeline import Timeline

_SHORT = {Lane.H2D: "to device", Lane.D2H: "to host", Lane.HOST: "optimizer"}  # beside a line


@dataclass(frozen=True, slots=True)
class Bar:
    """A box in a line. `gid`: the kind of its content."""

    line: int
    start: float
    end: float
    colour: str
    gid: str


@dataclass(frozen=True, slots=True)
class Area:
    """An area in a line between the heights `low` and `high`, as shares of the line's height.

    Each pair of heights is valid from its time in `times` to the next one.
    """

    line: int
    times: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    colour: str
    gid: str


@dataclass
class Panel:
    """Lines below the rows of a timeline.

    Attributes:
        title: text above the lines.
        row: height of a rank's lines in inches.
        names: the names of the lines.
        labels: texts in lines as (line, start, end, text).
        peaks: a text at the right of each line; `peak`: the gid of these texts.
    """

    title: str
    row: float
    names: list[str]
    bars: list[Bar] = field(default_factory=list)
    labels: list[tuple[int, float, float, str]] = field(default_factory=list)
    areas: list[Area] = field(default_factory=list)
    peaks: list[str] = field(default_factory=list)
    peak: str = "peak"


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """The weights of a stage in a slot of a rank, or its gradients in a buffer of the rank.

    Attributes:
        line: the number of the slot or buffer, from 0.
        start, turn: the times between which weights are fetched, or gradients are added up.
        end: the end of the time from `turn` on in which weights are resident, or gradients are copied to the host.
    """

    rank: int
    line: int
    stage: int
    start: float
    turn: float
    end: float


def residents_of(timeline: Timeline) -> list[HeldTensors]:
    """The weights in the slots of each rank; a stage takes the lowest free slot."""
    found: list[HeldTensors] = []
    taken: dict[tuple[int, int], tuple[int, float, float]] = {}  # rank, stage -> slot, start, fetched
    for span in timeline.spans:
        place = span.rank, span.instruction.stage
        if span.instruction.kind is Kind.FETCH:
            used = {slot for (rank, _), (slot, _, _) in taken.items() if rank == span.rank}
            slot = next(each for each in range(len(used) + 1) if each not in used)
            taken[place] = slot, span.start, span.end
        elif span.instruction.kind is Kind.FREE:
            slot, *times = taken.pop(place)
            found.append(HeldTensors(span.rank, slot, place[1], *times, span.end))
    return found


def accumulated_of(timeline: Timeline) -> list[HeldTensors]:
    """The gradients in the buffers of each rank; a stage takes the buffer that was returned first."""
    found: list[HeldTensors] = []
    free = [deque(range(min(GRADIENT_BUFFERS, len(timeline.stages_of(rank))))) for rank in range(timeline.num_ranks)]
    taken: dict[int, tuple[int, float]] = {}  # stage -> buffer, start
    for span in timeline.spans:
        kind, stage = span.instruction.kind, span.instruction.stage
        if kind in BEGINS_BACKWARD and stage not in taken:
            taken[stage] = free[span.rank].popleft(), span.start
        elif kind is Kind.STORE_GRAD:
            buffer, start = taken.pop(stage)
            free[span.rank].append(buffer)
            found.append(HeldTensors(span.rank, buffer, stage, start, span.start, span.end))
    return found


def host_panel(scene: Scene) -> Panel:
    """A panel with three lines for each rank, one for each lane to and from the host."""
    names = [f"{name}: {_SHORT.get(lane, lane.value)}" if lane is HOST_LANES[0] else _SHORT.get(lane, lane.value)
             for name in scene.names_of_rows for lane in HOST_LANES]  # fmt: skip
    panel = Panel("between device and host: stages", 0.45, names)
    for each in scene.carried:
        kind = each.instruction.kind
        line, lane = each.rank * len(HOST_LANES) + HOST_LANES.index(kind.row.lane), kind.row.lane.value
        panel.bars.append(Bar(line, each.start, each.end, colours.colour_of(kind), lane))
        panel.labels.append((line, each.start, each.end, str(each.instruction.stage)))
    return panel


def device_panel(scene: Scene) -> Panel:
    """A panel with a line for each slot of weights and each buffer of gradients."""
    names: list[str] = []
    panel = Panel("stages whose weights and gradients are on the device; pale while they come or leave", 0.6, names)
    ranks = scene.names_of_rows
    residents, gradients = residents_of(scene.timeline), accumulated_of(scene.timeline)
    for rank, name in enumerate(ranks):
        for held, called, before, after in (
            (residents, "slot", ("fetched", colours.FETCHED), ("resident", colours.RESIDENT)),
            (gradients, "gradients", ("accumulated", colours.ACCUMULATED), ("stored", colours.STORED)),
        ):
            own = [each for each in held if each.rank == rank]
            for each in own:
                line = len(names) + each.line
                for (gid, colour), *times in ((before, each.start, each.turn), (after, each.turn, each.end)):
                    panel.bars.append(Bar(line, *times, colour, gid))
                panel.labels.append((line, each.start, each.end, str(each.stage)))
            places = [f"{called} {line}" for line in range(1 + max((each.line for each in own), default=0))]
            names += [f"{name}: {places[0]}", *places[1:]] if called == "slot" else places
    return panel


def saved_panel(scene: Scene) -> Panel:
    """A panel with the number of microbatches whose activations each rank holds over time, and its peak.

    For a rank with several stages, darker areas show the numbers of its first stages only.
    """
    timeline, names = scene.timeline, scene.names_of_rows
    title = "microbatches whose activations are saved, with the peak"
    if timeline.num_stages > timeline.num_ranks:
        title += "; over all stages of a rank, its first ones darker"
    if any(span.instruction.kind in MOVES for span in timeline.spans):
        title += " (a microbatch that is awaited from the pair has its memory already)"
    peaks = [timeline.peak_saved_on_rank(rank) for rank in range(len(names))]
    panel = Panel(title, 0.24, names, peaks=list(map(str, peaks)))
    for rank in range(len(names)):
        stages = timeline.stages_of(rank)
        for count in range(len(stages), 0, -1):
            events = timeline.saved_on_rank(rank, stages[:count])
            times = [0.0, *(time for time, _ in events), timeline.end]
            heights = [saved / (max(peaks) or 1) for saved in (0, *(saved for _, saved in events), 0)]
            colour = colours.SAVED[(len(stages) - count) % len(colours.SAVED)]
            panel.areas.append(Area(rank, times, [0.0] * len(times), heights, colour, "saved"))
    return panel


def memory_panel(scene: Scene, curves: Sequence[MemoryCurve]) -> Panel:
    """A panel with the memory of each rank by parts, on one scale; parts of size 0 are not drawn."""
    peaks = [f"{curve.peak:.4g}" for curve in curves]
    panel = Panel("memory, with the peak", 0.36, scene.names_of_rows, peaks=peaks, peak="peak memory")
    highest = max(curve.peak for curve in curves) or 1.0
    for rank, curve in enumerate(curves):
        times = [*curve.times, max(scene.timeline.end, curve.times[-1])]
        low = [0.0] * len(times)
        for part in (each for each in colours.MEMORY if each in curve.parts):
            values = [*curve.parts[part], curve.parts[part][-1]]
            high = [below + value / highest for below, value in zip(low, values, strict=True)]
            if any(values):
                panel.areas.append(Area(rank, times, low, high, colours.MEMORY[part], f"memory {part}"))
            low = high
    return panel
