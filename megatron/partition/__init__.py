"""The cut of a model's graph into pipeline stages, with several stages on a device if that balances better
(docs/partition.md).

Pure Python: neither torch nor megatron.core.
"""

from megatron.partition.compete import METHODS, CompeteResult, Competition, compete
from megatron.partition.graph import (
    Graph,
    GraphNode,
    Partition,
    PartitionDevice,
    SharedByNodes,
    Together,
    Valuation,
    evaluate,
    parse_graph,
    read_graph,
)

__all__ = [
    "METHODS", "CompeteResult", "Competition", "Graph", "GraphNode", "Partition", "PartitionDevice", "SharedByNodes",
    "Together", "Valuation", "compete", "evaluate", "parse_graph", "read_graph",
]  # fmt: skip
