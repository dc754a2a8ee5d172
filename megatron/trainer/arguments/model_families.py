"""The families of Hugging Face's models that can be converted, as rows of what their `config.json` says."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.trainer.arguments.config_parts import (
    Facts,
    Gelu,
    KeyValueHeads,
    Number,
    Only,
    Part,
    Rotary,
    Switch,
    WidthOfHeads,
    Window,
    head_dim,
    number,
    present,
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models of one `model_type`.

    Attributes:
        model: transformers' class of the model with a head for text.
        parts: what a configuration says.
        fixed: values of flags that all models of the family have.
        free: flags that take the configuration's value unless the command line gives another, since that changes no
            weight and no meaning of one.
        no_effect: further keys without influence on a trained model.
    """

    model: str
    parts: tuple[Part, ...]
    fixed: Facts = field(default_factory=dict)
    free: tuple[str, ...] = ()
    no_effect: tuple[str, ...] = ()


NO_EFFECT = (
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "_name_or_path",
    "output_attentions", "output_hidden_states", "return_dict", "task_specific_params", "id2label", "label2id",
    "problem_type", "finetuning_task", "_attn_implementation_autoset", "auto_map", "use_bfloat16", "torchscript",
    "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "tokenizer_class", "prefix", "pretraining_tp",
)  # fmt: skip
"""Keys that no trained model's numbers depend on, in training or evaluation of the whole model."""


_SILU = Only(
    "hidden_act", ("silu", "swish"), "the gated layers of this family are computed with silu alone", absent=False
)
_NO_BIAS = "linear layers with this bias alone have no flag"


def _like_llama(
    model: str, *parts: Part, head_dim_given: bool = False, experts: bool = False, no_effect: tuple[str, ...] = (),
    **fixed: object,
) -> Family:  # fmt: skip
    width = () if experts else (Number("intermediate_size", ("ffn_hidden_size",)),)
    return Family(
        model=model,
        parts=(
            Number("num_hidden_layers", ("num_layers",)),
            Number("hidden_size", ("hidden_size",)),
            Number("num_attention_heads", ("num_attention_heads",)),
            KeyValueHeads(),
            Number("head_dim", ("kv_channels",), absent=None if head_dim_given else head_dim),
            *width,
            Number("vocab_size", ("vocab_size",)),
            Number("max_position_embeddings", ("max_position_embeddings",)),
            Number("rms_norm_eps", ("norm_epsilon",), float),
            Number("attention_dropout", ("attention_dropout",), float),
            Switch("tie_word_embeddings", "untie_embeddings_and_output_weights", inverted=True),
            _SILU,
            Rotary(),
            Window(),
            *parts,
        ),
        fixed={
            "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False,
            "hidden_dropout": 0.0, **fixed,
        },
        free=("max_position_embeddings", "attention_dropout", "hidden_dropout"),
        no_effect=no_effect,
    )  # fmt: skip


_ROUTER = ("router_aux_loss_coef", "output_router_logits")
_NO_ATTENTION_BIAS = Only("attention_bias", (False,), _NO_BIAS)

FAMILIES: dict[str, Family] = {
    "llama": _like_llama("LlamaForCausalLM", _NO_ATTENTION_BIAS, Only("mlp_bias", (False,), _NO_BIAS),
        Only("rope_interleaved", (False,), "Llama rotates the two halves of a head here"),
        no_effect=("is_llama_config",)),
    "mistral": _like_llama("MistralForCausalLM"),
    "qwen2": _like_llama(
        "Qwen2ForCausalLM", Only("use_mrope", (False,), "positions have one dimension here"), add_qkv_bias=True),
    "qwen3": _like_llama("Qwen3ForCausalLM", _NO_ATTENTION_BIAS, head_dim_given=True, qk_layernorm=True),
    "mixtral": _like_llama(
        "MixtralForCausalLM",
        Number("intermediate_size", ("ffn_hidden_size", "moe_ffn_hidden_size")),
        Number("num_local_experts", ("num_experts",)),
        Number("num_experts_per_tok", ("moe_router_topk",)),
        Only("router_jitter_noise", (0.0, 0), "noise in the router is not computed here"),
        experts=True,
        no_effect=_ROUTER,
    ),
    "qwen3_moe": _like_llama(
        "Qwen3MoeForCausalLM",
        _NO_ATTENTION_BIAS,
        Number("intermediate_size", ("ffn_hidden_size",)),
        Number("moe_intermediate_size", ("moe_ffn_hidden_size",)),
        Number("num_experts", ("num_experts",), also=("num_local_experts",)),
        Number("num_experts_per_tok", ("moe_router_topk",)),
        Switch("norm_topk_prob", "moe_router_pre_softmax", inverted=True),
        Only("decoder_sparse_step", (1,), "every layer has experts here"),
        Only("mlp_only_layers", ([], None), "every layer has experts here"),
        experts=True,
        head_dim_given=True,
        no_effect=_ROUTER,
        qk_layernorm=True,
    ),
    "gpt2": Family(
        model="GPT2LMHeadModel",
        parts=(
            Number("n_layer", ("num_layers",)),
            Number("n_embd", ("hidden_size",)),
            Number("n_head", ("num_attention_heads",)),
            WidthOfHeads(),
            Number("n_inner", ("ffn_hidden_size",),
                   absent=lambda config: 4 * number("n_embd", present(config, ["n_embd"]), int)),
            Number("vocab_size", ("vocab_size",)),
            Number("n_positions", ("max_position_embeddings",)),
            Number("layer_norm_epsilon", ("norm_epsilon",), float),
            Number("resid_pdrop", ("hidden_dropout",), float),
            Number("attn_pdrop", ("attention_dropout",), float),
            Switch("tie_word_embeddings", "untie_embeddings_and_output_weights", inverted=True, absent=True),
            Gelu(),
            Only("scale_attn_weights", (True,), "scores are always scaled by the width of a head here"),
            Only("scale_attn_by_inverse_layer_idx", (False,), "scores are not scaled by the layer's number here"),
            Only("reorder_and_upcast_attn", (False,), "attention is computed in one order here"),
            Only("add_cross_attention", (False,), "there is no encoder here"),
        ),
        fixed={"position_embedding_type": "learned_absolute"},
        free=("attention_dropout", "hidden_dropout"),
        no_effect=("embd_pdrop", "n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
                   "summary_type", "summary_use_proj"),
    ),
}  # fmt: skip
"""By `model_type`. bert is not one: its layers normalize behind the residual sum, those of megatron.core before."""
