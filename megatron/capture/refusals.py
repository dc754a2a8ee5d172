"""The errors for models that cannot be captured or cut, each a sentence with the module, its line of source and a
remedy."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megatron.capture.decisions import depends_on_more_than_data
from megatron.capture.nodes import aliased_by, graph_modules_of, named, place_of, reached, without_model, written_by
from megatron.capture.randomness import is_random
from megatron.capture.stand_ins import BY_HAND, OtherGeneratorError
from megatron.capture.wrapper import NoLossError

_OR_ANOTHER = "or, where the model is not yours, choose another configuration or model"
_DECIDES = "decides by the values of a tensor what it computes, and a captured graph is the same for all values"
_OF_VMAP = {"_add_batch_dim", "_remove_batch_dim", "_vmap_increment_nesting", "_vmap_decrement_nesting"}


def refuse_what_cannot_be_cut(graph_module: fx.GraphModule) -> None:
    """Raise ValueError for an operator that cannot be cut. Precondition: the graph's dropout is seeded already.

    Such an operator writes into a parameter, a buffer, a constant or a tensor of the batch, draws random numbers of its
    own, uses torch.vmap, or makes a shape that depends on values. A shape that depends on data alone is allowed, since
    it never leaves its stage.
    """
    for node in graph_module.graph.nodes:
        for target in written_by(node):
            _refuse_write(node, target)
        if getattr(node.target, "__name__", "") in _OF_VMAP:
            _refuse(node, "uses torch.vmap, and torch.export does not record what runs inside it", "leave it out")
        if is_random(node):
            what = f"draws random numbers ({node.target}), and a captured graph would draw them in evaluation, too"
            _refuse(node, what, f"use dropout in its place, which alone can be seeded for each stage, {_OR_ANOTHER}")
        inner = [each for part in graph_modules_of(node) for each in part.graph.nodes if is_random(each)]
        if inner:
            where = "under torch.no_grad or torch.autocast, where they cannot be seeded for each stage"
            what = f"draws random numbers ({inner[0].target}) {where}"
            _refuse(inner[0], what, f"draw them outside, {_OR_ANOTHER}")
        value = node.meta.get("val")
        unknown = isinstance(value, (torch.Tensor, torch.SymInt)) and free_unbacked_symbols(value)
        if unknown and depends_on_more_than_data(graph_module, node):
            what = f"makes a shape that depends on values ({node.target}), and stages agree on shapes beforehand"
            _refuse(node, what, f"use a mask in its place, {_OR_ANOTHER}")


def refuse_decision(node: fx.Node | None) -> None:
    """Raise ValueError for `node`, a decision on values that a graph may not repeat (see `check_decisions`); None: do
    nothing."""
    if node is not None:
        _refuse(node, _DECIDES, f"use torch.where or a mask in its place, {_OR_ANOTHER}")


def _refuse_write(node: fx.Node, target: fx.Node) -> None:
    for root in reached([target], aliased_by):
        if root.op == "get_attr":
            what = (
                f"writes into {without_model(root.target)} in its forward ({node.target}), and a stage's forward may "
                "run several times and with other weights, so it must not change the module"
            )
            remedy = f"call model.train() and then eval() of that module, or use a module without state, {_OR_ANOTHER}"
            _refuse(node, what, remedy)
        if root.op == "placeholder":
            what = f"writes into {root.target}, which is data that other stages may read"
            _refuse(node, what, "write into a clone of it")


def _refuse(node: fx.Node, what: str, otherwise: str) -> None:
    place, line = place_of(node), _line_of_node(node)
    raise ValueError(f"{place} {what}{_at(line)}; {remedy_of(_class(place), line, what, otherwise=otherwise)}")


def _at(line: str) -> str:
    return f" [{line}]" if line else ""


def _class(place: str) -> str:
    """The class in the text of `place_of`, which is ``blocks.0 (Block)`` or ``Block``."""
    return place.rpartition("(")[2].rstrip(")")


def sentence_of(error: BaseException, model: torch.nn.Module) -> str:
    """The sentence on why torch.export could not capture `model`.

    It names the innermost module that was running, its line of source, the first line of the reason, and a remedy.
    """
    for each in _causes(error):
        if isinstance(each, (NoLossError, OtherGeneratorError)):
            return str(each)
    path, reason, line = "", "", ""
    for each in _causes(error):
        path, line = _running(each, model) or path, _line_of_error(each) or line
        reason = reason or next((line.strip() for line in str(each).splitlines() if line.strip()), "")
    where = path or type(model).__name__
    if decides_by_values(error):
        what, otherwise = _DECIDES, f"use torch.where or a mask in its place, {_OR_ANOTHER}"
    else:
        what = f"cannot be captured ({type(error).__name__}: {reason})"
        otherwise = f"run it under torch.export to see more, {_OR_ANOTHER}"
    return f"{where} {what}{_at(line)}; {remedy_of(_class(where), line, reason, otherwise=otherwise)}"


def decides_by_values(error: BaseException) -> bool:
    """Whether torch.export failed because the model's control flow or shapes depend on values."""
    return any(
        "DataDependent" in type(each).__name__ or "data-dependent" in str(each).lower() for each in _causes(error)
    )


