"""The families of Hugging Face models that can be converted, each with the parts of its `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.trainer.arguments.config_attention import LatentWidths, Rotary, Window
from megatron.trainer.arguments.config_parts import (
    DenseBefore,
    Facts,
    FeedForward,
    Gelu,
    GroupsOfExperts,
    HeadOfT5,
    KeyValueHeads,
    Normalized,
    Number,
    Only,
    Part,
    SharedExperts,
    Stacks,
    Switch,
    WidthOfHeads,
    head_dim,
    number,
    present,
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """The models of one `model_type`.

    Attributes:
        model: transformers' class of the model with a language modeling head.
        parts: the parts of a configuration.
        fixed: values of flags that all models of the family share.
        free: flags that the command line may set differently from the configuration, since they change neither the
            weights nor their meaning.
        no_effect: further keys without influence on a trained model.
        architecture: the architecture of the program that trains the model.
    """

    model: str
    parts: tuple[Part, ...]
    fixed: Facts = field(default_factory=dict)
    free: tuple[str, ...] = ()
    no_effect: tuple[str, ...] = ()
    architecture: str = "gpt"


NO_EFFECT = (
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "_name_or_path",
    "output_attentions", "output_hidden_states", "return_dict", "task_specific_params", "id2label", "label2id",
    "problem_type", "finetuning_task", "_attn_implementation_autoset", "auto_map", "use_bfloat16", "torchscript",
    "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "tokenizer_class", "prefix", "pretraining_tp",
)  # fmt: skip
"""Keys on which a trained model's numbers do not depend, in training or evaluation of the whole model."""


_SILU = Only(
    "hidden_act", ("silu", "swish"), "the gated layers of this family are computed with silu alone", absent=False
)
_NO_BIAS = "linear layers with this bias alone have no flag"
_OF_EVERY_LAYER = (
    Number("num_hidden_layers", ("num_layers",)),
    Number("hidden_size", ("hidden_size",)),
    Number("num_attention_heads", ("num_attention_heads",)),
    Number("vocab_size", ("vocab_size",)),
    Number("max_position_embeddings", ("max_position_embeddings",)),
)
_GATED = (
    Number("rms_norm_eps", ("norm_epsilon",), float),
    Number("attention_dropout", ("attention_dropout",), float),
    Switch("tie_word_embeddings", "untie_embeddings_and_output_weights", inverted=True),
    _SILU,
)
_LIKE_LLAMA = {
    "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False,
    "hidden_dropout": 0.0,
}  # fmt: skip
_NO_LAYERS, _ALL_LAYERS, _LAST_LAYERS = Window(), Window("all"), Window("from", switched=True)
_FREE = ("max_position_embeddings", "attention_dropout", "hidden_dropout")


def _like_llama(
    model: str, *parts: Part, head_dim_given: bool = False, experts: bool = False, no_effect: tuple[str, ...] = (),
    windows: Window = _NO_LAYERS, **fixed: object,
) -> Family:  # fmt: skip
    width = () if experts else (Number("intermediate_size", ("ffn_hidden_size",)),)
    return Family(
        model=model,
        parts=(
            *_OF_EVERY_LAYER,
            KeyValueHeads(),
            Number("head_dim", ("kv_channels",), absent=None if head_dim_given else head_dim),
            *width,
            *_GATED,
            Rotary(),
            windows,
            *parts,
        ),
        fixed={**_LIKE_LLAMA, **fixed},
        free=_FREE,
        no_effect=no_effect,
    )


_ROUTER = ("router_aux_loss_coef", "output_router_logits")
_NO_ATTENTION_BIAS = Only("attention_bias", (False,), _NO_BIAS)


