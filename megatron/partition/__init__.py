"""Cutting a model's graph into pipeline stages, several on a device where that balances better (docs/partition.md).

Pure Python: neither torch nor megatron.core.
"""

from megatron.partition.compete import METHODS, Competition, Result, compete
from megatron.partition.graph import Device, Graph, Node, SharedParameters, Together, parse_graph, read_graph
from megatron.partition.objective import Partition, Valuation, evaluate

__all__ = [
    "METHODS",
    "Competition",
    "Device",
    "Graph",
    "Node",
    "Partition",
    "Result",
    "SharedParameters",
    "Together",
    "Valuation",
    "compete",
    "evaluate",
    "parse_graph",
    "read_graph",
]
