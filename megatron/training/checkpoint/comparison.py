"""What a model is, whatever the arguments that describe it are called and however they are spelled.

Problem: two command lines may spell one model differently, and Megatron-LM completes its arguments before it stores
them: with biases in all linear layers it stores `add_qkv_bias` as True, and it has other names for some of ours.
Comparing arguments as they stand refuses a checkpoint of the very same model.

Solution: both sides are turned into facts about the network, and these are compared. A fact is named like the argument
that a user would change. None stands for what the arguments do not say, or what has no effect in that model.
"""

import argparse
from collections.abc import Iterator

# Facts that need no reading: each is the argument of its name.
_AS_THEY_STAND = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "normalization",
    "apply_residual_connection_post_layernorm",
    "swiglu",
    "squared_relu",
    "quick_geglu",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
)
# Ours -> Megatron-LM's name, where its arguments follow megatron.core's configuration.
OTHER_NAMES = {"apply_layernorm_1p": "layernorm_zero_centered_gamma", "norm_epsilon": "layernorm_epsilon"}
# Parts of other networks, and the values that ask for none of them.
_NOT_BUILT_HERE = {
    "num_experts": (None, 0),
    "multi_latent_attention": (None, False),
    "experimental_attention_variant": (None,),
    "attention_output_gate": (None, False),
    "softmax_type": (None, "vanilla"),
    "window_size": (None,),
    "no_rope_freq": (None,),
    "qk_l2_norm": (None, False),
    "position_embedding_type": (None, "learned_absolute", "rope", "none"),
    "normalization": (None, "LayerNorm", "RMSNorm"),
}


def differences(here: argparse.Namespace, there: argparse.Namespace | None) -> Iterator[tuple[str, object, object]]:
    """The facts in which two models differ, as (name, value here, value there)."""
    ours, theirs = _facts(here), _facts(there)
    is_bert = getattr(here, "architecture", None) == "bert"
    for name, value in ours.items():
        if value is None or theirs[name] is None or value == theirs[name]:
            continue
        if name != "bert_binary_head" or is_bert:  # Megatron-LM stores it for every model
            yield name, value, theirs[name]
    if not _same_vocabulary(here, there):
        yield "padded_vocab_size", here.padded_vocab_size, there.padded_vocab_size


def parts_not_built(there: argparse.Namespace | None) -> Iterator[tuple[str, object]]:
    """Arguments of a saved model that ask for what no model here has."""
    for name, neutral in _NOT_BUILT_HERE.items():
        value = getattr(there, name, None)
        if value not in neutral:
            yield name, value


def _facts(args: argparse.Namespace | None) -> dict[str, object]:
    positions = _positions(args)
    scales = _value(args, "use_rope_scaling")
    rotary = {
        "rotary_base": _value(args, "rotary_base"),
        "rotary_percent": _value(args, "rotary_percent"),
        "rotary_interleaved": _value(args, "rotary_interleaved"),
        "rotary_seq_len_interpolation_factor": _value(args, "rotary_seq_len_interpolation_factor", unset=1),
        "use_rope_scaling": scales,
        "rope_scaling_factor": _value(args, "rope_scaling_factor") if scales else None,
    }
    return {
        **{name: _value(args, name) for name in _AS_THEY_STAND},
        "num_query_groups": _key_value_heads(args),
        "position_embedding_type": positions,
        **{name: value if positions == "rope" else None for name, value in rotary.items()},
        "max_position_embeddings": _value(args, "max_position_embeddings") if positions == "learned_absolute" else None,
        **_biases(args),
        "apply_layernorm_1p": _value(args, "apply_layernorm_1p"),
        "bert_binary_head": _value(args, "bert_binary_head"),
    }


def _value(args: argparse.Namespace | None, name: str, unset: object = None) -> object:
    """The argument by its name or Megatron-LM's; `unset` where it is there and None."""
    for each in (name, OTHER_NAMES.get(name)):
        if each is not None and hasattr(args, each):
            value = getattr(args, each)
            return unset if value is None else value
    return None


def _key_value_heads(args: argparse.Namespace | None) -> object:
    """Without grouped queries each attention head has keys and values, whatever number of groups is stored."""
    grouped = _value(args, "group_query_attention")
    return _value(args, "num_query_groups" if grouped else "num_attention_heads")


def _positions(args: argparse.Namespace | None) -> object:
    """The kind, also by its old flags."""
    kind = _value(args, "position_embedding_type")
    if _value(args, "use_rotary_position_embeddings"):
        return "rope"
    if kind == "learned_absolute" and _value(args, "add_position_embedding") is False:
        return "none"
    return kind


def _biases(args: argparse.Namespace | None) -> dict[str, object]:
    """The projection of queries, keys and values has a bias where all linear layers have one, whatever `add_qkv_bias`
    says of it."""
    linear, of_queries = _value(args, "add_bias_linear"), _value(args, "add_qkv_bias")
    return {"add_bias_linear": linear, "add_qkv_bias": of_queries if linear is None else linear or bool(of_queries)}


def _same_vocabulary(args: argparse.Namespace, saved: argparse.Namespace | None) -> bool:
    """The vocabulary is padded to a multiple that depends on the tensor-parallel degree, so two padded sizes of one
    vocabulary may differ: they can belong together if some size is padded to either."""
    low, high = 0, float("inf")
    for side in (args, saved):
        padded = getattr(side, "padded_vocab_size", None)
        if padded is None:
            return True
        multiple = (getattr(side, "make_vocab_size_divisible_by", None) or 1) * (
            getattr(side, "tensor_model_parallel_size", None) or 1
        )
        low, high = max(low, padded - multiple), min(high, padded)
    return low < high
