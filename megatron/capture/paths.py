"""Names in a captured graph: where in the model an operator was written, and what the graph reads."""

from __future__ import annotations

import torch
from torch import fx

from megatron.capture.wrapper import MODEL


def without_model(name: str) -> str:
    """A name in the captured graph as the model itself has it: ``model.encoder.embed`` is ``encoder.embed``."""
    return name.removeprefix(f"{MODEL}.")


def modules_of(node: fx.Node) -> list[tuple[str, str]]:
    """The modules in which the operator lies, from the outermost: (path in the model, name of its class). The model
    itself has the path ``""``.
    """
    found = []
    for path, kind in node.meta.get("nn_module_stack", {}).values():
        path = path.removeprefix("L['self'].").removeprefix("L['self']")
        if path == MODEL or path.startswith(f"{MODEL}."):
            name = kind if isinstance(kind, str) else kind.__name__
            found.append((without_model(path) if path != MODEL else "", name.rpartition(".")[2]))
    return found


def place_of(node: fx.Node) -> str:
    """The innermost of them in words, such as ``encoder.bn1 (BatchNorm2d)``."""
    modules = modules_of(node)
    if not modules:
        return "the loss"
    path, kind = modules[-1]
    return f"{path} ({kind})" if path else kind


def attribute(root: torch.nn.Module, name: str) -> object:
    """What `root` has under a name with dots."""
    value: object = root
    for part in name.split("."):
        value = getattr(value, part)
    return value