def _deepseek(model: str, *parts: Part, **fixed: object) -> Family:
    return Family(
        model=model,
        parts=(
            *_OF_EVERY_LAYER,
            LatentWidths(),
            Number("intermediate_size", ("ffn_hidden_size",)),
            *_GATED,
            Only("rms_norm_eps", (1e-6,), "the norms of the latents have 1e-06, and megatron.core one for all",
                 absent=False),
            Rotary(latents=True),
            Number("n_routed_experts", ("num_experts",), also=("num_local_experts",)),
            Number("num_experts_per_tok", ("moe_router_topk",)),
            Number("moe_intermediate_size", ("moe_ffn_hidden_size",)),
            Number("routed_scaling_factor", ("moe_router_topk_scaling_factor",), float, neutral=1.0),
            DenseBefore(),
            SharedExperts(),
            _NO_ATTENTION_BIAS,
            *parts,
        ),
        fixed={
            **_LIKE_LLAMA, "multi_latent_attention": True, "qk_layernorm": True, "moe_router_dtype": "fp32", **fixed,
        },
        free=(*_FREE, "kv_channels", "moe_router_dtype", "mtp_num_layers"),
        no_effect=("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits"),
    )  # fmt: skip


def _bert(model: str, **fixed: object) -> Family:
    return Family(
        model=model,
        architecture="bert",
        parts=(
            *_OF_EVERY_LAYER,
            WidthOfHeads(),
            Number("intermediate_size", ("ffn_hidden_size",)),
            Number("layer_norm_eps", ("norm_epsilon",), float),
            Number("hidden_dropout_prob", ("hidden_dropout",), float),
            Number("attention_probs_dropout_prob", ("attention_dropout",), float),
            Switch("tie_word_embeddings", "untie_embeddings_and_output_weights", inverted=True, absent=True),
            Only("hidden_act", ("gelu",), "megatron.core's head of a BERT has the exact GELU alone", absent=False),
            Only("type_vocab_size", (2,), "samples have two segments here", absent=False),
            Only("position_embedding_type", ("absolute",), "positions are learned in this family"),
            Only("is_decoder", (False,), "tokens attend to all others here"),
            Only("add_cross_attention", (False,), "there is no encoder here"),
        ),
        fixed={"position_embedding_type": "learned_absolute", "bias_gelu_fusion": False, **fixed},
        free=("attention_dropout", "hidden_dropout"),
        no_effect=(
            "classifier_dropout",
            "gradient_checkpointing",
            "directionality",
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_num_fc_layers",
            "pooler_size_per_head",
            "pooler_type",
        ),
    )


_GATED_GELU = "the feed-forward layers of an mT5 have a gated GELU"


def _t5(model: str, *parts: Part, **fixed: object) -> Family:
    return Family(
        model=model,
        architecture="t5",
        parts=(
            Stacks(),
            Number("d_model", ("hidden_size",)),
            Number("d_kv", ("kv_channels",)),
            Number("d_ff", ("ffn_hidden_size",)),
            Number("num_heads", ("num_attention_heads",)),
            Number("vocab_size", ("vocab_size",)),
            Number("relative_attention_num_buckets", ("relative_attention_num_buckets",)),
            Number("relative_attention_max_distance", ("relative_attention_max_distance",),
                   absent=lambda config: 128),  # the value of all T5s that are older than the key
            Number("layer_norm_epsilon", ("norm_epsilon",), float),
            Number("dropout_rate", ("hidden_dropout", "attention_dropout"), float),
            *parts,
            Only("is_encoder_decoder", (True,), "a T5 has both stacks"),
            Only("is_decoder", (False,), "a T5 has both stacks"),
        ),
        fixed={
            "normalization": "RMSNorm", "position_embedding_type": "relative", "add_bias_linear": False,
            "attention_scale": 1.0, **fixed,
        },
        free=("attention_dropout", "hidden_dropout"),
        no_effect=("initializer_factor", "n_positions", "output_past", "classifier_dropout"),
    )  # fmt: skip


_NO_MORE_LAYERS = "this family has no layers of multi-token prediction here"

