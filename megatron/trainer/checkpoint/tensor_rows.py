"""The tensors of Hugging Face models that make up each tensor of a checkpoint: a row for each kind of tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.flags.experts import has_experts
from megatron.trainer.checkpoint.tensor_table import (
    FURTHER_LAYERS,
    INNER,
    LAYERS,
    Layout,
    ModelTensor,
    copied,
    gated,
    gated_in_turn,
    keys_values,
    queries_keys_values,
    vocabulary,
    vocabulary_bias,
)

Size = Callable[[TrainConfig], int]
_hidden: Size = lambda args: args.hidden_size  # noqa: E731
_wide: Size = lambda args: args.ffn_hidden_size  # noqa: E731
_expert: Size = lambda args: args.moe_ffn_hidden_size  # noqa: E731
_shared: Size = lambda args: args.moe_shared_expert_intermediate_size  # noqa: E731
_experts: Size = lambda args: args.num_experts  # noqa: E731
_heads: Size = lambda args: args.num_attention_heads  # noqa: E731
_channels: Size = lambda args: args.kv_channels  # noqa: E731
_attended: Size = lambda args: args.num_attention_heads * args.kv_channels  # noqa: E731


@dataclass(frozen=True)
class Row:
    """A kind of tensor.

    Attributes:
        key: the key in our checkpoints. `*` stands for the prefix of a layer's keys. Layers of multi-token prediction
            have the rows with `*`, too, and only they have the rows whose key begins with `+`.
        names: the names in Hugging Face's files, with placeholders: `{layer}`, the previous layer `{before}`, the
            `{last}` layer, and `{expert}`.
        first: the names in the first layer, if they differ.
        where: whether a model has the tensor.
        has_experts: True if only layers with experts have the tensor, False if only layers without; None: all layers.
        stacked: whether the files have one tensor for all experts of a layer.
        copies: names of copies of the tensor in the files; each layer of multi-token prediction has one.
    """

    key: str
    names: tuple[str, ...]
    layout: Layout
    transposed: bool = False
    where: Callable[[TrainConfig], bool] = lambda args: True
    has_experts: bool | None = None
    stacked: bool = False
    first: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()

    @property
    def of_layer(self) -> bool:
        return "{layer}" in self.names[0] or bool(self.first)


def _untied(args: TrainConfig) -> bool:
    return args.untie_embeddings_and_output_weights


# --- Llama and similar models -----------------------------------------------------------------------------------------

_LAYER = "model.layers.{layer}."
_ATTENTION, _MLP = f"{_LAYER}self_attn.", f"{_LAYER}mlp."
_NORM_1, _NORM_2 = "*self_attention.linear_qkv.layer_norm_", "*mlp.linear_fc1.layer_norm_"
_QKV, _PROJ = "*self_attention.linear_qkv.", "*self_attention.linear_proj."
_ROUTER, _EXPERTS = "*mlp.router.", "*mlp.experts.experts."

_ENDS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary,
        copies=(f"{_LAYER}embed_tokens.weight",)),
    Row(f"{_NORM_1}weight", (f"{_LAYER}input_layernorm.weight",), copied(_hidden)),
    Row(f"{_NORM_2}weight", (f"{_LAYER}post_attention_layernorm.weight",), copied(_hidden)),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",), copied(_hidden)),
    Row("output_layer.weight", ("lm_head.weight",), vocabulary, where=_untied,
        copies=(f"{_LAYER}shared_head.head.weight",)),
)  # fmt: skip
_GROUPED_QUERIES = (
    Row(f"{_QKV}weight", tuple(f"{_ATTENTION}{each}_proj.weight" for each in "qkv"), queries_keys_values(_hidden)),
    Row(f"{_QKV}bias", tuple(f"{_ATTENTION}{each}_proj.bias" for each in "qkv"), queries_keys_values(None),
        where=lambda args: args.add_qkv_bias or args.add_bias_linear),
    Row("*self_attention.q_layernorm.weight", (f"{_ATTENTION}q_norm.weight",), copied(_channels),
        where=lambda args: args.qk_layernorm),
    Row("*self_attention.k_layernorm.weight", (f"{_ATTENTION}k_norm.weight",), copied(_channels),
        where=lambda args: args.qk_layernorm),
    Row(f"{_PROJ}weight", (f"{_ATTENTION}o_proj.weight",), copied(_hidden, _attended)),
)  # fmt: skip
_GATED_MLP = (
    Row("*mlp.linear_fc1.weight", (f"{_MLP}gate_proj.weight", f"{_MLP}up_proj.weight"), gated(_wide),
        has_experts=False),
    Row("*mlp.linear_fc2.weight", (f"{_MLP}down_proj.weight",), copied(_hidden, _wide), has_experts=False),
)  # fmt: skip


def _each_expert(mlp: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    expert = mlp + "experts.{expert}."
    return (
        Row(f"{_ROUTER}weight", (f"{mlp}gate.weight",), copied(_experts, _hidden), has_experts=True),
        Row(f"{_EXPERTS}linear_fc1.weight", (expert + gate, expert + up), gated(_expert), has_experts=True),
        Row(f"{_EXPERTS}linear_fc2.weight", (expert + down,), copied(_hidden, _expert), has_experts=True),
    )


_PROJECTIONS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_LLAMA = (*_ENDS, *_GROUPED_QUERIES, *_GATED_MLP)

# --- GPT-OSS: biases, sinks, and the experts of a layer in one tensor -------------------------------------------------

_OSS = f"{_MLP}experts."
_GPT_OSS = (
    *_ENDS,
    *_GROUPED_QUERIES,
    Row(f"{_PROJ}bias", (f"{_ATTENTION}o_proj.bias",), copied(_hidden)),
    Row("*self_attention.core_attention.softmax_offset", (f"{_ATTENTION}sinks",), copied(_heads)),
    Row(f"{_ROUTER}weight", (f"{_MLP}router.weight",), copied(_experts, _hidden)),
    Row(f"{_ROUTER}bias", (f"{_MLP}router.bias",), copied(_experts)),
    Row(f"{_EXPERTS}linear_fc1.weight", (f"{_OSS}gate_up_proj",), gated_in_turn(_expert, _hidden), transposed=True,
        stacked=True),
    Row(f"{_EXPERTS}linear_fc1.bias", (f"{_OSS}gate_up_proj_bias",), gated_in_turn(_expert), stacked=True),
    Row(f"{_EXPERTS}linear_fc2.weight", (f"{_OSS}down_proj",), copied(_hidden, _expert), transposed=True, stacked=True),
    Row(f"{_EXPERTS}linear_fc2.bias", (f"{_OSS}down_proj_bias",), copied(_hidden), stacked=True),
)  # fmt: skip

# --- DeepSeek: latent attention, dense first layers, shared experts, multi-token prediction ---------------------------

_queries: Size = lambda args: args.num_attention_heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)  # noqa: E731
_keys_values: Size = lambda args: args.num_attention_heads * (args.qk_head_dim + args.v_head_dim)  # noqa: E731
_query_latent: Size = lambda args: args.q_lora_rank  # noqa: E731
_latent: Size = lambda args: args.kv_lora_rank  # noqa: E731
_latent_and_rotated: Size = lambda args: args.kv_lora_rank + args.qk_pos_emb_head_dim  # noqa: E731
_values: Size = lambda args: args.num_attention_heads * args.v_head_dim  # noqa: E731


def _has_query_latent(args: TrainConfig) -> bool:
    return args.q_lora_rank is not None


_SELF, _SHARED = "*self_attention.", f"{_MLP}shared_experts."
_DEEPSEEK = (
    *_ENDS,
    Row(f"{_SELF}linear_q_proj.weight", (f"{_ATTENTION}q_proj.weight",), copied(_queries, _hidden),
        where=lambda args: not _has_query_latent(args)),
    Row(f"{_SELF}linear_q_down_proj.weight", (f"{_ATTENTION}q_a_proj.weight",), copied(_query_latent, _hidden),
        where=_has_query_latent),
    Row(f"{_SELF}q_layernorm.weight", (f"{_ATTENTION}q_a_layernorm.weight",), copied(_query_latent),
        where=_has_query_latent),
    Row(f"{_SELF}linear_q_up_proj.weight", (f"{_ATTENTION}q_b_proj.weight",), copied(_queries, _query_latent),
        where=_has_query_latent),
    Row(f"{_SELF}linear_kv_down_proj.weight", (f"{_ATTENTION}kv_a_proj_with_mqa.weight",),
        copied(_latent_and_rotated, _hidden)),
    Row(f"{_SELF}kv_layernorm.weight", (f"{_ATTENTION}kv_a_layernorm.weight",), copied(_latent)),
    Row(f"{_SELF}linear_kv_up_proj.weight", (f"{_ATTENTION}kv_b_proj.weight",), copied(_keys_values, _latent)),
    Row(f"{_PROJ}weight", (f"{_ATTENTION}o_proj.weight",), copied(_hidden, _values)),
    *_GATED_MLP,
    *_each_expert(_MLP, *_PROJECTIONS),
    Row(f"{_ROUTER}expert_bias", (f"{_MLP}gate.e_score_correction_bias",), copied(_experts), has_experts=True,
        where=lambda args: args.moe_router_enable_expert_bias),
    Row("*mlp.shared_experts.linear_fc1.weight", (f"{_SHARED}gate_proj.weight", f"{_SHARED}up_proj.weight"),
        gated(_shared), has_experts=True),
    Row("*mlp.shared_experts.linear_fc2.weight", (f"{_SHARED}down_proj.weight",), copied(_hidden, _shared),
        has_experts=True),
    Row("+enorm.weight", (f"{_LAYER}enorm.weight",), copied(_hidden)),
    Row("+hnorm.weight", (f"{_LAYER}hnorm.weight",), copied(_hidden)),
    Row("+eh_proj.weight", (f"{_LAYER}eh_proj.weight",), copied(_hidden, lambda args: 2 * args.hidden_size)),
    Row("+final_layernorm.weight", (f"{_LAYER}shared_head.norm.weight",), copied(_hidden)),
)  # fmt: skip

# --- GPT-2 and BERTs: biases everywhere -------------------------------------------------------------------------------


def _linear(key: str, name: str, weight: Layout, bias: Layout, *, transposed: bool = False) -> tuple[Row, Row]:
    return (Row(f"{key}weight", (f"{name}.weight",), weight, transposed=transposed),
            Row(f"{key}bias", (f"{name}.bias",), bias))  # fmt: skip


def _norm(key: str, name: str, *, first: str | None = None) -> tuple[Row, Row]:
    return tuple(
        Row(f"{key}{each}", (f"{name}.{each}",), copied(_hidden), first=(f"{first}.{each}",) if first else ())
        for each in ("weight", "bias")
    )


_H = "transformer.h.{layer}."
_POSITIONS = copied(lambda args: args.max_position_embeddings, _hidden)
_WORDS, _PLACES = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
_GPT2 = (
    Row(_WORDS, ("transformer.wte.weight",), vocabulary),
    Row(_PLACES, ("transformer.wpe.weight",), _POSITIONS),
    *_norm(_NORM_1, f"{_H}ln_1"),
    *_linear(_QKV, f"{_H}attn.c_attn", queries_keys_values(_hidden), queries_keys_values(None), transposed=True),
    *_linear(_PROJ, f"{_H}attn.c_proj", copied(_hidden, _attended), copied(_hidden), transposed=True),
    *_norm(_NORM_2, f"{_H}ln_2"),
    *_linear("*mlp.linear_fc1.", f"{_H}mlp.c_fc", copied(_wide, _hidden), copied(_wide), transposed=True),
    *_linear("*mlp.linear_fc2.", f"{_H}mlp.c_proj", copied(_hidden, _wide), copied(_hidden), transposed=True),
    *_norm("decoder.final_layernorm.", "transformer.ln_f"),
    Row("output_layer.weight", ("lm_head.weight",), vocabulary, where=_untied),
)  # fmt: skip

_B, _E = "encoder.layers.", "bert.encoder.layer.{layer}."
_HEAD_OF_BERT = "cls.predictions."
_OF_BERT = (
    Row(_WORDS, ("bert.embeddings.word_embeddings.weight",), vocabulary),
    Row(_PLACES, ("bert.embeddings.position_embeddings.weight",), _POSITIONS),
    Row("embedding.tokentype_embeddings.weight", ("bert.embeddings.token_type_embeddings.weight",),
        copied(lambda args: 2, _hidden)),
    Row(f"{_B}self_attention.linear_qkv.weight",
        tuple(f"{_E}attention.self.{each}.weight" for each in ("query", "key", "value")), queries_keys_values(_hidden)),
    Row(f"{_B}self_attention.linear_qkv.bias",
        tuple(f"{_E}attention.self.{each}.bias" for each in ("query", "key", "value")), queries_keys_values(None)),
    *_linear(f"{_B}self_attention.linear_proj.", f"{_E}attention.output.dense", copied(_hidden, _attended),
             copied(_hidden)),
    *_linear(f"{_B}mlp.linear_fc1.", f"{_E}intermediate.dense", copied(_wide, _hidden), copied(_wide)),
    *_linear(f"{_B}mlp.linear_fc2.", f"{_E}output.dense", copied(_hidden, _wide), copied(_hidden)),
    *_linear("pooler.dense.", "bert.pooler.dense", copied(_hidden, _hidden), copied(_hidden)),
    *_linear("lm_head.dense.", f"{_HEAD_OF_BERT}transform.dense", copied(_hidden, _hidden), copied(_hidden)),
    *_norm("lm_head.layer_norm.", f"{_HEAD_OF_BERT}transform.LayerNorm"),
    Row("output_layer.weight", (f"{_HEAD_OF_BERT}decoder.weight",), vocabulary, where=_untied),
    Row("output_layer.bias", (f"{_HEAD_OF_BERT}bias",), vocabulary_bias),
    *_linear("binary_head.", "cls.seq_relationship", copied(lambda args: 2, _hidden), copied(lambda args: 2)),
)  # fmt: skip
_B_NORM_1, _B_NORM_2 = f"{_B}self_attention.linear_qkv.layer_norm_", f"{_B}mlp.linear_fc1.layer_norm_"
_B_NORM_LAST = "encoder.final_layernorm."
_MEGATRON_BERT = (
    *_OF_BERT,
    *_norm(_B_NORM_1, f"{_E}attention.ln"),
    *_norm(_B_NORM_2, f"{_E}ln"),
    *_norm(_B_NORM_LAST, "bert.encoder.ln"),
)
# The published BERT has a norm after each sum. Here the same norm is the first part of the next half of a layer, of the
# next layer, or of the heads.
_E_NORM = "bert.encoder.layer.{}.output.LayerNorm"
_BERT = (
    *_OF_BERT,
    *_norm(_B_NORM_1, _E_NORM.format("{before}"), first="bert.embeddings.LayerNorm"),
    *_norm(_B_NORM_2, f"{_E}attention.output.LayerNorm"),
    *_norm(_B_NORM_LAST, _E_NORM.format("{last}")),
)

# --- T5 ---------------------------------------------------------------------------------------------------------------

_distances = copied(lambda args: args.relative_attention_num_buckets, _heads)


def _stack(stack: str) -> tuple[Row, ...]:
    """The rows that encoder and decoder share. The last part of a layer is the feed-forward layer."""
    own, block = f"{stack}.layers.", f"{stack}.block."
    attention, mlp = f"{block}{{layer}}.layer.0.", f"{block}{{layer}}.layer.{1 if stack == 'encoder' else 2}."
    products = f"{mlp}DenseReluDense."
    queries = tuple(f"{attention}SelfAttention.{each}.weight" for each in "qkv")
    return (
        Row(f"{stack}_relative_pos_emb.relative_attention_bias.weight",
            (f"{block}0.layer.0.SelfAttention.relative_attention_bias.weight",), _distances),
        Row(f"{own}self_attention.linear_qkv.layer_norm_weight", (f"{attention}layer_norm.weight",), copied(_hidden)),
        Row(f"{own}self_attention.linear_qkv.weight", queries, queries_keys_values(_hidden)),
        Row(f"{own}self_attention.linear_proj.weight", (f"{attention}SelfAttention.o.weight",),
            copied(_hidden, _attended)),
        Row(f"{own}mlp.linear_fc1.layer_norm_weight", (f"{mlp}layer_norm.weight",), copied(_hidden)),
        Row(f"{own}mlp.linear_fc1.weight", (f"{products}wi_0.weight", f"{products}wi_1.weight"), gated(_wide),
            where=lambda args: args.gated_gelu),
        Row(f"{own}mlp.linear_fc1.weight", (f"{products}wi.weight",), copied(_wide, _hidden),
            where=lambda args: args.relu),
        Row(f"{own}mlp.linear_fc2.weight", (f"{products}wo.weight",), copied(_hidden, _wide)),
        Row(f"{stack}.final_layernorm.weight", (f"{stack}.final_layer_norm.weight",), copied(_hidden)),
    )  # fmt: skip


_D, _CROSS = "decoder.layers.", "decoder.block.{layer}.layer.1."
_T5 = (
    Row(_WORDS, ("shared.weight",), vocabulary),
    *_stack("encoder"),
    *_stack("decoder"),
    Row(f"{_D}pre_cross_attn_layernorm.weight", (f"{_CROSS}layer_norm.weight",), copied(_hidden)),
    Row(f"{_D}cross_attention.linear_q.weight", (f"{_CROSS}EncDecAttention.q.weight",), copied(_attended, _hidden)),
    Row(f"{_D}cross_attention.linear_kv.weight",
        tuple(f"{_CROSS}EncDecAttention.{each}.weight" for each in "kv"), keys_values),
    Row(f"{_D}cross_attention.linear_proj.weight", (f"{_CROSS}EncDecAttention.o.weight",), copied(_hidden, _attended)),
    Row("output_layer.weight", ("lm_head.weight",), vocabulary, where=_untied),
)  # fmt: skip

TABLE: dict[str, tuple[Row, ...]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": (*_ENDS, *_GROUPED_QUERIES,
                *_each_expert(f"{_LAYER}block_sparse_moe.", "w1.weight", "w3.weight", "w2.weight")),
    "qwen3_moe": (*_ENDS, *_GROUPED_QUERIES, *_each_expert(_MLP, *_PROJECTIONS)),
    "gpt_oss": _GPT_OSS,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK,
    "gpt2": _GPT2,
    "bert": _BERT,
    "megatron-bert": _MEGATRON_BERT,
    "t5": _T5,
    "mt5": _T5,
}  # fmt: skip
"""`model_type` -> rows, for the model types in `model_families.FAMILIES`."""
REPEATED = {
    "lm_head.weight": _WORDS,
    f"{_HEAD_OF_BERT}decoder.weight": _WORDS,
    f"{_HEAD_OF_BERT}decoder.bias": "output_layer.bias",
    "encoder.embed_tokens.weight": _WORDS,
    "decoder.embed_tokens.weight": _WORDS,
}
"""Tensors in some files that repeat another tensor -> the key of that tensor in our checkpoints."""


def tensors_of(model_type: str, args: TrainConfig) -> Iterator[ModelTensor]:
    """Yield all tensors of a model, layer by layer.

    `args`: completed, with `padded_vocab_size`, and with `vocab_size` as in the files.
    """
    rows = [row for row in TABLE[model_type] if row.where(args)]
    experts, further = [False] * args.num_layers, args.mtp_num_layers or 0
    if args.num_experts is not None:
        experts = has_experts(args.moe_layer_freq, args.num_layers)
    ends = [row for row in rows if not row.of_layer]
    yield from (_tensor(row, args) for row in ends if row.key.startswith("embedding."))
    for layer in range(args.num_layers + further):
        is_further = layer >= args.num_layers
        for row in rows:
            if not row.of_layer or (row.key.startswith("+") and not is_further):
                continue
            if not is_further and layer >= _num_layers(row, args):
                continue
            if row.has_experts is None or row.has_experts is experts[min(layer, args.num_layers - 1)]:
                of_expert = "{expert}" in row.names[0] or row.stacked
                for expert in range(args.num_experts) if of_expert else (None,):
                    yield _tensor(row, args, layer, expert)
    yield from (_tensor(row, args) for row in ends if not row.key.startswith("embedding."))


def _num_layers(row: Row, args: TrainConfig) -> int:
    """The number of layers in the row's stack."""
    if args.architecture != "t5":
        return args.num_layers
    return args.encoder_num_layers if row.key.startswith("encoder.") else args.decoder_num_layers


def _tensor(row: Row, args: TrainConfig, layer: int | None = None, expert: int | None = None) -> ModelTensor:
    places = {"layer": layer, "before": (layer or 0) - 1, "last": args.num_layers - 1, "expert": expert}
    names = tuple(name.format(**places) for name in (row.first if layer == 0 and row.first else row.names))
    shape, pieces = row.layout(args, names)
    further, count, own = args.mtp_num_layers or 0, _num_layers(row, args), layer
    key = row.key.replace("*", LAYERS)
    if layer is not None and layer >= args.num_layers:
        key = FURTHER_LAYERS + row.key.replace("*", INNER).removeprefix("+")
        count, own = further, layer - args.num_layers
    index = tuple(number for number in (own, expert) if number is not None)
    stack = () if layer is None else (count,) if expert is None else (count, args.num_experts)
    copies = tuple(
        copy.format(layer=number) for copy in row.copies for number in range(args.num_layers, args.num_layers + further)
    )
    return ModelTensor(key, index, stack, shape, tuple(pieces), row.transposed, row.stacked, copies)
