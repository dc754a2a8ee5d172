"""Dropout that draws the same masks on any stage, and in a recompute.

Problem: torch draws masks from one generator, so the masks depend on all earlier draws: on the cut, on the schedule,
and on whether a forward is the first one or a recompute. Besides, torch.export writes ``training=True`` into the graph.
Solution: every random operator becomes a call with an additional argument, the source of randomness (`Draw`). For that
call only, it seeds the device's generator with the run's seed, the microbatch and the operator's number in the captured
graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor, fx

aten = torch.ops.aten

DRAW = "draw"
"""The name of the graph's input that takes the `Draw`."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The source of a microbatch's random numbers.

    Attributes:
        seed: the seed of the run.
        sample: the number of the microbatch, counted over the whole run and over replicas.
        training: whether to drop anything; False in an evaluation.
    """

    seed: int
    sample: int
    training: bool = True


def seeded_dropout(draw: Draw, node: int, input: Tensor, p: float) -> Tensor:
    """Compute ``dropout`` for operator number `node`. Returns `input` itself in an evaluation."""
    return _dropped(torch.dropout, draw, node, input, p)


def seeded_dropout_(draw: Draw, node: int, input: Tensor, p: float) -> Tensor:
    """Compute ``dropout_`` in place for operator number `node`. Returns `input` unchanged in an evaluation."""
    return _dropped(torch.dropout_, draw, node, input, p)


def seeded_feature_dropout(draw: Draw, node: int, input: Tensor, p: float) -> Tensor:
    """Compute ``feature_dropout``, which drops whole channels, for operator number `node`."""
    return _dropped(torch.feature_dropout, draw, node, input, p)


def seeded_drop_path(draw: Draw, node: int, input: Tensor, keep: float) -> Tensor:
    """Compute stochastic depth for operator number `node`: keep each sample with probability `keep`, as transformers'
    drop path does."""
    if not draw.training:
        return input
    with _seeded(input.device, draw, node):
        drawn = torch.rand((input.shape[0], *[1] * (input.dim() - 1)), dtype=input.dtype, device=input.device)
    return input.div(keep) * (drawn + keep).floor()


def seeded_attention(
    draw: Draw | None, node: int, trained: Sequence[bool], *tensors: Tensor | None, dropout_p: float, **options: object
) -> Tensor:
    """Compute ``scaled_dot_product_attention`` for operator number `node`, with dropout of the attention's weights.

    torch chooses a kernel by which tensors need a gradient, and kernels round differently. So in a forward without
    gradients, which is recomputed later, the same tensors are marked as needing a gradient.

    Args:
        draw: the source of randomness; None if `dropout_p` is 0.
        trained: for each tensor, whether it needs a gradient.
        tensors: query, key, value and mask.
    """
    if draw is None or not draw.training:
        return _attend(trained, tensors, dropout_p=0.0, **options)
    with _seeded(tensors[0].device, draw, node):
        return _attend(trained, tensors, dropout_p=dropout_p, **options)


def _attend(trained: Sequence[bool], tensors: Sequence[Tensor | None], **options: object) -> Tensor:
    if torch.is_grad_enabled() or not any(trained):
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)
    shown = [
        tensor.detach().requires_grad_() if needs else tensor for tensor, needs in zip(tensors, trained, strict=True)
    ]
    with torch.enable_grad():
        return torch.nn.functional.scaled_dot_product_attention(*shown, **options).detach()


SEEDED: dict[object, Callable] = {
    aten.dropout.default: seeded_dropout,
    aten.dropout_.default: seeded_dropout_,
    aten.feature_dropout.default: seeded_feature_dropout,
}
"""Operator for dropout -> its seeded replacement."""
MAY_RETURN_INPUT = {*SEEDED.values(), seeded_drop_path}
ARGUMENT = 2
"""The position of the input among the arguments of `MAY_RETURN_INPUT`, which return it itself in an evaluation."""

_ATTENTION = aten.scaled_dot_product_attention.default
_RECURRENT = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}
"""Recurrent layers, which drop values between each other if there are several."""


def seed_randomness(graph: fx.Graph, trained: Set[fx.Node]) -> int:
    """Replace the random operators of a captured graph by seeded calls, and add `DRAW` as the graph's first input.

    Operators are numbered in the order of the graph. Attention without dropout is replaced, too, so that its kernel
    stays the same (`seeded_attention`).

    `trained`: the nodes that need a gradient. Returns the number of random operators; if it is 0, `DRAW` is not added.
    """
    paths = {node: path for node in graph.nodes if node.target is aten.mul.Tensor and (path := _drop_path(node))}
    found = [
        node
        for node in graph.nodes
        if node.target is _ATTENTION or (node.target in SEEDED and is_random(node)) or node in paths
    ]
    num_random = sum(is_random(node) or node in paths for node in found)
    draw = draw_of(graph) if num_random else None
    for number, node in enumerate(found):
        if node in paths:
            _replace_drop_path(graph, paths[node], draw, number)
            continue
        arguments = arguments_of(node)
        its_draw = draw if is_random(node) else None
        arguments.pop("train", None)
        with graph.inserting_before(node):
            if node.target is _ATTENTION:
                tensors = [arguments.pop(name) for name in ("query", "key", "value", "attn_mask")]
                needs = tuple(each in trained for each in tensors)
                new = graph.call_function(seeded_attention, (its_draw, number, needs, *tensors), arguments)
            else:
                new = graph.call_function(SEEDED[node.target], (its_draw, number, *arguments.values()))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return num_random


def draw_of(graph: fx.Graph) -> fx.Node:
    """The graph's first input, `DRAW`, which is added if it is missing."""
    found = next((node for node in graph.nodes if node.op == "placeholder" and node.target == DRAW), None)
    if found is None:
        with graph.inserting_before(next(iter(graph.nodes))):
            found = graph.placeholder(DRAW)
    return found


