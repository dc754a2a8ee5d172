"""A placement as a record for people and programs: who sits where, what crosses a node, how long it takes."""

from collections.abc import Collection
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass

from megatron.placement.cost import Level, PlacementCost, placement_cost
from megatron.placement.degrees import Degrees
from megatron.placement.mapping import Mapping
from megatron.placement.pairs import pair_nodes
from megatron.placement.topology import Topology
from megatron.placement.traffic import Traffic, TrafficKind


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
