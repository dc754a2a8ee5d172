"""Which tensors of a Hugging Face model make which tensor of a checkpoint: a row for each kind of tensor.

Problem: the two name, cut and stack the same numbers differently. For example, queries, keys and values are one
matrix here, with the heads of a group behind one another; a gated MLP's first layer is one matrix; GPT-2's matrices
are transposed; and a vocabulary is padded.

Solution: every tensor here is a sequence of row ranges, each of which is a row range of one tensor there, transposed
or not (`Piece`). A layout lists these ranges. So one table serves both directions, whole tensors and the part of a
rank, and whatever is read can be read in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.trainer.arguments.flags.config import TrainConfig

LAYERS = "decoder.layers."


@dataclass(frozen=True)
class Piece:
    """Rows `first` to `first + count` of a tensor here, which begin at row `source` of the tensor `name` there.

    A transposed tensor's columns there are rows here.
    """

    name: str
    first: int
    count: int
    source: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model, as a checkpoint holds it.

    Attributes:
        key: in checkpoints, without the number of the layer.
        index: of the layer, and of the expert, where it has these.
        stack: how many layers, and experts, the checkpoint's tensor has.
        shape: without these axes: (rows, columns), or (rows,).
        pieces: rows that come from files, in order; further rows are padding of the vocabulary.
        transposed: files have its columns as rows.
    """

    key: str
    index: tuple[int, ...]
    stack: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Source:
    """A tensor there: its shape, and the tensors here that have its rows (or columns), each with its piece."""

    shape: tuple[int, ...]
    places: tuple[tuple[Tensor, Piece], ...]


# --- layouts: (model, names there) -> shape here and pieces -----------------------------------------------------------

Layout = Callable[[TrainConfig, tuple[str, ...]], tuple[tuple[int, ...], list[Piece]]]


def copied(rows: Callable[[TrainConfig], int], columns: Callable[[TrainConfig], int] | None = None) -> Layout:
    """One tensor as it is."""

    def layout(args: TrainConfig, names: tuple[str, ...]) -> tuple[tuple[int, ...], list[Piece]]:
        shape = (rows(args),) if columns is None else (rows(args), columns(args))
        return shape, [Piece(names[0], 0, shape[0], 0)]

    return layout


def vocabulary(args: TrainConfig, names: tuple[str, ...]) -> tuple[tuple[int, ...], list[Piece]]:
    """One row for each token; rows behind the vocabulary are padding, zero when they are read from files."""
    return (args.padded_vocab_size, args.hidden_size), [Piece(names[0], 0, args.vocab_size, 0)]


