"""The cut of a captured model into stages: modules that take and return the tensors of their edges.

An assignment of operators to stages can be cut if the stages can be numbered in an order in which they can run; stages
need not be contiguous. Free operators are copied into each stage that needs them (see `blocks`). A shared parameter
belongs to the first stage that uses it. The other stages receive it as a tensor, so its gradients come back. A frozen
parameter belongs to each stage that uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

import sympy
import torch
from torch import Tensor, fx

from megatron.capture.blocks import Crossings, crossings, written_groups
from megatron.capture.decisions import as_decided
from megatron.capture.export import Captured
from megatron.capture.nodes import attribute, on_device, reached, without_model
from megatron.capture.randomness import DRAW, Draw


@dataclass(frozen=True, slots=True)
class EdgeTensor:
    """A tensor that one stage sends to another.

    Attributes:
        name: the name of the operator that makes it, or of the parameter in the model.
        sizes: its dimensions; a dimension that depends on the batch is an expression.
        dtype: the dtype of the tensor and of its gradient.
        has_gradient: whether a gradient is sent back.
        owner: for a shared parameter, which changes only with the version of the weights, the stage that steps it;
            None for a tensor that each microbatch makes.
        shape: its dimensions; a dimension that depends on the batch is None.
    """

    name: str
    sizes: tuple[int | sympy.Expr, ...]
    dtype: torch.dtype
    has_gradient: bool
    owner: int | None = None

    @property
    def shape(self) -> tuple[int | None, ...]:
        return tuple(size if isinstance(size, int) else None for size in self.sizes)

    def shape_at(self, sizes: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
        """The tensor's shape for a batch. `sizes`: the result of `Captured.sizes_of` for that batch."""
        return tuple(size if isinstance(size, int) else int(size.subs(sizes)) for size in self.sizes)


@dataclass(frozen=True, slots=True)
class StageData:
    """The data of a microbatch that a stage does not receive from other stages.

    Attributes:
        tensors: the microbatch's tensors by name; the stage reads what it needs.
        draw: the source of random numbers; None if nothing is random.
        weight: the weight of the microbatch's mean loss in the mean over its batch; weights are 1 on average.
    """

    tensors: Mapping[str, Tensor]
    draw: Draw | None = None
    weight: float = 1.0