def _causes(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _running(error: BaseException, model: torch.nn.Module) -> str:
    """The innermost module of `model` whose code was running when the error was raised, as ``path (class)``."""
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if id(module) in names and isinstance(module, torch.nn.Module):
            found = named(names[id(module)], type(module).__name__)
        trace = trace.tb_next
    return found


# --- the line of a model's source that an operator or an error comes from

_OURS = (Path(torch.__file__).parent, Path(__file__).parent)
_FRAME = re.compile(r'File "([^"]+)", line ([0-9]+)')


def _line_of_node(node: fx.Node) -> str:
    """The innermost source line outside of torch, as ``FILE:12: code``; empty if torch.export has kept none."""
    return _innermost([(file, int(number)) for file, number in _FRAME.findall(node.meta.get("stack_trace") or "")])


def _line_of_error(error: BaseException) -> str:
    """The innermost source line outside of torch when an error was raised, as ``FILE:12: code``; empty if there is
    none."""
    return _innermost([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)])


def _innermost(frames: list[tuple[str, int]]) -> str:
    for file, number in reversed(frames):
        path = Path(file)
        if not file.startswith("<") and not any(path.is_relative_to(folder) for folder in _OURS):
            code = linecache.getline(file, number).strip()
            return f"{path.name}:{number}: {code}" if code else f"{path.name}:{number}"
    return ""


# --- remedies for models of transformers that cannot be captured with their own configuration


_CONFIG = "in its configuration (config.json)"

_REMEDIES = (
    (BY_HAND, f"a captured graph has the gradients of its operators alone, so write it without one, {_OR_ANOTHER}"),
    ("grid_thw|num_real_images_per_batch",
     "no setting changes that, so choose a model whose images have one size, such as LLaVA"),
    ("layerdrop|skip_the_layer",
     f"set layerdrop, encoder_layerdrop and decoder_layerdrop to 0.0 {_CONFIG}, where it has them"),
    ("DropPath|StochasticDepth|drop_path", f"set drop_path_rate to 0 {_CONFIG}"),
    ("jitter_noise", f"set router_jitter_noise to 0.0 {_CONFIG}"),
    (r"self\.classifier\.to\(self\.dtype\)", f"set router_dtype {_CONFIG} to the dtype of the parameters"),
    ("loop over the samples", "give a loss of your own that takes the batch as a whole, or choose another model"),
    ("(SwitchTransformers|NllbMoe|Dbrx|LongcatFlash|JetMoeParallel|Step3p7)Experts",
     "no setting changes that, so choose a model whose experts are one tensor (Mixtral)"),
    ("Experts ", f"set experts_implementation to batched_mm {_CONFIG}, which computes the same"),
    ("label_index", f"set problem_type to single_label_classification {_CONFIG}"),
    ("RotaryEmbedding ",
     f"set rope_type {_CONFIG} to default: up to the trained length dynamic has the same numbers; those of longrope "
     "differ"),
    ("(?i)flex_?attention|flash_?attn|flash_?attention", f"set attn_implementation to eager or sdpa {_CONFIG}"),
    ("past_key_values|DynamicCache|use_cache", f"set use_cache to false {_CONFIG}"),
    ("mask_time_|_compute_mask_indices", f"set apply_spec_augment to false {_CONFIG}"),
    ("is_(index_)?global_attn", "no setting changes that, so choose a model without global attention"),
    ("BatchNorm",
     "no setting changes that, so choose a model with LayerNorm, such as a ViT; in one of your own call eval() of that "
     "module, or use GroupNorm or LayerNorm"),
    ("vmap", "Hugging Face models do so for their masks before transformers 5, so install transformers>=5"),
)  # fmt: skip
"""Pairs of a regular expression, which matches the module's class, its line of source or the reason, and the remedy,
which ends the sentence. The first that matches is used."""


def remedy_of(*clues: str, otherwise: str) -> str:
    """The remedy for an error.

    `clues`: the module's class, its line of source, and the reason. `otherwise`: the remedy if none of the table
    matches.
    """
    text = " ".join(f"{clue} " for clue in clues)
    return next((remedy for found_in, remedy in _REMEDIES if re.search(found_in, text)), otherwise)
