"""A placement as a record (the slot of each rank, and the ranks' traffic), as tables for a terminal, and as a picture.

The picture follows Figure 5 of the BPipe paper: one row per node, and one box per GPU with its rank and its place in
the model. The two stages of a pair have one colour. Dotted lines join the pairs: grey within a node, red across nodes.
If the traffic is known, bars show the time for which the busiest GPU (grey) and the busiest node's network (red) send
each kind of traffic.
"""

from collections.abc import Collection
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.documents.picture import new_figure, require_picture, save
from megatron.documents.tables import plain_table
from megatron.pipeline.placement.cost import Level, PlacementCost, pair_nodes, placement_cost
from megatron.pipeline.placement.mapping import Degrees, Mapping, inverse
from megatron.pipeline.placement.topology import Topology
from megatron.pipeline.placement.traffic import Traffic, TrafficKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table


# --- the record -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlacementReport:
    """A mapping on a topology, with its costs.

    Attributes:
        evictors: the stages that move activations.
        costs: costs by the name of the mapping: first of this mapping, then of the mappings that it is compared with.
            Empty if the traffic is not known because the model is not known.
    """

    name: str
    mapping: Mapping
    degrees: Degrees
    topology: Topology
    evictors: Collection[int]
    costs: Dictionary[str, PlacementCost]

    def to_dict(self) -> dict:
        """The whole report as a dictionary for JSON, in bytes and seconds."""
        slots = []
        for slot, rank in enumerate(self.mapping):
            node = self.topology.node_of_slot[slot]
            coordinates = self.degrees.coordinates(rank)
            slots.append(
                {"slot": slot, "node": self.topology.nodes[node].name, "gpu": slot - self.topology.first_slot(node),
                 "rank": rank, "tensor": coordinates.tensor, "data": coordinates.data, "stage": coordinates.stage}
            )  # fmt: skip
        pairs = [
            {"evictor": pair.evictor, "acceptor": pair.acceptor, "moves_activations": pair.evictor in self.evictors,
             "num_rank_pairs": len(pair.nodes), "num_crossing": pair.num_crossing}
            for pair in pair_nodes(self.mapping, self.degrees, self.topology.node_of_slot)
        ]  # fmt: skip
        return {
            "mapping": self.name,
            "degrees": {"tensor": self.degrees.tensor, "pipeline": self.degrees.pipeline, "data": self.degrees.data},
            "ranks_by_slot": list(self.mapping),
            "slots": slots,
            "pairs": pairs,
            "traffic_per_iteration": [
                {"kind": kind.value, "level": level.value, **vars(cost.at(kind, level))}
                for cost in list(self.costs.values())[:1]
                for kind in TrafficKind
                for level in Level
            ],
            "total_transfer_seconds": {name: cost.total_seconds for name, cost in self.costs.items()},
        }


def make_report(
    name: str,
    mapping: Mapping,
    degrees: Degrees,
    topology: Topology,
    *,
    evictors: Collection[int],
    traffic: Traffic | None = None,
    others: Dictionary[str, Mapping] | None = None,
) -> PlacementReport:
    """Report on `mapping`, compared with the mappings `others`, by name. Without `traffic` the report has no costs."""
    compared = {name: mapping, **{key: each for key, each in (others or {}).items() if key != name}}
    costs = {}
    if traffic is not None:
        costs = {key: placement_cost(each, degrees, traffic, topology) for key, each in compared.items()}
    return PlacementReport(
        name=name, mapping=mapping, degrees=degrees, topology=topology, evictors=evictors, costs=costs
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def label(rank: int, degrees: Degrees) -> str:
    """A rank and its place in the model with the names of Figure 6, such as `3: PP 1 TP 1`.

    Degrees of 1 are left out.
    """
    coordinates = degrees.coordinates(rank)
    parts = (
        ("PP", coordinates.stage, degrees.pipeline),
        ("DP", coordinates.data, degrees.data),
        ("TP", coordinates.tensor, degrees.tensor),
    )
    return f"{rank}: " + " ".join(f"{name} {value}" for name, value, size in parts if size > 1)


def tables(report: PlacementReport, *, plain: bool, max_nodes: int | None = None) -> "list[tuple[str, Table]]":
    """The title and table of each part of a report.

    Args:
        plain: whether to make tables without lines and colours.
        max_nodes: number of nodes whose ranks are shown; None: all nodes.
    """
    degrees = report.degrees
    title = f"{report.name}: tensor {degrees.tensor} x pipeline {degrees.pipeline} x data {degrees.data}"
    columns, rows = _ranks_by_node(report, max_nodes)
    made = [(title, plain_table(columns, rows, plain=plain, left=columns))]
    others = {}
    if report.degrees.pipeline > 1:
        others["pairs of stages"] = _pairs(report)
    if report.costs:
        others["traffic of an iteration"] = _traffic(report)
        seconds = [(name, f"{cost.total_seconds:.4f}") for name, cost in report.costs.items()]
        others["sum over all transfers of an iteration"] = ("mapping", "seconds"), seconds
    for title, (columns, rows) in others.items():
        made.append((title, plain_table(columns, rows, plain=plain, left=columns[:1])))
    return made


_Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]  # headings, and texts below them


