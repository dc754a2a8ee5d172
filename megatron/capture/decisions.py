"""Decisions by the values of a batch, such as ``if labels.max() >= num_labels: raise``.

Problem: torch.export captures one path through a forward, and has no values to decide by.
Solution: the forward runs once on the capture's batch (`rehearsed`), which records each answer with its line of source.
The capture repeats the answers (`Repeated`), and its graph checks them for every batch of a run: a batch that would be
decided otherwise is refused. Only decisions by data are repeated; decisions by weights or random numbers stay refused.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from megatron.capture.nodes import parameter_of, reached

aten = torch.ops.aten

Place = tuple[str, int]
"""A file and the number of a line."""

_DECIDED, _CHECKED = "decided as captured: ", "checked by the model: "
_ASKED = {Tensor.__bool__, Tensor.item}
_OURS = (str(Path(torch.__file__).parent), __file__)


class _Recorded(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[Place, list[bool]] = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if _decides(function, args):
            self.answers.setdefault(_place(), []).append(bool(result))
        return result


class Repeated(TorchFunctionMode):
    """A block in which the truth value of a tensor is the recorded answer, and the graph gets a check of each answer.

    The answers of a source line are given in their order. A question without a recorded answer is evaluated as usual.
    """

    def __init__(self, answers: Mapping[Place, list[bool]]) -> None:
        super().__init__()
        self._left = {place: list(those) for place, those in answers.items()}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if not _decides(function, args) or not self._left.get(place := _place()):
            return function(*args, **(kwargs or {}))
        answer = self._left[place].pop(0)
        truth = args[0] if args[0].dtype is torch.bool else args[0] != 0
        torch._assert_async(truth if answer else ~truth, _DECIDED + _line(place))
        return answer


def check_all(truth: Tensor, message: object = None) -> None:
    """Keep a model's ``torch._check_tensor_all`` as a check of each batch."""
    torch._assert_async(truth.all(), _CHECKED + _line(_place()))


def _line(place: Place) -> str:
    file, number = place
    return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}"


def _decides(function: object, args: tuple) -> bool:
    return function in _ASKED and (function is Tensor.__bool__ or args[0].dtype is torch.bool)


def _place() -> Place:
    """The innermost line outside of torch and of this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def rehearsed(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> dict[Place, list[bool]]:
    """Run the forward once, and return for each place of a decision the answers in order.

    Buffers and random-number generators keep their state. Parameters may be fake. If the forward fails, the answers
    until then are returned.
    """
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    recorded = _Recorded()
    try:
        with torch.random.fork_rng(), torch.no_grad(), recorded:
            model(**batch)
    except Exception:  # the capture fails at the same place, and says why
        pass
    finally:
        for buffer, value in kept:
            buffer.copy_(value)
    return recorded.answers


def as_decided(truth: Tensor, line: str) -> None:
    """Check a decision for a batch. Raises ValueError if it differs from that for the capture's batch."""
    if not isinstance(truth, FakeTensor) and not truth.is_meta and not truth:
        raise ValueError(
            f"this batch takes another branch than the captured batch [{line}], and a captured graph is the same "
            "for all batches; leave such rows out, or capture with a batch like it"
        )


torch.fx.node.has_side_effect(as_decided)


def check_decisions(graph_module: fx.GraphModule) -> fx.Node | None:
    """Let the graph check its decisions by `as_decided`. Returns the first that depends on a parameter or on random
    numbers, which no graph may repeat, or lies under ``torch.no_grad`` or ``torch.autocast``, where nothing could check
    it; None if there is none.
    """
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule) and module is not graph_module:
            for node in module.graph.nodes:
                if node.target is aten._assert_async.msg and node.args[1].startswith(_DECIDED):
                    return node
    for node in list(graph_module.graph.nodes):
        if node.target is not aten._assert_async.msg or not node.args[1].startswith((_DECIDED, _CHECKED)):
            continue
        if not depends_on_more_than_data(graph_module, node):
            line = node.args[1].removeprefix(_DECIDED).removeprefix(_CHECKED)
            with graph_module.graph.inserting_before(node):
                check = graph_module.graph.call_function(as_decided, (node.args[0], line))
            check.meta = dict(node.meta)
        elif node.args[1].startswith(_DECIDED):
            return node
        graph_module.graph.erase_node(node)
    return None


def depends_on_more_than_data(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether an operator depends on a parameter or on random numbers."""
    return any(
        parameter_of(graph_module, each) is not None
        or torch.Tag.nondeterministic_seeded in getattr(each.target, "tags", ())
        for each in reached([node], lambda each: each.all_input_nodes)
    )
