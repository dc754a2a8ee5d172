"""The composition of a checkpoint's tensor from tensors of a Hugging Face model; `tensor_rows` says which tensors.

Problem: the two formats name, split and stack the same numbers differently. For example, in our checkpoints queries,
keys and values are one matrix, with the heads of a group behind one another; a gated MLP's first layer is one matrix;
GPT-2's matrices are transposed; GPT-OSS has the experts of a layer in one tensor, in which the rows of gate and factor
alternate; and a vocabulary is padded.

Solution: every tensor of ours is a sequence of row ranges. Each is a range of rows, or of every second row, of one
tensor in the files, transposed or not (`RowRange`). A layout lists these ranges. So one table serves both directions,
whole tensors and the part of a rank, and every tensor can be read in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatron.trainer.arguments.flags.config import TrainConfig

LAYERS, FURTHER_LAYERS = "decoder.layers.", "mtp.layers."
"""The prefixes of a GPT's layers and of multi-token prediction layers; a checkpoint has the latter layer by layer."""
_STACKS = (LAYERS, FURTHER_LAYERS, "encoder.layers.")
INNER = "transformer_layer."
"""The prefix of the usual parts of a layer within a multi-token prediction layer."""


@dataclass(frozen=True)
class RowRange:
    """The source of rows `first` to `first + count` of a tensor of our model.

    It is every `step`-th row, from row `source` on, of the tensor `name` in the files. If the tensor is transposed, the
    columns of `name` count as rows.
    """

    name: str
    first: int
    count: int
    source: int
    step: int = 1


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of a model, as a checkpoint holds it.

    Attributes:
        key: its key in checkpoints, without the number of the layer.
        index: the numbers of its layer and its expert, if it has them.
        stack: the numbers of layers and of experts in the checkpoint's tensor.
        shape: its shape without these axes: (rows, columns), or (rows,).
        pieces: rows that come from the files, in order; further rows are padding of the vocabulary.
        transposed: whether the files have its columns as rows.
        stacked: whether the files have one tensor for all experts of a layer.
        copies: names of further tensors in the files that equal this one.
    """

    key: str
    index: tuple[int, ...]
    stack: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: tuple[RowRange, ...]
    transposed: bool = False
    stacked: bool = False
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A tensor in the files.

    Attributes:
        shape: its shape in the files.
        places: our tensors that have its rows (or columns), each with its pieces, in the order of the file.
        copy_of: the name of the tensor that it repeats; None if it repeats none.
    """

    shape: tuple[int, ...]
    places: tuple[tuple[ModelTensor, tuple[RowRange, ...]], ...]
    copy_of: str | None = None


# --- layouts: (model, names in the files) -> our shape and pieces -----------------------------------------------------

Layout = Callable[[TrainConfig, tuple[str, ...]], tuple[tuple[int, ...], list[RowRange]]]


def copied(rows: Callable[[TrainConfig], int], columns: Callable[[TrainConfig], int] | None = None) -> Layout:
    """The layout of a tensor that is copied unchanged."""

    def layout(args: TrainConfig, names: tuple[str, ...]) -> tuple[tuple[int, ...], list[RowRange]]:
        shape = (rows(args),) if columns is None else (rows(args), columns(args))
        return shape, [RowRange(names[0], 0, shape[0], 0)]

    return layout


def vocabulary(args: TrainConfig, names: tuple[str, ...]) -> tuple[tuple[int, ...], list[RowRange]]:
    """The layout of one row per token; rows after the vocabulary are padding, which is zero when read from files."""
    return (args.padded_vocab_size, args.hidden_size), [RowRange(names[0], 0, args.vocab_size, 0)]


def vocabulary_bias(args: TrainConfig, names: tuple[str, ...]) -> tuple[tuple[int, ...], list[RowRange]]:
    """The layout of one number per token, padded as in `vocabulary`."""
    return (args.padded_vocab_size,), [RowRange(names[0], 0, args.vocab_size, 0)]