def queries_keys_values(columns: Callable[[TrainConfig], int] | None) -> Layout:
    """For each group: its heads' queries, then its keys, then its values. `names`: of the three; or one for all, in
    which all queries come first, then all keys."""

    def layout(args: TrainConfig, names: tuple[str, ...]) -> tuple[tuple[int, ...], list[Piece]]:
        heads, groups, width = args.num_attention_heads, num_groups(args), args.kv_channels
        counts = (heads // groups * width, width, width)
        if len(names) == 1:
            names, starts = names * 3, (0, heads * width, (heads + groups) * width)
        else:
            starts = (0, 0, 0)
        pieces, row = [], 0
        for group in range(groups):
            for name, start, count in zip(names, starts, counts, strict=True):
                pieces.append(Piece(name, row, count, start + group * count))
                row += count
        return (row,) if columns is None else (row, columns(args)), pieces

    return layout


def gated(width: Callable[[TrainConfig], int]) -> Layout:
    """The gate's rows, then those that it multiplies."""

    def layout(args: TrainConfig, names: tuple[str, ...]) -> tuple[tuple[int, ...], list[Piece]]:
        rows = width(args)
        return (2 * rows, args.hidden_size), [Piece(names[0], 0, rows, 0), Piece(names[1], rows, rows, 0)]

    return layout


def num_groups(args: TrainConfig) -> int:
    """The number of heads of keys and values."""
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def _hidden(args: TrainConfig) -> int:
    return args.hidden_size


def _wide(args: TrainConfig) -> int:
    return args.ffn_hidden_size


def _expert(args: TrainConfig) -> int:
    return args.moe_ffn_hidden_size


def _attended(args: TrainConfig) -> int:
    return args.num_attention_heads * args.kv_channels


def _channels(args: TrainConfig) -> int:
    return args.kv_channels


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A kind of tensor.

    Attributes:
        key: here; `*` stands for the layers' part of the key.
        names: there, with `{layer}` and `{expert}`.
        where: the models that have it.
    """

    key: str
    names: tuple[str, ...]
    layout: Layout
    transposed: bool = False
    where: Callable[[TrainConfig], bool] = lambda args: True


def _untied(args: TrainConfig) -> bool:
    return args.untie_embeddings_and_output_weights


_ATTENTION = "model.layers.{layer}.self_attn."
_NORM_1, _NORM_2 = "*self_attention.linear_qkv.layer_norm_", "*mlp.linear_fc1.layer_norm_"
_QKV, _PROJ = "*self_attention.linear_qkv.", "*self_attention.linear_proj."

_LLAMA_WITHOUT_MLP = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary),
    Row(f"{_NORM_1}weight", ("model.layers.{layer}.input_layernorm.weight",), copied(_hidden)),
    Row(f"{_QKV}weight", tuple(f"{_ATTENTION}{each}_proj.weight" for each in "qkv"), queries_keys_values(_hidden)),
    Row(f"{_QKV}bias", tuple(f"{_ATTENTION}{each}_proj.bias" for each in "qkv"), queries_keys_values(None),
        where=lambda args: args.add_qkv_bias),
    Row("*self_attention.q_layernorm.weight", (f"{_ATTENTION}q_norm.weight",), copied(_channels),
        where=lambda args: args.qk_layernorm),
    Row("*self_attention.k_layernorm.weight", (f"{_ATTENTION}k_norm.weight",), copied(_channels),
        where=lambda args: args.qk_layernorm),
    Row(f"{_PROJ}weight", (f"{_ATTENTION}o_proj.weight",), copied(_hidden, _attended)),
    Row(f"{_NORM_2}weight", ("model.layers.{layer}.post_attention_layernorm.weight",), copied(_hidden)),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",), copied(_hidden)),
    Row("output_layer.weight", ("lm_head.weight",), vocabulary, where=_untied),
)  # fmt: skip
_MLP = "model.layers.{layer}.mlp."
_LLAMA = (
    *_LLAMA_WITHOUT_MLP,
    Row("*mlp.linear_fc1.weight", (f"{_MLP}gate_proj.weight", f"{_MLP}up_proj.weight"), gated(_wide)),
    Row("*mlp.linear_fc2.weight", (f"{_MLP}down_proj.weight",), copied(_hidden, _wide)),
)


def _with_experts(mlp: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    expert = mlp + "experts.{expert}."
    return (
        *_LLAMA_WITHOUT_MLP,
        Row("*mlp.router.weight", (f"{mlp}gate.weight",), copied(lambda args: args.num_experts, _hidden)),
        Row("*mlp.experts.experts.linear_fc1.weight", (expert + gate, expert + up), gated(_expert)),
        Row("*mlp.experts.experts.linear_fc2.weight", (expert + down,), copied(_hidden, _expert)),
    )


_H = "transformer.h.{layer}."


def _linear(key: str, name: str, weight: Layout, bias: Layout) -> tuple[Row, Row]:
    return (Row(f"{key}weight", (f"{_H}{name}.weight",), weight, transposed=True),
            Row(f"{key}bias", (f"{_H}{name}.bias",), bias))  # fmt: skip


def _norm(key: str, name: str) -> tuple[Row, Row]:
    return tuple(Row(f"{key}{each}", (f"{name}.{each}",), copied(_hidden)) for each in ("weight", "bias"))


_GPT2 = (
    Row("embedding.word_embeddings.weight", ("transformer.wte.weight",), vocabulary),
    Row("embedding.position_embeddings.weight", ("transformer.wpe.weight",),
        copied(lambda args: args.max_position_embeddings, _hidden)),
    *_norm(_NORM_1, f"{_H}ln_1"),
    *_linear(_QKV, "attn.c_attn", queries_keys_values(_hidden), queries_keys_values(None)),
    *_linear(_PROJ, "attn.c_proj", copied(_hidden, _attended), copied(_hidden)),
    *_norm(_NORM_2, f"{_H}ln_2"),
    *_linear("*mlp.linear_fc1.", "mlp.c_fc", copied(_wide, _hidden), copied(_wide)),
    *_linear("*mlp.linear_fc2.", "mlp.c_proj", copied(_hidden, _wide), copied(_hidden)),
    *_norm("decoder.final_layernorm.", "transformer.ln_f"),
    Row("output_layer.weight", ("lm_head.weight",), vocabulary, where=_untied),
)  # fmt: skip

TABLE: dict[str, tuple[Row, ...]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _with_experts("model.layers.{layer}.block_sparse_moe.", "w1.weight", "w3.weight", "w2.weight"),
    "qwen3_moe": _with_experts(_MLP, "gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    "gpt2": _GPT2,
}
"""By `model_type`, the same ones as `model_families.FAMILIES` has."""
WITHOUT_WEIGHT = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names of buffers, which older files have beside the weights."""
HEAD = "lm_head.weight"
"""The output layer there, which some files have although it is the embedding."""

SAME_KEYS = {
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
}
"""A layer's key where its norm is a module of its own -> the key where it belongs to a linear layer. Which of them a
model has depends on its implementation: Transformer Engine's layers with experts have the former, local ones the
latter."""


def canonical(key: str) -> tuple[str, tuple[int, ...]]:
    """A checkpoint's key in the table's spelling, without the number of its layer; and this number, if it has one."""
    number: tuple[int, ...] = ()
    if key.startswith(LAYERS):
        layer, _, rest = key.removeprefix(LAYERS).partition(".")
        rest, number = (rest, (int(layer),)) if layer.isdecimal() else (key.removeprefix(LAYERS), ())
        for own, other in SAME_KEYS.items():
            if rest.startswith(own):
                rest = other + rest.removeprefix(own)
        key = LAYERS + rest
    return key, number


def tensors_of(model_type: str, args: TrainConfig) -> Iterator[Tensor]:
    """All tensors of a model, layer by layer.

    `args`: completed, with `padded_vocab_size`, and `vocab_size` as in the files.
    """
    rows = [row for row in TABLE[model_type] if row.where(args)]
    ends = {row.key: row for row in rows if not row.key.startswith("*")}
    yield from (_tensor(row, args) for key, row in ends.items() if key.startswith("embedding."))
    for layer in range(args.num_layers):
        for row in rows:
            if row.key.startswith("*"):
                experts = range(args.num_experts) if "{expert}" in row.names[0] else (None,)
                yield from (_tensor(row, args, layer, expert) for expert in experts)
    yield from (_tensor(row, args) for key, row in ends.items() if not key.startswith("embedding."))


def _tensor(row: Row, args: TrainConfig, layer: int | None = None, expert: int | None = None) -> Tensor:
    names = tuple(name.format(layer=layer, expert=expert) for name in row.names)
    shape, pieces = row.layout(args, names)
    index = tuple(number for number in (layer, expert) if number is not None)
    stack = () if layer is None else (args.num_layers,) if expert is None else (args.num_layers, args.num_experts)
    return Tensor(row.key.replace("*", LAYERS), index, stack, shape, tuple(pieces), row.transposed)


def sources_of(tensors: Iterator[Tensor]) -> dict[str, Source]:
    """The tensors there, in the order in which the tensors here need them."""
    places: dict[str, list[tuple[Tensor, Piece]]] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            places.setdefault(piece.name, []).append((tensor, piece))
    found = {}
    for name, its in places.items():
        tensor = its[0][0]
        shape = (sum(piece.count for _, piece in its), *tensor.shape[1:])
        its.sort(key=lambda place: place[1].source)
        found[name] = Source(shape[::-1] if tensor.transposed else shape, tuple(its))
    return found