@dataclass(frozen=True, slots=True)
class _DropPath:
    """The operators of ``x.div(keep) * (keep + rand(samples, 1, ...)).floor()``. `made`: all, the last first."""

    made: tuple[fx.Node, ...]
    input: fx.Node
    keep: float


def _drop_path(product: fx.Node) -> _DropPath | None:
    """The drop path whose result `product` is; None for another operator."""
    made, wanted = [product], (aten.mul.Tensor, aten.floor.default, aten.add.Tensor, aten.rand.default)
    for target, position in zip(wanted[1:], (1, 0, 0), strict=True):
        made.append(made[-1].args[position] if made[-1].args[position:] else None)
        if getattr(made[-1], "target", None) is not target or len(made[-1].users) != 1:
            return None
    quotient = product.args[0]
    if product.target is not wanted[0] or getattr(quotient, "target", None) is not aten.div.Tensor:
        return None
    shape, whole = made[-1].meta["val"].shape, quotient.meta["val"].shape
    by_sample = len(shape) == len(whole) and shape[0] == whole[0] and all(size == 1 for size in shape[1:])
    if not by_sample or quotient.args[1] != made[2].args[1] or made[2].kwargs or len(quotient.users) != 1:
        return None
    return _DropPath((*made, quotient), *quotient.args)


def _replace_drop_path(graph: fx.Graph, path: _DropPath, draw: fx.Node, number: int) -> None:
    product = path.made[0]
    with graph.inserting_before(product):
        new = graph.call_function(seeded_drop_path, (draw, number, path.input, path.keep))
    new.meta = dict(product.meta)
    product.replace_all_uses_with(new)
    for each in path.made:
        graph.erase_node(each)


def _dropped(drop: Callable, draw: Draw, node: int, input: Tensor, p: float) -> Tensor:
    if not draw.training:
        return input
    with _seeded(input.device, draw, node):
        return drop(input, p, True)


@contextlib.contextmanager
def _seeded(device: torch.device, draw: Draw, node: int) -> Iterator[None]:
    """A block in which the device's generator has a seed for operator `node`; afterwards its state is restored."""
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    state = generator.get_state()
    generator.manual_seed(mixed(draw.seed, draw.sample, node))
    try:
        yield
    finally:
        generator.set_state(state)


def mixed(*numbers: int) -> int:
    """Hash numbers to one number of 63 bits, so that similar inputs give unrelated results (SplitMix64's finaliser)."""
    mask, state = (1 << 64) - 1, 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1


def arguments_of(node: fx.Node) -> dict[str, object]:
    """All arguments of an operator by name, in the order of the operator's schema."""
    arguments = {}
    for position, argument in enumerate(node.target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, default)
        arguments[argument.name] = given
    return arguments


def is_random(node: fx.Node) -> bool:
    """Whether the operator draws random numbers from torch's generator; False for a seeded call."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is _ATTENTION:
        return bool(arguments_of(node)["dropout_p"])
    if node.target in SEEDED or node.target in _RECURRENT:
        arguments = arguments_of(node)
        return bool(arguments["train"] and arguments["p" if node.target in SEEDED else "dropout"])
    return torch.Tag.nondeterministic_seeded in node.target.tags
