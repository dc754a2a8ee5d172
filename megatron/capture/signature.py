"""A name for a captured graph, by which ranks and files know that they speak of the same one.

Each rank captures the model for itself, and a partition file says stages by the numbers of operators. Both hold only if
the operators are the same, which depends on the model, and on the versions of torch and transformers.
"""

from __future__ import annotations

import hashlib

import torch
from torch import fx

from megatron.capture.aliases import parts_of
from megatron.capture.export import Captured
from megatron.capture.paths import attribute, without_model


def signature(captured: Captured) -> str:
    """SHA-256, 64 hexadecimal digits, of the operators in their order, what each takes, and the parameters' shapes and
    dtypes. Values of parameters, and the batch of the capture, have no part in it.
    """
    digest = hashlib.sha256()
    for line in _lines(captured.graph_module):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def check_signature(captured: Captured, expected: str, file: str) -> None:
    """Raises ValueError where a file was made for another graph."""
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
    """An argument of an operator in words, where `number` names the operators."""
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