def _ranks_by_node(report: PlacementReport, max_nodes: int | None) -> _Rows:
    topology, rows, first = report.topology, [], 0
    for node in topology.nodes[:max_nodes]:
        ranks = report.mapping[first : first + node.gpus]
        rows.append((node.name, *(label(rank, report.degrees) for rank in ranks)))
        first += node.gpus
    return ("node", *(f"GPU {gpu}" for gpu in range(max(node.gpus for node in topology.nodes)))), rows


def _pairs(report: PlacementReport) -> _Rows:
    return ("stages", "activations", "cross a node"), [
        (
            f"{pair.evictor} and {pair.acceptor}", "move" if pair.evictor in report.evictors else "stay",
            f"{pair.num_crossing} of {len(pair.nodes)}",
        )
        for pair in pair_nodes(report.mapping, report.degrees, report.topology.node_of_slot)
    ]  # fmt: skip


def _traffic(report: PlacementReport) -> _Rows:
    cost, rows = report.costs[report.name], []
    for kind in TrafficKind:
        found = [cost.at(kind, level) for level in (Level.WITHIN_NODE, Level.BETWEEN_NODES)]
        texts = ((f"{each.total_bytes / 1e9:.3f}", f"{1e3 * each.busiest_seconds:.2f}") for each in found)
        rows.append((kind.value, *(text for pair in texts for text in pair)))
    return ("kind", "within nodes, GB", "busiest GPU, ms", "between nodes, GB", "busiest node, ms"), rows


MAX_NODES = 64
_BOX, _ROW = 0.95, 1.35  # inches from box to box, and from node to node
_BARS = 2.4  # inches
_WITHIN, _CROSSING, _INK = "#666666", "#c8102e", "#1a1a1a"


def draw_placement(report: PlacementReport, path: str | Path | None = None) -> "Figure":
    """Draw a report, and write the figure to `path` unless it is None.

    The suffix of `path` (.png, .svg, .pdf) decides the format. The lines that join pairs have the gid "pair" or
    "pair-crossing". Raises ValueError for more than 64 nodes, or for a suffix that is not an image format.
    """
    topology = report.topology
    num_nodes, widest = len(topology.nodes), max(node.gpus for node in topology.nodes)
    if num_nodes > MAX_NODES:
        raise ValueError(f"{num_nodes} nodes are too many for a picture; draw at most {MAX_NODES}, or print the map")
    width, height = 1.2 + _BOX * max(widest, 4), 0.25 * _ROW + _ROW * num_nodes
    foot = _BARS if report.costs else 0.0
    if path is not None:
        require_picture(Path(path))
    figure = new_figure(width, height + foot)
    axes = figure.add_axes((0, foot / (height + foot), 1, height / (height + foot)))
    axes.set_xlim(-1.15, max(widest, 4) + 0.1)
    axes.set_ylim(num_nodes - 0.15, -0.4)
    axes.axis("off")
    corners = _corners(report)
    for slot, rank in enumerate(report.mapping):
        _draw_box(axes, report, rank, *corners[slot])
    for index, node in enumerate(topology.nodes):
        axes.text(-0.1, index + 0.25, node.name, ha="right", va="center", fontsize=9, color=_INK)
    _draw_pairs(axes, report, corners)
    degrees = report.degrees
    title = f"{report.name}: tensor {degrees.tensor} x pipeline {degrees.pipeline} x data {degrees.data}"
    axes.text(0.06, -0.2, title, fontsize=10, fontweight="bold", va="center", color=_INK)
    if report.costs:
        edge = 1.2 / width
        _draw_bars(
            figure.add_axes((edge, 0.45 / (height + foot), 0.97 - edge, (foot - 0.75) / (height + foot))), report
        )
    if path is not None:
        save(figure, Path(path), dpi=140)
    return figure


