"""A model with a loss as one graph of operators, whose parameters are the model's own."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, fx

from megatron.capture.differentiable import differentiable
from megatron.capture.paths import attribute, without_model
from megatron.capture.randomness import DRAW, Draw, seed_randomness
from megatron.capture.refusals import refuse_what_cannot_be_cut, sentence_of
from megatron.capture.symbols import ask_batch_for_sizes
from megatron.capture.wrapper import LossOnly

aten = torch.ops.aten

_ONLY_CHECKS = {  # what was true of the batch of the capture; sizes and devices of a run may differ
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
}


@dataclass(frozen=True)
class Captured:
    """A captured model.

    `graph_module`: the graph, and what it reads. Called with ``(draw, *tensors)``, without `draw` where nothing is
    random, it returns the loss and what was to be kept. `nodes`: its operators in an order in which they can run; an
    operator's number is its place there. `parameters`: name in the model -> the model's own parameter, each once.
    `names`: every name of each parameter, its own among them. `inputs`: names of the batch's tensors. `num_random`:
    how many operators draw numbers. `persistent`: names of the buffers that checkpoints have. `loss`, `kept`: the
    nodes that make the loss, and name -> what is wanted beside it.
    """

    model_name: str
    graph_module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    parameters: dict[str, torch.nn.Parameter]
    names: dict[str, tuple[str, ...]]
    inputs: tuple[str, ...]
    num_random: int
    persistent: frozenset[str]
    loss: fx.Node
    kept: dict[str, fx.Node]

    @property
    def all_names(self) -> frozenset[str]:
        """Of all parameters that operators read, and of the buffers that checkpoints have."""
        return self.persistent.union(*self.names.values())

    def run(self, batch: Mapping[str, Tensor], draw: Draw | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The whole model in one go: its loss, and what was to be kept. `draw`: needed where something is random."""
        first = (draw,) if self.num_random else ()
        loss, *kept = self.graph_module(*first, *(batch[name] for name in self.inputs))
        return loss, dict(zip(self.kept, kept, strict=True))

    def sizes_of(self, batch: Mapping[str, Tensor]) -> dict[sympy.Symbol, int]:
        """What decides the shapes of a batch -> its value for this one; for `EdgeTensor.shape_at`."""
        found = {}
        for node in self.graph_module.graph.nodes:
            if node.op == "placeholder" and node.target in batch:
                for size, value in zip(node.meta["val"].shape, batch[node.target].shape, strict=True):
                    if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                        found[size.node.expr] = value
        return found


def capture(
    model: torch.nn.Module,
    batch: Mapping[str, Tensor],
    *,
    loss: Callable[[object, Mapping[str, Tensor]], Tensor] | None = None,
    keep: Sequence[str] = (),
    dynamic_sequence: bool = False,
) -> Captured:
    """Capture `model` in training mode.

    Args:
        model: as the user has it. It keeps its mode, and its parameters become those of the graph.
        batch: name -> tensor [batch of 2 or more, ...], as the forward takes them. The graph runs with any batch, 1
            included. Values matter only where the forward decides by Python numbers.
        loss: scalar mean loss from the model's output and the batch; None: the model computes it from its labels.
        keep: fields of the output that are wanted beside the loss, such as ``logits``.
        dynamic_sequence: dimension 1 of every two-dimensional tensor may differ from batch to batch, too.

    Raises:
        ValueError: what cannot be captured or cut: the module, the reason and what to do.
    """
    for name, tensor in batch.items():
        if tensor.dim() == 0 or tensor.shape[0] < 2:
            raise ValueError(
                f"the batch to capture with has {name} of shape {tuple(tensor.shape)}; torch.export takes a dimension "
                "of 1 for a constant, so give two samples or more"
            )
    wrapper = LossOnly(model, tuple(batch), loss=loss, keep=keep)
    was_training = {module: module.training for module in model.modules()}
    if not model.training:
        model.train()
    try:
        graph_module = _exported(wrapper, dict(batch), dynamic_sequence)
    finally:
        for module, training in was_training.items():
            module.training = training
    graph = graph_module.graph
    ask_batch_for_sizes(graph)
    _drop_checks(graph_module)
    num_random = seed_randomness(graph, differentiable(graph_module))
    refuse_what_cannot_be_cut(graph)
    graph.eliminate_dead_code()
    _flatten_results(graph)
    names = _share_names(graph_module, model)
    graph_module = fx.GraphModule(graph_module, graph)  # without the hooks that compare batches with the capture's
    return _described(model, graph_module, tuple(batch), tuple(keep), names, num_random)


def _exported(wrapper: LossOnly, batch: dict[str, Tensor], dynamic_sequence: bool) -> fx.GraphModule:
    dynamic = torch.export.Dim.DYNAMIC
    shapes = {
        name: {0: dynamic, 1: dynamic} if dynamic_sequence and tensor.dim() == 2 else {0: dynamic}
        for name, tensor in batch.items()
    }
    said = io.StringIO()  # where it fails, torch.export prints all operators so far
    try:
        with contextlib.redirect_stderr(said):
            program = torch.export.export(wrapper, (), kwargs=batch, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise ValueError(sentence_of(error, wrapper.model)) from error
    sys.stderr.write(said.getvalue())
    return program.module(check_guards=False)


def _drop_checks(graph_module: fx.GraphModule) -> None:
    for module in graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target in _ONLY_CHECKS:
                module.graph.erase_node(node)
        if module is not graph_module:
            module.recompile()


def _flatten_results(graph: fx.Graph) -> None:
    """Return plain tensors, one after another, and not torch.export's tree of them."""
    output = graph.output_node()
    flat = [node for node in torch.utils._pytree.tree_leaves(output.args[0]) if isinstance(node, fx.Node)]
    output.args = (tuple(flat),)
    graph.set_codegen(fx.graph.CodeGen())


def _share_names(graph_module: fx.GraphModule, model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Read each parameter under the first of its names. Returns that name, as in the model -> all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    used = {}
    for node in list(graph_module.graph.nodes):
        if node.op != "get_attr":
            continue
        value = attribute(graph_module, node.target)
        if not isinstance(value, torch.nn.Parameter):
            continue
        own = names[id(value)]
        used[own[0]] = tuple(own)
        node.target = f"model.{own[0]}"
    return used


def _described(model, graph_module, inputs, keep, names, num_random) -> Captured:
    nodes = tuple(node for node in graph_module.graph.nodes if node.op == "call_function")
    loss, *kept = graph_module.graph.output_node().args[0]
    targets = dict.fromkeys(
        node.target
        for node in graph_module.graph.nodes
        if node.op == "get_attr" and isinstance(attribute(graph_module, node.target), torch.nn.Parameter)
    )
    parameters = {without_model(target): attribute(graph_module, target) for target in targets}
    assert [node.target for node in graph_module.graph.nodes if node.op == "placeholder"] == [
        *([DRAW] if num_random else []),
        *inputs,
    ]
    return Captured(
        model_name=type(model).__name__,
        graph_module=graph_module,
        nodes=nodes,
        parameters=parameters,
        names={name: names[name] for name in parameters},
        inputs=inputs,
        num_random=num_random,
        persistent=frozenset(model.state_dict(keep_vars=True)).difference(dict(model.named_parameters())),
        loss=loss,
        kept=dict(zip(keep, kept, strict=True)),
    )
