"""The properties of a node of a captured graph: its module, the memory that it shares, and whether gradients pass it.

An operator may return a view of its input, and another operator may write through that view. The operators' schemas
describe most of this; a table adds what the schemas of a few operators leave out. Higher-order operators (a part of
the model under ``torch.no_grad`` or ``torch.autocast``) have no schema, so their own graphs are searched.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Set

import torch
from torch import fx
from torch._higher_order_ops.wrap import wrap_with_set_grad_enabled  # torch 2.6 registers it by this import alone

from megatron.capture import randomness
from megatron.capture.wrapper import MODEL
from megatron.pipeline.runtime.contract.tensors import has_gradients


def without_model(name: str) -> str:
    """The model's own name for a name in the captured graph: ``encoder.embed`` for ``model.encoder.embed``."""
    return name.removeprefix(f"{MODEL}.")


def modules_of(node: fx.Node) -> list[tuple[str, str]]:
    """The modules that contain the operator, outermost first: (path in the model, name of the class).

    The model itself has the path ``""``.
    """
    found = []
    for path, kind in node.meta.get("nn_module_stack", {}).values():
        path = path.removeprefix("L['self'].").removeprefix("L['self']")
        if path == MODEL or path.startswith(f"{MODEL}."):
            name = kind if isinstance(kind, str) else kind.__name__
            found.append((without_model(path) if path != MODEL else "", name.rpartition(".")[2]))
    return found


def place_of(node: fx.Node) -> str:
    """The innermost module of the operator as text, such as ``encoder.bn1 (BatchNorm2d)``."""
    modules = modules_of(node)
    return named(*modules[-1]) if modules else "the loss"


def named(path: str, kind: str) -> str:
    """A module as text: its path and, in brackets, its class; the model itself has no path."""
    return f"{path} ({kind})" if path else kind


def attribute(root: torch.nn.Module, name: str) -> object:
    """The attribute of `root` with a dotted name."""
    return operator.attrgetter(name)(root)


def parameter_of(graph_module: fx.GraphModule, node: fx.Node) -> torch.nn.Parameter | None:
    """The parameter that a node reads; None for a node that reads none."""
    value = attribute(graph_module, node.target) if node.op == "get_attr" else None
    return value if isinstance(value, torch.nn.Parameter) else None


def reached(nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """Yield `nodes` and all nodes to which `following` leads from a yielded node, each once."""
    wanted, seen = list(nodes), set()
    while wanted:
        node = wanted.pop()
        if node not in seen:
            seen.add(node)
            yield node
            wanted += following(node)


def on_device(arguments: object, device: torch.device) -> object:
    """An operator's arguments with `device` in the place of every device."""
    return fx.node.map_aggregate(arguments, lambda each: device if isinstance(each, torch.device) else each)


aten = torch.ops.aten

_WITHOUT_GRADIENT = {
    aten.detach.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.empty_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty.default,
}  # fmt: skip


def differentiable(graph_module: fx.GraphModule) -> frozenset[fx.Node]:
    """The nodes whose results need a gradient: trained parameters, and operators of a floating or complex dtype that
    depend on a trained parameter, or share memory into which such a result is written, unless gradients are switched
    off for the operator.
    """
    found: set[fx.Node] = set()
    while True:
        before = len(found)
        for node in graph_module.graph.nodes:
            if _needs_gradient(graph_module, node, found):
                found.add(node)
        wanted = [target for node in found for target in written_by(node)]  # the memory has what was written into it
        while wanted:
            target = wanted.pop()
            if target.op == "call_function" and target not in found:
                found.add(target)
                wanted += aliased_by(target)
        if len(found) == before:
            return frozenset(found)


def _needs_gradient(graph_module: fx.GraphModule, node: fx.Node, found: Set[fx.Node]) -> bool:
    if node.op == "get_attr":
        value = attribute(graph_module, node.target)
        return isinstance(value, torch.Tensor) and value.requires_grad
    if node.op != "call_function" or found.isdisjoint(node.all_input_nodes) or node.target in _WITHOUT_GRADIENT:
        return False
    if node.target is wrap_with_set_grad_enabled and not node.args[0]:
        return False
    values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(value, torch.Tensor) and has_gradients(value.dtype) for value in values)


_RETURNS_ITS_INPUT = {  # operators that may return an input although their schemas do not say so
    aten.broadcast_tensors.default, aten.meshgrid.default, aten.meshgrid.indexing, aten.dropout.default,
    aten.feature_dropout.default,
}  # fmt: skip
_KEEPS_STATISTICS = {  # operator -> (arguments that it writes, the argument that turns this on); not in its schema
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
    """The nodes whose memory the operator's result may share."""
    if node.op != "call_function":
        return []
    if node.target in randomness.MAY_RETURN_INPUT:
        return [node.args[randomness.ARGUMENT]]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return [each for each in node.all_input_nodes if each not in parts_of(node)]
    if is_getitem(node) or node.target in _RETURNS_ITS_INPUT:
        return node.all_input_nodes
    return [each for argument, each in _arguments(node) if argument.alias_info]


def parts_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that read the graph modules of a higher-order operator."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    return [each for each in node.all_input_nodes if each.op == "get_attr" and _is_part(each)]


def graph_modules_of(node: fx.Node) -> Iterator[fx.GraphModule]:
    """Yield the graph modules that a higher-order operator runs."""
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
    """Yield each node among an operator's arguments, also within lists, with the argument's entry in the schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for position, argument in enumerate(node.target._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for each in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(each, fx.Node):
                yield argument, each
