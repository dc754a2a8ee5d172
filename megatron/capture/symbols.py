"""Sizes that depend on the batch, read off the batch itself.

Each size in a captured graph is an operator that asks some tensor for it, often an activation, so that other stages
would have to be told a number. Where the size is a dimension of the batch, it is asked of the batch's tensor: then it
depends on data only, and each stage asks for itself.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def ask_batch_for_sizes(graph: fx.Graph) -> None:
    """Replace every size that equals a dimension of an input by that dimension, asked at the start of the graph."""
    inputs = [
        node for node in graph.nodes if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    dimensions = {}
    for node in reversed(inputs):
        for dimension, size in reversed(list(enumerate(node.meta["val"].shape))):
            if isinstance(size, torch.SymInt):
                dimensions[str(size.node.expr)] = node, dimension
    asked: dict[str, fx.Node] = {}
    last_input = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt):
            continue
        size = str(value.node.expr)
        if size not in dimensions:
            continue
        if size not in asked:
            tensor, dimension = dimensions[size]
            with graph.inserting_after(last_input):
                asked[size] = graph.call_function(aten.sym_size.int, (tensor, dimension))
            asked[size].meta = {"val": value}
        if node is not asked[size]:
            node.replace_all_uses_with(asked[size])
            graph.erase_node(node)


def is_size(node: fx.Node) -> bool:
    """Whether the node's value is a number that depends on the batch's shape."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
