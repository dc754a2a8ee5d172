"""A model with a loss as one graph of operators, whose parameters are the model's own.

A size in a captured graph is an operator that reads the size of a tensor, often of an activation; another stage would
have to receive that number. A size that equals a dimension of the batch is read from the batch's tensor instead. Such
an operator depends on data only, and every stage computes its own copy.

A signature identifies a graph. Each rank captures the model for itself, and a partition file names the operators of a
stage by number. So all graphs must have the same operators, which depend on the model and on the versions of torch and
transformers.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, fx

from megatron.capture.decisions import Repeated, check_decisions, rehearsed
from megatron.capture.nodes import attribute, differentiable, parameter_of, parts_of, without_model
from megatron.capture.randomness import DRAW, Draw, seed_randomness
from megatron.capture.refusals import decides_by_values, refuse_decision, refuse_what_cannot_be_cut, sentence_of
from megatron.capture.stand_ins import settle_stand_ins, standing_in
from megatron.capture.statistics import count_statistics, forget_overwritten
from megatron.capture.wrapper import LossOnly

aten = torch.ops.aten

_ONLY_CHECKS = {  # checks of properties of the capture's batch; sizes and devices of a run may differ
    aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten._assert_async.msg,
    aten.sym_constrain_range_for_size.default, aten.sym_constrain_range.default,
}  # fmt: skip


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Attributes:
        graph_module: the graph with its parameters and constants. Called with ``(draw, *tensors)``, or without `draw`
            if nothing is random, it returns the loss and the kept results.
        nodes: the operators in an order in which they can run; an operator's number is its index here.
        parameters: name in the model -> the model's own parameter. Each parameter is listed once.
        names: key of `parameters` -> all names of the parameter in the model, including the key.
        inputs: names of the batch's tensors.
        num_random: number of operators that depend on the `Draw`: they draw random numbers or count statistics.
        persistent: names of the buffers that checkpoints contain.
        loss: the node that makes the loss.
        kept: name -> the node that makes a result that is kept beside the loss.
        guards: called with the batch's tensors, it raises AssertionError if another graph is needed for their shapes;
            None without `dynamic_sequence`.
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
    guards: Callable[..., None] | None = None

    @property
    def all_names(self) -> frozenset[str]:
        """The names of all parameters that operators read, and of the buffers that checkpoints contain."""
        return self.persistent.union(*self.names.values())

    def parameter(self, node: fx.Node) -> torch.nn.Parameter | None:
        """The parameter that a node of the graph reads; None for a node that reads none."""
        return parameter_of(self.graph_module, node)

    def run(self, batch: Mapping[str, Tensor], draw: Draw | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the whole model: its loss, and the kept results. `draw`: required if `num_random` is not 0."""
        first = (draw,) if self.num_random else ()
        loss, *kept = self.graph_module(*first, *(batch[name] for name in self.inputs))
        return loss, dict(zip(self.kept, kept, strict=True))

    def refused_shapes(self, batch: Mapping[str, Tensor]) -> str | None:
        """The condition that the graph needs and that the shapes of `batch`, of 2 samples or more, break; None if they
        break none."""
        assert self.guards is not None, "captured for one length"
        try:
            self.guards(*(batch[name] for name in self.inputs))
        except AssertionError as error:
            return str(error).removeprefix("Guard failed: ")
        return None

    def sizes_of(self, batch: Mapping[str, Tensor]) -> dict[sympy.Symbol, int]:
        """The symbolic sizes of the graph with their values for `batch`, as `EdgeTensor.shape_at` takes them."""
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
    forward: Callable[[torch.nn.Module, Mapping[str, Tensor]], object] | None = None,
    dynamic_sequence: bool = False,
) -> Captured:
    """Capture `model` in training mode.

    Args:
        model: the user's model. The model keeps its mode, and the graph shares its parameters.
        batch: name -> tensor [batch of 2 or more, ...], the arguments of the forward. The graph runs with any batch
            size, 1 included. The values matter only if the forward branches on them; other batches
            then have to take the same branches.
        loss: (output of the model, batch) -> scalar mean loss; None: the model computes the loss from its labels.
        keep: fields of the output that are kept beside the loss, such as ``logits``.
        forward: (model, batch) -> the output with its loss, in place of the model's own forward of the batch.
        dynamic_sequence: whether dimension 1 of every two-dimensional tensor may also differ from batch to batch.

    Raises:
        ValueError: the model cannot be captured or cut; the message has the module, the reason and a remedy.
    """
    if "check_guards" not in inspect.signature(torch.export.ExportedProgram.module).parameters:
        raise ValueError(
            f"torch {torch.__version__} does not export the guards of a graph, without which a graph could run with "
            "shapes that it is wrong for; install torch 2.9 or newer"
        )
    for name, tensor in batch.items():
        if tensor.dim() == 0 or tensor.shape[0] < 2:
            raise ValueError(
                f"the batch to capture with has {name} of shape {tuple(tensor.shape)}; torch.export takes a dimension "
                "of 1 for a constant, so give two samples or more"
            )
    wrapper = LossOnly(model, tuple(batch), loss=loss, keep=keep, forward=forward)
    was_training = {module: module.training for module in model.modules()}
    if not model.training:
        model.train()
    try:
        graph_module, guards = _exported(wrapper, dict(batch), dynamic_sequence)
    finally:
        for module, training in was_training.items():
            module.training = training
    graph = graph_module.graph
    ask_batch_for_sizes(graph)
    settle_stand_ins(graph)
    refuse_decision(check_decisions(graph_module))
    _drop_checks(graph_module)
    forget_overwritten(graph_module)
    num_random = seed_randomness(graph, differentiable(graph_module))
    num_random += count_statistics(graph_module)
    refuse_what_cannot_be_cut(graph_module)
    graph.eliminate_dead_code()
    _flatten_results(graph)
    names = _share_names(graph_module, model)
    graph_module = fx.GraphModule(graph_module, graph)  # drops the hooks that compare batches with the capture's batch
    return _described(model, graph_module, tuple(batch), tuple(keep), names, num_random, guards)