class CapturedStage(torch.nn.Module):
    """Stage `index` of a cut model, with its parameters under the model's names for them.

    Args:
        graph: the stage's graph. Its inputs are `DRAW` if `draws`, then `inputs`, then the tensors of `sources`. It
            returns the tensors of `targets`, the loss if `has_loss`, then `results`, as one flat tuple.
        values: name -> a value that the graph reads: a parameter, a constant (a buffer of the stage), or a part of the
            graph.
        draws: whether the graph takes a `Draw`.
        inputs: names of the batch's tensors that the stage reads.
        sources: stage -> the tensors that it sends to this stage.
        targets: stage -> the tensors that this stage sends to it.
        has_loss: whether this stage makes the loss.
        results: names of the kept results that this stage makes.
        names: name of each of the stage's parameters -> all names of the parameter in the model.
        persistent: names of the constants that checkpoints contain.
    """

    def __init__(
        self,
        graph: fx.Graph,
        values: Mapping[str, object],
        *,
        index: int,
        draws: bool,
        inputs: tuple[str, ...],
        sources: dict[int, tuple[EdgeTensor, ...]],
        targets: dict[int, tuple[EdgeTensor, ...]],
        has_loss: bool,
        results: tuple[str, ...],
        names: dict[str, tuple[str, ...]],
        persistent: Set[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.index, self.graph, self._draws, self.inputs = index, graph, draws, inputs
        self.sources, self.targets, self.has_loss, self.results, self.names = sources, targets, has_loss, results, names
        for name, value in values.items():
            _place(self, name, value, persistent=name in persistent)
        code = graph.python_code("self")
        namespace = dict(code.globals)
        exec(compile(code.src, f"<stage {index}>", "exec"), namespace)
        self._compute = namespace["forward"]

    def forward(
        self, data: StageData, inputs: Mapping[int, tuple[Tensor, ...]]
    ) -> tuple[dict[int, tuple[Tensor, ...]], Tensor | None]:
        """Compute one microbatch. Returns the tensors for each of `targets`, and the scalar loss or None; see `run`."""
        outputs, loss, _ = self.run(data, inputs)
        return outputs, loss

    def run(
        self, data: StageData, inputs: Mapping[int, tuple[Tensor, ...]]
    ) -> tuple[dict[int, tuple[Tensor, ...]], Tensor | None, dict[str, Tensor]]:
        """Compute one microbatch.

        `inputs`: stage -> the tensors that it sent, in the order of `sources`. Returns the tensors for each of
        `targets`, contiguous and in the autograd graph; the scalar loss or None; and the kept results by name.
        """
        given: list[object] = []
        if self._draws:
            assert data.draw is not None, "a stage with dropout is told who draws"
            given.append(replace(data.draw, training=self.training))
        given += [data.tensors[name] for name in self.inputs]
        for source in self.sources:
            given += inputs[source]
        made = iter(self._compute(self, *given))
        outputs = {target: tuple(next(made) for _ in tensors) for target, tensors in self.targets.items()}
        loss = next(made) if self.has_loss else None
        return outputs, loss, {name: next(made) for name in self.results}


def _place(root: torch.nn.Module, name: str, value: object, *, persistent: bool) -> None:
    """Register a value under a dotted name in `root`."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, torch.nn.Module())
        root = root._modules[part]
    assert not hasattr(root, last), f"two values are called {name}"
    if isinstance(value, torch.nn.Parameter):
        root.register_parameter(last, value)
    elif isinstance(value, Tensor):
        root.register_buffer(last, value, persistent=persistent)
    else:
        root.add_module(last, value)


aten = torch.ops.aten


def cut(
    captured: Captured,
    stage_of_node: Mapping[int, int],
    *,
    relay: bool = True,
    chain: bool = False,
    device: torch.device | str | None = None,
    only: Iterable[int] | None = None,
) -> dict[int, CapturedStage]:
    """Cut a captured model.

    Args:
        captured: the captured model. Its parameters become the parameters of the stages.
        stage_of_node: number of operator -> stage, from 0 without gaps. A stage may need only earlier stages.
        relay: whether stages pass on a tensor that several stages need; False: the making stage sends it to each.
        chain: whether tensors pass through all stages between, and stages have copies of shared parameters.
        device: the device of tensors that the graph itself makes; None: the device of the capture.
        only: the stages to build; None: all.

    Returns stage -> module. Raises ValueError, with the reason, for an assignment that cannot be run.
    """
    plan = crossings(captured, stage_of_node, relay=relay, chain=chain)
    groups = [set(members) for members in written_groups(captured.nodes)]
    return {
        stage: _Cutter(captured, plan, groups, stage, device).stage()
        for stage in (range(plan.num_stages) if only is None else sorted(only))
    }


class _Cutter:
    """Builds the graph of one stage."""

    def __init__(self, captured: Captured, plan: Crossings, groups, stage: int, device) -> None:
        self._captured, self._plan, self._index = captured, plan, stage
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
                self._made[node] = copied = self._graph.node_copy(node, self._copied)
                if self._device is not None:
                    copied.args = on_device(copied.args, self._device)
                    copied.kwargs = on_device(copied.kwargs, self._device)
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
        names = [node.target for node in placeholders]
        sources, targets = (
            {stage: tuple(map(self._described, keys)) for stage, keys in sent.items()} for sent in (received, given)
        )
        return CapturedStage(
            self._graph, self._values, index=index, draws=DRAW in names, has_loss=has_loss, results=results,
            inputs=tuple(name for name in names if name != DRAW), sources=sources, targets=targets,
            names=self._parameters, persistent=captured.persistent,
        )  # fmt: skip

    def _copied(self, node: fx.Node) -> fx.Node:
        """The copy of an operator's input in this stage's graph."""
        if node.op != "get_attr":
            return self._made[node]
        name = without_model(node.target)
        value = self._captured.parameter(node)
        if value is None:
            return self._read(name, attribute(self._captured.graph_module, node.target))
        if name not in self._made:
            if self._plan.owner[name] != self._index and name in self._plan.copies:
                value = torch.nn.Parameter(value.detach(), requires_grad=value.requires_grad)
            self._made[name] = self._read(name, value)
            self._parameters[name] = self._captured.names[name]
        return self._made[name]

    def _read(self, name: str, value: object) -> fx.Node:
        self._values[name] = value
        return self._graph.get_attr(name)

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
        made = self._made[key]
        if isinstance(key, str):
            return made
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

    An operator that needs memory that is written also needs the operators that write it. The stage with the loss checks
    the decisions by data.
    """

    def following(node: fx.Node) -> list[fx.Node]:
        written = [each for members in groups if node in members for each in members] if node in plan.free else []
        return written + [source for source in node.all_input_nodes if source in plan.free]

    wanted = [node for node, at in plan.stage_of.items() if at == stage]
    if stage == plan.stage_of[captured.loss]:
        wanted += [node for node in captured.nodes if node.target is as_decided]
    found = set(reached(wanted, following))
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
