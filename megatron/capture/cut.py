"""The cut of a captured model into stages: one graph for each stage, with the tensors that it receives and sends.

An assignment of operators to stages can be cut if the stages can be numbered in an order in which they can run; stages
need not be contiguous. Free operators are copied into each stage that needs them (see `blocks`). A shared parameter
belongs to the first stage that uses it. The other stages receive it as a tensor, so its gradients come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from megatron.capture.blocks import Crossings, crossings, written_groups
from megatron.capture.export import Captured
from megatron.capture.nodes import attribute, without_model
from megatron.capture.randomness import DRAW
from megatron.capture.stage import CapturedStage, EdgeTensor

aten = torch.ops.aten


def cut(
    captured: Captured,
    stage_of_node: Mapping[int, int],
    *,
    relay: bool = True,
    device: torch.device | str | None = None,
    only: Iterable[int] | None = None,
) -> dict[int, CapturedStage]:
    """Cut a captured model.

    Args:
        captured: the captured model. Its parameters become the parameters of the stages.
        stage_of_node: number of operator -> stage, from 0 without gaps. A stage may need only earlier stages.
        relay: whether stages pass on a tensor that several stages need; False: the making stage sends it to each.
        device: the device of tensors that the graph itself makes; None: the device of the capture.
        only: the stages to build; None: all.

    Returns stage -> module. Raises ValueError, with the reason, for an assignment that cannot be run.
    """
    plan = crossings(captured, stage_of_node, relay=relay)
    groups = [set(members) for members in written_groups(captured.nodes)]
    return {
        stage: _Cutter(captured, plan, groups, stage, device).stage()
        for stage in (range(plan.num_stages) if only is None else sorted(only))
    }


class _Cutter:
    """Builds the graph of one stage."""

    def __init__(self, captured: Captured, plan: Crossings, groups, stage: int, device) -> None:
        self._captured = captured
        self._plan = plan
        self._index = stage
        self._device = None if device is None else torch.device(device)
        self._members = _members(captured, plan, groups, stage)
        self._graph = fx.Graph()
        self._made: dict[fx.Node | str, fx.Node] = {}  # by operator of the whole graph, or name of a parameter
        self._wire: dict[fx.Node | str, fx.Node] = {}  # the same keys -> the contiguous tensor that is sent
        self._values: dict[str, object] = {}
        self._parameters: dict[str, tuple[str, ...]] = {}

    def stage(self) -> CapturedStage:
        captured, plan, index = self._captured, self._plan, self._index
        others = [stage for stage in range(plan.num_stages) if stage != index]
        received = {stage: sent for stage in others if (sent := plan.sent(stage, index))}
        given = {stage: sent for stage in others if (sent := plan.sent(index, stage))}
        needed = {source for node in self._members for source in node.all_input_nodes if source.op == "placeholder"}
        placeholders = [node for node in captured.graph_module.graph.nodes if node in needed]
        for node in placeholders:
            self._made[node] = self._graph.placeholder(node.target)
        for keys in received.values():
            for key in keys:
                self._wire[key] = self._graph.placeholder(f"{_name(key).replace('.', '_')}_received")
        for key in list(self._wire):
            self._made[key] = self._from_wire(key)
        for node in self._members:
            if node not in self._made:
                copied = self._graph.node_copy(node, self._copied)
                self._made[node] = self._moved(copied)
        for keys in given.values():
            for key in keys:
                if key not in self._wire:
                    self._wire[key] = self._to_wire(key)
        has_loss = plan.stage_of[captured.loss] == index
        results = tuple(name for name, node in captured.kept.items() if plan.stage_of.get(node) == index)
        outputs = [self._wire[key] for keys in given.values() for key in keys]
        outputs += [self._made[captured.loss]] if has_loss else []
        outputs += [self._made[captured.kept[name]] for name in results]
        self._graph.output(tuple(outputs))
        return CapturedStage(
            self._graph,
            self._values,
            index=index,
            draws=any(node.target == DRAW for node in placeholders),
            inputs=tuple(node.target for node in placeholders if node.target != DRAW),
            sources={stage: tuple(self._described(key) for key in keys) for stage, keys in received.items()},
            targets={stage: tuple(self._described(key) for key in keys) for stage, keys in given.items()},
            has_loss=has_loss,
            results=results,
            names=self._parameters,
            persistent=captured.persistent,
        )

    def _copied(self, node: fx.Node) -> fx.Node:
        """The copy of an operator's input in this stage's graph."""
        if node.op != "get_attr":
            return self._made[node]
        name = without_model(node.target)
        value = attribute(self._captured.graph_module, node.target)
        if not isinstance(value, torch.nn.Parameter):
            return self._read(name, value)
        if name not in self._made:
            self._made[name] = self._read(name, value)
            self._parameters[name] = self._captured.names[name]
        return self._made[name]

    def _read(self, name: str, value: object) -> fx.Node:
        self._values[name] = value
        return self._graph.get_attr(name)

    def _moved(self, node: fx.Node) -> fx.Node:
        """Replace the devices in an operator's arguments, and return the operator."""
        if self._device is not None:
            node.args = fx.node.map_aggregate(node.args, self._on_device)
            node.kwargs = fx.node.map_aggregate(node.kwargs, self._on_device)
        return node

    def _on_device(self, argument: object) -> object:
        return self._device if isinstance(argument, torch.device) else argument

    def _described(self, key: fx.Node | str) -> EdgeTensor:
        if isinstance(key, str):
            value = self._captured.parameters[key]
            return EdgeTensor(key, tuple(value.shape), value.dtype, value.requires_grad, self._plan.owner[key])
        value = key.meta["val"]
        order = _order(value)
        sizes = tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in value.shape)
        sizes = sizes if order is None else tuple(sizes[dimension] for dimension in order)
        return EdgeTensor(key.name, sizes, value.dtype, key in self._plan.differentiable)

    def _to_wire(self, key: fx.Node | str) -> fx.Node:
        """The contiguous tensor to send. A dense tensor in another layout is sent in its order in memory."""
        if isinstance(key, str):
            return self._made[key]
        made = self._made[key]
        order = _order(key.meta["val"])
        if order is not None:
            made = self._graph.call_function(aten.permute.default, (made, order))
        return self._graph.call_function(aten.contiguous.default, (made,))

    def _from_wire(self, key: fx.Node | str) -> fx.Node:
        order = None if isinstance(key, str) else _order(key.meta["val"])
        if order is None:
            return self._wire[key]
        back = sorted(range(len(order)), key=order.__getitem__)
        return self._graph.call_function(aten.permute.default, (self._wire[key], back))