def queries_keys_values(columns: Callable[[TrainConfig], int] | None) -> Layout:
    """The layout of an attention's input projection: for each group its heads' queries, then its keys, then its values.

    `names`: the names of the three tensors, or of one tensor that has all queries, then all keys, then all values.
    """

    def layout(args: TrainConfig, names: tuple[str, ...]) -> tuple[tuple[int, ...], list[RowRange]]:
        heads, groups, width = args.num_attention_heads, num_groups(args), args.kv_channels
        counts = (heads // groups * width, width, width)
        if len(names) == 1:
            names, starts = names * 3, (0, heads * width, (heads + groups) * width)
        else:
            starts = (0, 0, 0)
        pieces, row = [], 0
        for group in range(groups):
            for name, start, count in zip(names, starts, counts, strict=True):
                pieces.append(RowRange(name, row, count, start + group * count))
                row += count
        return (row,) if columns is None else (row, columns(args)), pieces

    return layout


def keys_values(args: TrainConfig, names: tuple[str, ...]) -> tuple[tuple[int, ...], list[RowRange]]:
    """The layout of a cross-attention's keys and values: for each head its keys, then its values."""
    width, pieces = args.kv_channels, []
    for head in range(args.num_attention_heads):
        pieces += [RowRange(name, (2 * head + n) * width, width, head * width) for n, name in enumerate(names)]
    return (2 * args.num_attention_heads * width, args.hidden_size), pieces


def gated(width: Callable[[TrainConfig], int]) -> Layout:
    """The layout of a gated feed-forward layer: the rows of the gate, then the rows that the gate multiplies."""

    def layout(args: TrainConfig, names: tuple[str, ...]) -> tuple[tuple[int, ...], list[RowRange]]:
        rows = width(args)
        return (2 * rows, args.hidden_size), [RowRange(names[0], 0, rows, 0), RowRange(names[1], rows, rows, 0)]

    return layout


def gated_in_turn(width: Callable[[TrainConfig], int], columns: Callable[[TrainConfig], int] | None = None) -> Layout:
    """The layout of `gated` from one tensor in the files in which the two kinds of rows alternate."""

    def layout(args: TrainConfig, names: tuple[str, ...]) -> tuple[tuple[int, ...], list[RowRange]]:
        rows = width(args)
        shape = (2 * rows,) if columns is None else (2 * rows, columns(args))
        return shape, [RowRange(names[0], 0, rows, 0, 2), RowRange(names[0], rows, rows, 1, 2)]

    return layout


def num_groups(args: TrainConfig) -> int:
    """The number of key-value heads."""
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


# --- keys -------------------------------------------------------------------------------------------------------------

SAME_KEYS = {
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
"""A spelling of the beginning of a layer's key -> the table's spelling.

The spelling depends on the implementation: a norm is a module of its own or belongs to a linear layer. Transformer
Engine's layers with experts have the first spelling, local layers the second; with latent attention it is the other way
round."""


def canonical(key: str) -> tuple[str, tuple[int, ...]]:
    """A checkpoint's key in the table's spelling, without the layer's number, and this number or ()."""
    stack = next((each for each in _STACKS if key.startswith(each)), None)
    if stack is None:
        return key, ()
    layer, _, rest = key.removeprefix(stack).partition(".")
    rest, number = (rest, (int(layer),)) if layer.isdecimal() else (key.removeprefix(stack), ())
    inner = INNER * rest.startswith(INNER)
    rest = rest.removeprefix(inner)
    for own, other in SAME_KEYS.items():
        if rest.startswith(own):
            rest = other + rest.removeprefix(own)
            break
    return stack + inner + rest, number


def sources_of(tensors: Iterator[ModelTensor]) -> dict[str, Source]:
    """The tensors in the files, in the order in which our tensors need them.

    A copy follows the tensor that it repeats.
    """
    places: dict[str, dict[tuple, tuple[ModelTensor, list[RowRange]]]] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            its = places.setdefault(piece.name, {})
            its.setdefault((tensor.key, tensor.index), (tensor, []))[1].append(piece)
    found = {}
    for name, its in places.items():
        tensor, pieces = next(iter(its.values()))
        assert tensor.stacked or len(its) == 1, f"{name} has parts in several tensors"
        shape = (sum(piece.count for piece in pieces), *tensor.shape[1:])
        shape = shape[::-1] if tensor.transposed else shape
        ordered = tuple((each, tuple(sorted(own, key=lambda piece: piece.source))) for each, own in its.values())
        found[name] = Source((len(its), *shape) if tensor.stacked else shape, ordered)
        for copy in tensor.copies:
            found[copy] = replace(found[name], copy_of=name)
    return found
