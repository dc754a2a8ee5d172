"""The colours and signs of a drawing, and the legend that explains those that it uses."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.pipeline.draw.cells import Cell, holds_of, predictions_of, steps_of
from megatron.pipeline.program.instruction import (
    COMPUTATIONS,
    HOST_WORDS,
    OWN_MOVES,
    REDUCTIONS,
    SENDS,
    STASH_WORDS,
    Kind,
    Lane,
)
from megatron.pipeline.simulate.memory_curve import MemoryCurve
from megatron.pipeline.simulate.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHADES = {  # by a word's colour, lightest to darkest; weight versions, or the stages of a rank, take them in turn
    "blue": ("#c6dcf4", "#8fb9e6", "#5b94d3", "#3873b8"),
    "green": ("#cde9c6", "#98d08c", "#66b35c", "#3d9140"),
    "olive": ("#e4efb4", "#cbdf7c", "#adc74d", "#8aa62c"),
    "purple": ("#e2d3ee", "#c5a6de", "#a67bc9", "#8457ae"),
    "grey": ("#e0e0e0", "#c2c2c2", "#9b9b9b", "#757575"),
}
BUBBLE, EDGE, INK, LIGHT_INK = "#d9d9d9", "#ffffff", "#1a1a1a", "#ffffff"
STEP, HATCH, BORDER = "#c8102e", "#1f5c22", "#222222"
PREDICTION, HOLD = "#00727a", "#63b5ba"
TRANSFER, REDUCTION = "#555555", "#e58a00"
SAVED = ("#f2b66d", "#dd9437", "#bb741a", "#8f5510")  # of all stages of a rank, then of fewer and fewer
CRITICAL = "#a3009a"
HOST_LANES = {Lane.H2D: "#8fb9e6", Lane.D2H: "#98d08c", Lane.HOST: "#e9a3a3"}
STASHED = {Lane.H2D: "#3f6fa8", Lane.D2H: "#4b8a3d"}  # inputs in the same lanes
RESIDENT, FETCHED = "#b9a3d6", "#e2d3ee"
ACCUMULATED, STORED = "#98d08c", "#dcefd7"
MEMORY = {  # by the part of a memory curve
    "optimizer": "#b9b9b9",
    "weights": "#7c97c4",
    "gradients": "#8dbb86",
    "activations": "#f2b66d",
    "deferred": "#cbdf7c",
    "transfers": "#c65b52",
}
MOVE_COLOURS = {-1: "#b3261e", +1: "#1456a0"}  # by what the move does to what the evictor saves


def shade_of(kind: Kind, shade: int) -> str:
    return SHADES[kind.row.colour][shade % 4]


def ink_on(shade: int) -> str:
    """The colour of writing that is legible on a shade."""
    return LIGHT_INK if shade % 4 == 3 else INK


def legend_entries(timelines: list[Timeline], all_cells: list[list[Cell]], *, lanes: bool) -> list[tuple]:
    """Handles and labels for what is drawn; a kind has one swatch for each shade, with its weights or stages."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[tuple] = []
    for kind in (each for each in Kind if each in COMPUTATIONS):
        name = kind.row.name
        drawn = [cell for cells in all_cells for cell in cells if cell.kind is kind]
        chunks = dict(sorted((cell.chunk, cell.shade) for cell in drawn if cell.chunk is not None))
        if chunks:
            swatches = tuple(Patch(facecolor=shade_of(kind, shade)) for shade in list(chunks.values())[:4])
            entries.append((swatches, f"{name}, first to last stage of the rank"))
        versions = {cell.version for cell in drawn if cell.chunk is None}
        known = sorted(version for version in versions if version is not None)
        if known:
            named = ", ".join(f"v{version}" for version in known[:4]) + ", ..." * (len(known) > 4)
            swatches = tuple(Patch(facecolor=shade_of(kind, version)) for version in known[:4])
            entries.append((swatches, f"{name} with weights {named}"))
        elif versions:
            entries.append(((Patch(facecolor=shade_of(kind, 0)),), name))
    if any(cell.completes_batch for cells in all_cells for cell in cells):
        hatched = Patch(facecolor=shade_of(Kind.BACKWARD, 0), edgecolor=HATCH, hatch="xxxx", linewidth=0)
        entries.append(((hatched,), "completes the batch's gradient"))
    if any(map(steps_of, timelines)):
        entries.append(((Patch(facecolor=STEP),), "optimizer step; makes weights Wn"))
    if any(map(predictions_of, timelines)):
        line = Line2D([], [], color=PREDICTION, marker="|", markersize=8, markeredgewidth=1.6, linestyle="none")
        entries.append(((line,), "prediction ~n of weights Wn"))
    if any(map(holds_of, timelines)):
        entries.append(((Patch(facecolor=HOLD),), Kind.HOLD.row.name))
    entries.append(((Patch(facecolor=BUBBLE),), "bubble"))
    moving = {span.instruction.kind for timeline in timelines for span in timeline.spans} & OWN_MOVES
    for kind in (each for each in Kind if each in moving):
        entries.append(((Line2D([], [], color=MOVE_COLOURS[kind.row.saved], linewidth=1.4),), kind.row.name))
    if lanes:
        timed = {span.instruction.kind for timeline in timelines for span in timeline.spans if span.end > span.start}
        if timed & SENDS:
            entries.append(((Line2D([], [], color=TRANSFER, linewidth=0.8),), "transfer"))
        if timed & REDUCTIONS:
            entries.append(((Patch(facecolor=REDUCTION),), "reduction in the background"))
        carried = (each for each in Kind if each in timed & HOST_WORDS)
        entries += [((Patch(facecolor=host_colour(kind)),), kind.row.name) for kind in carried]
    return entries


def host_colour(kind: Kind) -> str:
    """The colour of a word to or from the host."""
    return (STASHED if kind in STASH_WORDS else HOST_LANES)[kind.row.lane]


def more_entries(*, is_critical: bool, curves: Sequence[Sequence[MemoryCurve] | None]) -> list[tuple]:
    """Handles and labels for a critical path, and for the parts of memory that anybody holds."""
    from matplotlib.patches import Patch

    entries: list[tuple] = []
    if is_critical:
        framed = Patch(facecolor="none", edgecolor=CRITICAL, linewidth=1.6)
        entries.append(((framed,), "critical path"))
    held = {part for each in curves if each for curve in each for part, values in curve.parts.items() if any(values)}
    entries += [((Patch(facecolor=colour),), part) for part, colour in MEMORY.items() if part in held]
    return entries


def draw_legend(figure: "Figure", entries: list[tuple], *, num_columns: int, left: float) -> None:
    """Put the legend at the foot of the figure, `left` from its edge as a share of its width."""
    from matplotlib.legend_handler import HandlerTuple

    figure.legend(
        handles=[handle for handle, _ in entries],
        labels=[label for _, label in entries],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="lower left",
        bbox_to_anchor=(left, 0.0),
        ncols=num_columns,
        fontsize=7.5,
        frameon=False,
        handlelength=2.2,
        handleheight=1.0,
        columnspacing=1.6,
        borderaxespad=0.3,
    )
