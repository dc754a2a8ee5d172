"""Through which operators of a captured graph gradients pass."""

from __future__ import annotations

import torch
from torch import fx

from megatron.capture.paths import attribute
from megatron.pipeline.runtime.contract.tensors import has_gradients

aten = torch.ops.aten

_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_WITHOUT_GRADIENT = {
    aten.detach.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.empty_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty.default,
}  # fmt: skip


def differentiable(graph_module: fx.GraphModule) -> frozenset[fx.Node]:
    """The nodes whose results need a gradient: parameters that are trained, and operators of a floating or complex
    dtype that depend on one, unless gradients are switched off there.
    """
    found: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value = attribute(graph_module, node.target)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                found.add(node)
        elif node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            if node.target in _WITHOUT_GRADIENT or (node.target is _SET_GRAD and not node.args[0]):
                continue
            values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
            if any(isinstance(value, torch.Tensor) and has_gradients(value.dtype) for value in values):
                found.add(node)
    return frozenset(found)