def _exported(
    wrapper: LossOnly, batch: dict[str, Tensor], dynamic_sequence: bool
) -> tuple[fx.GraphModule, Callable[..., None] | None]:
    dynamic = torch.export.Dim.DYNAMIC
    shapes = {
        name: {0: dynamic, 1: dynamic} if dynamic_sequence and tensor.dim() == 2 else {0: dynamic}
        for name, tensor in batch.items()
    }

    def exported() -> tuple[fx.GraphModule, Callable[..., None] | None]:
        said = io.StringIO()  # when it fails, torch.export prints all operators so far, which would hide the error
        with contextlib.redirect_stderr(said), standing_in(wrapper.model):
            program = torch.export.export(wrapper, (), kwargs=batch, dynamic_shapes=shapes, strict=False)
        sys.stderr.write(said.getvalue())
        return program.module(check_guards=False), program.module()._guards_fn if dynamic_sequence else None

    try:
        return exported()
    except Exception as error:
        if not decides_by_values(error):
            raise ValueError(sentence_of(error, wrapper.model)) from error
    try:
        with Repeated(rehearsed(wrapper, batch)):
            return exported()
    except Exception as error:
        raise ValueError(sentence_of(error, wrapper.model)) from error


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
    """Make the graph return a flat tuple of tensors in place of torch.export's tree."""
    output = graph.output_node()
    flat = [node for node in torch.utils._pytree.tree_leaves(output.args[0]) if isinstance(node, fx.Node)]
    output.args = (tuple(flat),)
    graph.set_codegen(fx.graph.CodeGen())


