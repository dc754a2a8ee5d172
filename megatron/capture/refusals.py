"""What cannot be captured or cut, each said in one sentence: the module, its line of source, and what to set."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megatron.capture.aliases import aliased_by, graph_modules_of, written_by
from megatron.capture.known_causes import remedy_of
from megatron.capture.paths import place_of, without_model
from megatron.capture.randomness import is_random
from megatron.capture.source_line import line_of_error, line_of_node
from megatron.capture.wrapper import NoLossError

_OR_ANOTHER = "or, where the model is not yours, choose another configuration or model"
_OF_VMAP = {"_add_batch_dim", "_remove_batch_dim", "_vmap_increment_nesting", "_vmap_decrement_nesting"}


def refuse_what_cannot_be_cut(graph: fx.Graph) -> None:
    """Look through a captured graph whose dropout is seeded already.

    Raises ValueError for an operator that writes into a parameter, a buffer, a constant or a tensor of the batch, that
    draws numbers of its own, or whose shape depends on values.
    """
    for node in graph.nodes:
        for target in written_by(node):
            _refuse_write(node, target)
        if getattr(node.target, "__name__", "") in _OF_VMAP:
            _refuse(node, "uses torch.vmap, of which torch.export keeps no more than the shell", "leave it out")
        if is_random(node):
            what = f"draws random numbers ({node.target}), in an evaluation, too, as it was captured"
            _refuse(node, what, "only dropout can be seeded for each stage, so express it as that")
        inner = [each for part in graph_modules_of(node) for each in part.graph.nodes if is_random(each)]
        if inner:
            what = f"draws random numbers ({inner[0].target}) under torch.no_grad or torch.autocast"
            _refuse(inner[0], f"{what}, where they cannot be seeded for each stage", "draw them outside")
        value = node.meta.get("val")
        if isinstance(value, (torch.Tensor, torch.SymInt)) and free_unbacked_symbols(value):
            what = f"makes a shape that depends on values ({node.target}), and stages agree on shapes beforehand"
            _refuse(node, what, f"use a mask in its place, {_OR_ANOTHER}")


def _refuse_write(node: fx.Node, target: fx.Node) -> None:
    roots, seen = [target], set()
    while roots:
        root = roots.pop()
        if root in seen:
            continue
        seen.add(root)
        roots += aliased_by(root)
        if root.op == "get_attr":
            what = (
                f"writes into {without_model(root.target)} in its forward ({node.target}), and stages run again, and "
                "with other weights, so nothing may be kept in a forward"
            )
            _refuse(
                node, what, f"call model.train() and eval() of that module, or use one without a state, {_OR_ANOTHER}"
            )
        if root.op == "placeholder":
            what = f"writes into {root.target}, which is data, and other stages may read it, too"
            _refuse(node, what, "let it write into a clone")


def _refuse(node: fx.Node, what: str, otherwise: str) -> None:
    place, line = place_of(node), line_of_node(node)
    raise ValueError(f"{place} {what}{_at(line)}; {remedy_of(_class(place), line, what, otherwise=otherwise)}")


def _at(line: str) -> str:
    return f" [{line}]" if line else ""


def _class(place: str) -> str:
    """That of a place in words, ``blocks.0 (Block)`` or ``Block``."""
    return place.rpartition("(")[2].rstrip(")")


def sentence_of(error: BaseException, model: torch.nn.Module) -> str:
    """Why torch.export could not capture `model`: the innermost module that was being run, its line, the first line of
    the reason, and what to set.
    """
    for each in _causes(error):
        if isinstance(each, NoLossError):
            return str(each)
    path, reason, line = "", "", ""
    for each in _causes(error):
        path, line = _running(each, model) or path, line_of_error(each) or line
        reason = reason or next((line.strip() for line in str(each).splitlines() if line.strip()), "")
    where = path or type(model).__name__
    if any("DataDependent" in type(each).__name__ for each in _causes(error)) or "data-dependent" in reason.lower():
        what = "decides by the values of a tensor what it computes, and a captured graph is the same for all values"
        otherwise = f"use torch.where or a mask in its place, {_OR_ANOTHER}"
    else:
        what = f"cannot be captured ({type(error).__name__}: {reason})"
        otherwise = f"run it under torch.export to see more, {_OR_ANOTHER}"
    return f"{where} {what}{_at(line)}; {remedy_of(_class(where), line, reason, otherwise=otherwise)}"


def _causes(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _running(error: BaseException, model: torch.nn.Module) -> str:
    """The innermost module of `model` whose code was running when the error was raised: ``path (class)``."""
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if id(module) in names and isinstance(module, torch.nn.Module):
            kind = type(module).__name__
            found = f"{names[id(module)]} ({kind})" if names[id(module)] else kind
        trace = trace.tb_next
    return found