FAMILIES: dict[str, Family] = {
    "llama": _like_llama("LlamaForCausalLM", _NO_ATTENTION_BIAS, Only("mlp_bias", (False,), _NO_BIAS),
        Only("rope_interleaved", (False,), "Llama rotates the two halves of a head here"),
        no_effect=("is_llama_config",)),
    "mistral": _like_llama("MistralForCausalLM", windows=_ALL_LAYERS),
    "qwen2": _like_llama(
        "Qwen2ForCausalLM", Only("use_mrope", (False,), "positions have one dimension here"), windows=_LAST_LAYERS,
        add_qkv_bias=True),
    "qwen3": _like_llama(
        "Qwen3ForCausalLM", _NO_ATTENTION_BIAS, head_dim_given=True, windows=_LAST_LAYERS, qk_layernorm=True),
    "mixtral": _like_llama(
        "MixtralForCausalLM",
        Number("intermediate_size", ("ffn_hidden_size", "moe_ffn_hidden_size")),
        Number("num_local_experts", ("num_experts",)),
        Number("num_experts_per_tok", ("moe_router_topk",)),
        Only("router_jitter_noise", (0.0, 0), "noise in the router is not computed here"),
        experts=True,
        no_effect=_ROUTER,
        windows=_ALL_LAYERS,
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
        windows=Window("all", switched=True),
        qk_layernorm=True,
    ),
    "gpt_oss": _like_llama(
        "GptOssForCausalLM",
        Only("attention_bias", (True,), "all linear layers of this family have biases", absent=False),
        Number("intermediate_size", ("ffn_hidden_size", "moe_ffn_hidden_size")),
        Number("num_local_experts", ("num_experts",), also=("num_experts",)),
        Number("num_experts_per_tok", ("moe_router_topk",), also=("experts_per_token",)),
        Number("swiglu_limit", ("activation_func_clamp_value",), float),
        Only("swiglu_alpha", (1.702,), "megatron.core's quick GELU has 1.702 alone"),
        experts=True,
        head_dim_given=True,
        no_effect=(*_ROUTER, "initial_context_length"),
        windows=Window("listed"),
        swiglu=False, quick_geglu=True, glu_linear_offset=1.0, add_bias_linear=True, softmax_type="learnable",
    ),
    "deepseek_v3": _deepseek(
        "DeepseekV3ForCausalLM",
        GroupsOfExperts(rated_by=2),
        Normalized(),
        Only("topk_method", ("noaux_tc",), "DeepSeek-V3 balances by a bias of each expert"),
        Only("scoring_func", ("sigmoid",), "DeepSeek-V3 scores by sigmoid"),
        Only("rope_interleave", (True,), "megatron.core's latent attention rotates neighbouring channels"),
        Number("num_nextn_predict_layers", ("mtp_num_layers",), also=("num_mtp_layers",), absent=lambda config: 0,
               neutral=0),
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    ),
    "deepseek_v2": _deepseek(
        "DeepseekV2ForCausalLM",
        GroupsOfExperts(rated_by=1, method="group_limited_greedy"),
        Only("scoring_func", ("softmax",), "DeepSeek-V2 scores by softmax"),
        Only("norm_topk_prob", (False,), "scores are not divided by their sum in this family", absent=False),
        Only("mlp_bias", (False,), _NO_BIAS),
        Only("num_nextn_predict_layers", (0,), _NO_MORE_LAYERS),
        moe_router_pre_softmax=True,
    ),
    "gpt2": Family(
        model="GPT2LMHeadModel",
        parts=(
            Number("n_layer", ("num_layers",)),
            Number("n_embd", ("hidden_size",)),
            Number("n_head", ("num_attention_heads",)),
            WidthOfHeads("n_embd", "n_head"),
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
    "bert": _bert("BertForPreTraining", residual_from_norm=True),
    "megatron-bert": _bert("MegatronBertForPreTraining"),
    "t5": _t5("T5ForConditionalGeneration", FeedForward(), HeadOfT5()),
    "mt5": _t5(
        "MT5ForConditionalGeneration",
        Only("feed_forward_proj", ("gated-gelu",), _GATED_GELU, absent=False),
        Only("is_gated_act", (True,), _GATED_GELU),
        Only("dense_act_fn", ("gelu_new",), _GATED_GELU),
        Only("tie_word_embeddings", (False,), "an mT5 has a head of its own; where the files hold lm_head.weight, "
             "write false", absent=False),
        gated_gelu=True, untie_embeddings_and_output_weights=True,
    ),
}  # fmt: skip
"""`model_type` -> family."""

_ROBERTA = (
    "its positions begin behind the padding's number, and its tokenizer is not one of pretrain_bert.py's; such a model "
    "cannot be trained here (bert can)"
)
_UMT5 = "each of its layers has a table of distances of its own; such a model cannot be computed here (mt5 can)"
NOT_COMPUTED = {"roberta": _ROBERTA, "umt5": _UMT5}
"""`model_type` -> why models of this kind cannot be converted."""