def _share_names(graph_module: fx.GraphModule, model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Make the graph read each parameter under the first of its names. Returns first name in the model -> all names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    used = {}
    for node in list(graph_module.graph.nodes):
        if (parameter := parameter_of(graph_module, node)) is not None:
            own = names[id(parameter)]
            used[own[0]] = tuple(own)
            node.target = f"model.{own[0]}"
    return used


def _described(model, graph_module, inputs, keep, names, num_random, guards) -> Captured:
    nodes = tuple(node for node in graph_module.graph.nodes if node.op == "call_function")
    loss, *kept = graph_module.graph.output_node().args[0]
    parameters = {
        without_model(node.target): parameter
        for node in graph_module.graph.nodes
        if (parameter := parameter_of(graph_module, node)) is not None
    }
    placeholders = [node.target for node in graph_module.graph.nodes if node.op == "placeholder"]
    assert placeholders == [*([DRAW] if num_random else []), *inputs]
    return Captured(
        type(model).__name__, graph_module, nodes, parameters, {name: names[name] for name in parameters}, inputs,
        num_random, frozenset(model.state_dict(keep_vars=True)).difference(dict(model.named_parameters())),
        loss, dict(zip(keep, kept, strict=True)), guards,
    )  # fmt: skip


def ask_batch_for_sizes(graph: fx.Graph) -> None:
    """Replace every size that equals a dimension of an input by that dimension, read at the start of the graph."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    dimensions: dict[str, tuple[fx.Node, int]] = {}
    for node in inputs:
        value = node.meta.get("val")
        for dimension, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                dimensions.setdefault(str(size.node.expr), (node, dimension))
    asked: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt):
            continue
        size = str(value.node.expr)
        if size not in dimensions:
            continue
        if size not in asked:
            tensor, dimension = dimensions[size]
            with graph.inserting_after(inputs[-1]):
                asked[size] = graph.call_function(aten.sym_size.int, (tensor, dimension))
            asked[size].meta = {"val": value}
        if node is not asked[size]:
            node.replace_all_uses_with(asked[size])
            graph.erase_node(node)


def is_size(node: fx.Node) -> bool:
    """Whether the node's value is a number that depends on the batch's shape."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def signature(captured: Captured) -> str:
    """The SHA-256, as 64 hexadecimal digits, of the operators in their order, their arguments, and the parameters'
    shapes and dtypes.

    It does not depend on values of parameters, nor on the batch of the capture.
    """
    digest = hashlib.sha256()
    for line in _lines(captured.graph_module):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def check_signature(captured: Captured, expected: str, file: str) -> None:
    """Raise ValueError if `file`, which has the signature `expected`, was made for another graph."""
    found = signature(captured)
    if found != expected:
        raise ValueError(
            f"{file} was made for another graph ({expected[:12]}) than that of {captured.model_name} here "
            f"({found[:12]}): another model, batch, or version of torch or transformers; make the file again"
        )


def _lines(graph_module: fx.GraphModule) -> list[str]:
    number = {node: place for place, node in enumerate(graph_module.graph.nodes)}
    lines = []
    for node, place in number.items():
        words = [str(place), node.op]
        if node.op == "get_attr":
            value = attribute(graph_module, node.target)
            words.append(without_model(node.target))
            if isinstance(value, torch.Tensor):
                words.append(f"{tuple(value.shape)} {value.dtype}")
        else:
            target = node.target
            named = not isinstance(target, str) and hasattr(target, "__qualname__")
            words.append(f"{target.__module__}.{target.__qualname__}" if named else str(target))
            words.append(word(node.args, number))
            words.append(word(dict(sorted(node.kwargs.items())), number))
        lines.append(" ".join(words))
        for part in parts_of(node) if node.op == "call_function" else ():
            lines += _lines(graph_module.get_submodule(part.target))
    return lines


def word(value: object, number: dict[fx.Node, int]) -> str:
    """An argument of an operator as text, in which operators are named by their `number`."""
    if isinstance(value, fx.Node):
        return f"%{number[value]}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(word(each, number) for each in value)})"
    if isinstance(value, dict):
        return f"({', '.join(f'{name}={word(each, number)}' for name, each in value.items())})"
    if isinstance(value, slice):
        return word(("slice", value.start, value.stop, value.step), number)
    known = (str, int, float, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
    assert isinstance(value, known), f"an argument of type {type(value).__name__}"
    return repr(value)