def _corners(report: PlacementReport) -> list[tuple[float, float]]:
    """The upper left corner of each slot's box: x in boxes, y in rows."""
    return [(gpu, index) for index, node in enumerate(report.topology.nodes) for gpu in range(node.gpus)]


def _draw_box(axes: "Axes", report: PlacementReport, rank: int, x: float, y: float) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import FancyBboxPatch

    degrees, coordinates = report.degrees, report.degrees.coordinates(rank)
    pair = min(coordinates.stage, degrees.pipeline - 1 - coordinates.stage)
    colour = colormaps["Pastel1" if degrees.pipeline <= 18 else "tab20"](pair % (9 if degrees.pipeline <= 18 else 20))
    axes.add_patch(
        FancyBboxPatch(
            (x + 0.06, y), 0.88, 0.5, boxstyle="round,pad=0,rounding_size=0.06", facecolor=colour, edgecolor=_INK,
            linewidth=0.7,
        )
    )  # fmt: skip
    axes.text(
        x + 0.5, y + 0.14, f"stage {coordinates.stage}", ha="center", va="center", fontsize=8.5, fontweight="bold"
    )
    parts = [f"DP {coordinates.data}"] * (degrees.data > 1) + [f"TP {coordinates.tensor}"] * (degrees.tensor > 1)
    axes.text(x + 0.5, y + 0.28, " ".join(parts), ha="center", va="center", fontsize=7)
    axes.text(x + 0.5, y + 0.41, f"rank {rank}", ha="center", va="center", fontsize=7, color="#555555")


def _draw_pairs(axes: "Axes", report: PlacementReport, corners: list[tuple[float, float]]) -> None:
    from matplotlib.patches import FancyArrowPatch

    degrees, slots = report.degrees, inverse(report.mapping)
    for rank in range(degrees.world_size):
        coordinates = degrees.coordinates(rank)
        other = degrees.pipeline - 1 - coordinates.stage
        if coordinates.stage >= other:
            continue
        ends = [slots[rank], slots[degrees.rank(tensor=coordinates.tensor, data=coordinates.data, stage=other)]]
        (x0, y0), (x1, y1) = sorted((corners[slot] for slot in ends), key=lambda corner: corner[1])
        crosses = y0 != y1
        bend = 0.0 if crosses else 0.5 / (min(x0 - x1, -2) if x1 > x0 else max(x0 - x1, 2))
        axes.add_patch(
            FancyArrowPatch(
                (x0 + 0.5, y0 + 0.5), (x1 + 0.5, y1 if crosses else y1 + 0.5), arrowstyle="-", linestyle=":",
                connectionstyle=f"arc3,rad={-bend}", color=_CROSSING if crosses else _WITHIN, linewidth=1.3,
                gid="pair-crossing" if crosses else "pair",
            )
        )  # fmt: skip


def _draw_bars(axes: "Axes", report: PlacementReport) -> None:
    """Draw bars of the milliseconds of an iteration, by kind and level of traffic."""
    cost = report.costs[report.name]
    kinds = [kind for kind in TrafficKind if any(cost.at(kind, level).total_bytes for level in Level)]
    for index, kind in enumerate(kinds):
        for level, colour, offset in ((Level.WITHIN_NODE, _WITHIN, -0.2), (Level.BETWEEN_NODES, _CROSSING, 0.2)):
            found = cost.at(kind, level)
            milliseconds = 1e3 * found.busiest_seconds
            label = level.value if index == 0 else None
            axes.barh(
                index + offset, milliseconds, height=0.36, color=colour, label=label, gid=f"{kind.value}, {level.value}"
            )
            if found.total_bytes:
                text = f" {milliseconds:,.1f} ms, {found.total_bytes / 1e9:,.1f} GB in all"
                axes.text(milliseconds, index + offset, text, va="center", fontsize=7, color=_INK)
    axes.set_yticks(range(len(kinds)), [kind.value for kind in kinds], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("ms of an iteration that the busiest GPU or node's network sends", fontsize=8)
    axes.tick_params(labelsize=8, length=2)
    if kinds:
        axes.legend(fontsize=7.5, frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
