"""The placement of ranks on GPUs: mappings from slots (node, GPU) to logical ranks, their costs, and pictures of them.

Pure Python: neither torch nor megatron.core. docs/placement.md shows how placements are used.
"""

from megatron.pipeline.placement.cost import Level, PlacementCost, placement_cost
from megatron.pipeline.placement.mapping import Degrees, Mapping, load_mapping, pair_adjacent, standard
from megatron.pipeline.placement.optimize import optimized
from megatron.pipeline.placement.topology import Bandwidth, Node, Topology, load_topology
from megatron.pipeline.placement.traffic import MessageCounts, Traffic, TrafficKind, count_transfers

__all__ = [
    "Bandwidth",
    "Degrees",
    "Level",
    "Mapping",
    "MessageCounts",
    "Node",
    "PlacementCost",
    "Topology",
    "Traffic",
    "TrafficKind",
    "count_transfers",
    "load_mapping",
    "load_topology",
    "optimized",
    "pair_adjacent",
    "placement_cost",
    "standard",
]
