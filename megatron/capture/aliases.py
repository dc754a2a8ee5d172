"""Which operators share memory, and which of them write into it.

An operator may return a view of what it was given, and another may write through it. What schemas say of that is
taken, and what they do not say of a few operators is a table here. Operators of higher order (a part of the model under
``torch.no_grad`` or ``torch.autocast``) have no schema: they are looked into.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from megatron.capture import randomness

aten = torch.ops.aten

_RETURNS_ITS_INPUT = {  # in some cases, and schemas do not say so
    aten.broadcast_tensors.default,
    aten.meshgrid.default,
    aten.meshgrid.indexing,
    aten.dropout.default,
    aten.feature_dropout.default,
}
_SEEDED = set(randomness.SEEDED.values())  # these do in an evaluation
_KEEPS_STATISTICS = {  # operator -> (arguments it writes, the argument by which it does; schemas do not say so)
    aten.batch_norm.default: ((3, 4), 5),
    aten.instance_norm.default: ((3, 4), 5),
}


def written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes into whose memory the operator writes."""
    if node.op != "call_function":
        return []
    if node.target is randomness.seeded_dropout_:
        return [node.args[randomness.ARGUMENT]]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        writes = any(written_by(inner) for module in graph_modules_of(node) for inner in module.graph.nodes)
        return [each for each in node.all_input_nodes if each not in parts_of(node)] if writes else []
    if node.target in _KEEPS_STATISTICS:
        statistics, flag = _KEEPS_STATISTICS[node.target]
        found = [node.args[position] for position in statistics] if node.args[flag] else []
        return [each for each in found if isinstance(each, fx.Node)]
    return [each for argument, each in _arguments(node) if argument.alias_info and argument.alias_info.is_write]


def aliased_by(node: fx.Node) -> list[fx.Node]:
    """The nodes of whose memory the operator's result may be a view."""
    if node.op != "call_function":
        return []
    if node.target in _SEEDED:
        return [node.args[randomness.ARGUMENT]]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return [each for each in node.all_input_nodes if each not in parts_of(node)]
    if is_getitem(node):
        return node.all_input_nodes
    if node.target in _RETURNS_ITS_INPUT:
        return node.all_input_nodes
    return [each for argument, each in _arguments(node) if argument.alias_info]


def parts_of(node: fx.Node) -> list[fx.Node]:
    """The graph modules that an operator of higher order runs, as nodes."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    return [each for each in node.all_input_nodes if each.op == "get_attr" and _is_part(each)]


def graph_modules_of(node: fx.Node) -> Iterator[fx.GraphModule]:
    """The graph modules that an operator of higher order runs."""
    for each in parts_of(node):
        yield each.graph.owning_module.get_submodule(each.target)


def _is_part(node: fx.Node) -> bool:
    module = node.graph.owning_module
    try:
        return isinstance(module.get_submodule(node.target), torch.nn.Module)
    except AttributeError:
        return False


def is_getitem(node: fx.Node) -> bool:
    """Whether the node takes one result of an operator that returns several."""
    return node.target is operator.getitem


def _arguments(node: fx.Node) -> Iterator[tuple[torch.Argument, fx.Node]]:
    """Each argument of an operator that is a node, or a list with nodes, with what its schema says of it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for position, argument in enumerate(node.target._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for each in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(each, fx.Node):
                yield argument, each