def _members(captured: Captured, plan: Crossings, groups, stage: int) -> list[fx.Node]:
    """The stage's operators, and all free operators that they need, in the captured order.

    An operator that needs memory that is written also needs the operators that write it.
    """
    found: set[fx.Node] = set()
    wanted = [node for node, at in plan.stage_of.items() if at == stage]
    while wanted:
        node = wanted.pop()
        if node in found:
            continue
        found.add(node)
        wanted += [source for source in node.all_input_nodes if source in plan.free]
        if node in plan.free:
            wanted += [each for members in groups if node in members for each in members]
    return [node for node in captured.nodes if node in found]


def _name(key: fx.Node | str) -> str:
    return key if isinstance(key, str) else key.name


def _order(value: torch.Tensor) -> list[int] | None:
    """The dimensions by descending stride, if `value` is dense and this is not their own order; otherwise None."""
    if value.is_contiguous():
        return None
    strides = [_hint(stride) for stride in value.stride()]
    order = sorted(range(value.dim()), key=lambda dimension: -strides[dimension])
    expected = 1
    for dimension in reversed(order):
        size = _hint(value.shape[dimension])
        if size != 1 and strides[dimension] != expected:
            return None  # not dense: the strides leave gaps, or repeat elements
        expected *= size
    return None if order == sorted(order) else order


def _hint(size: int | torch.SymInt) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size
