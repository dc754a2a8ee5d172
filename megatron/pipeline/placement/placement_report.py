"""A placement for people and programs: as a record that says who sits where and what is sent between them, and as
tables in the terminal.
"""

from collections.abc import Collection
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.documents.tables import plain_table
from megatron.pipeline.placement.cost import Level, PlacementCost, placement_cost
from megatron.pipeline.placement.degrees import Degrees
from megatron.pipeline.placement.mapping import Mapping
from megatron.pipeline.placement.pairs import pair_nodes
from megatron.pipeline.placement.topology import Topology
from megatron.pipeline.placement.traffic import Traffic, TrafficKind

if TYPE_CHECKING:
    from rich.table import Table


# --- the record -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlacementReport:
    """A mapping on a topology. `costs` holds, by name, this mapping's cost first and then those that it is compared
    with; empty where the model, and so its traffic, is not known. `evictors` are the stages that move activations."""

    name: str
    mapping: Mapping
    degrees: Degrees
    topology: Topology
    evictors: Collection[int]
    costs: Dictionary[str, PlacementCost]

    def to_dict(self) -> dict:
        """Everything, for JSON. Bytes, seconds and GB/s."""
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
    """Report on `mapping`, compared with `others` by name. Without `traffic` it holds no costs."""
    compared = {name: mapping, **{key: each for key, each in (others or {}).items() if key != name}}
    costs = {}
    if traffic is not None:
        costs = {key: placement_cost(each, degrees, traffic, topology) for key, each in compared.items()}
    return PlacementReport(
        name=name, mapping=mapping, degrees=degrees, topology=topology, evictors=evictors, costs=costs
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def label(rank: int, degrees: Degrees) -> str:
    """A rank and its place, with the names of Figure 6; what has only one value is left out: `3: PP 1 TP 1`."""
    coordinates = degrees.coordinates(rank)
    parts = (
        ("PP", coordinates.stage, degrees.pipeline),
        ("DP", coordinates.data, degrees.data),
        ("TP", coordinates.tensor, degrees.tensor),
    )
    return f"{rank}: " + " ".join(f"{name} {value}" for name, value, size in parts if size > 1)


def tables(report: PlacementReport, *, plain: bool, max_nodes: int | None = None) -> "list[tuple[str, Table]]":
    """Title and table of everything that a report holds; `plain` ones have neither lines nor colours.

    `max_nodes`: who sits where is shown for so many nodes; default: all.
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
