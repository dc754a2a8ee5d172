"""What cannot be captured or cut, each said in one sentence that names the module."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megatron.capture.aliases import aliased_by, graph_modules_of, written_by
from megatron.capture.paths import place_of, without_model
from megatron.capture.randomness import is_random
from megatron.capture.wrapper import NoLossError

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
            raise ValueError(
                f"{place_of(node)} uses torch.vmap, of which torch.export keeps no more than the shell; Hugging Face "
                "models do so for their masks before transformers 5, so install transformers>=5"
            )
        if is_random(node):
            raise ValueError(
                f"{place_of(node)} draws random numbers ({node.target}), in an evaluation, too, as it was captured; "
                "only dropout can be seeded for each stage, so express it as that"
            )
        inner = [each for part in graph_modules_of(node) for each in part.graph.nodes if is_random(each)]
        if inner:
            raise ValueError(
                f"{place_of(inner[0])} draws random numbers ({inner[0].target}) under torch.no_grad or torch.autocast, "
                "where they cannot be seeded for each stage; draw them outside"
            )
        value = node.meta.get("val")
        if isinstance(value, (torch.Tensor, torch.SymInt)) and free_unbacked_symbols(value):
            raise ValueError(
                f"{place_of(node)} makes a shape that depends on values ({node.target}), and stages agree on shapes "
                "beforehand; use a mask in its place"
            )


def _refuse_write(node: fx.Node, target: fx.Node) -> None:
    roots, seen = [target], set()
    while roots:
        root = roots.pop()
        if root in seen:
            continue
        seen.add(root)
        roots += aliased_by(root)
        if root.op == "get_attr":
            raise ValueError(
                f"{place_of(node)} writes into {without_model(root.target)} in its forward ({node.target}), and stages "
                "run again, and with other weights, so nothing may be kept in a forward; call model.train() "
                "and eval() of that module, or use one without a state (GroupNorm or LayerNorm in place of BatchNorm)"
            )
        if root.op == "placeholder":
            raise ValueError(
                f"{place_of(node)} writes into {root.target}, which is data, and other stages may read it, too; "
                "let it write into a clone"
            )


def sentence_of(error: BaseException, model: torch.nn.Module) -> str:
    """Why torch.export could not capture `model`: the innermost module that was being run, and the first line of the
    reason.
    """
    for each in _causes(error):
        if isinstance(each, NoLossError):
            return str(each)
    path, reason = "", ""
    for each in _causes(error):
        path = _running(each, model) or path
        reason = reason or next((line.strip() for line in str(each).splitlines() if line.strip()), "")
    where = path or type(model).__name__
    if any("DataDependent" in type(each).__name__ for each in _causes(error)) or "data-dependent" in reason.lower():
        return (
            f"{where} decides by the values of a tensor what it computes, and a captured graph is the same for all "
            "values; use torch.where or a mask in its place"
        )
    return f"{where} cannot be captured ({type(error).__name__}: {reason}); run it under torch.export to see more"


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
