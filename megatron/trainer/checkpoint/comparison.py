"""What a model is, whatever the arguments that describe it are called and however they are spelled.

Problem: two command lines may spell one model differently, and Megatron-LM completes its arguments before it stores
them: with biases in all linear layers it stores `add_qkv_bias` as True, and it has other names for some of ours.
Comparing arguments as they stand refuses a checkpoint of the very same model.

Solution: both sides are turned into facts about the network, and these are compared. A fact is named like the argument
that a user would change. None stands for what the arguments do not say, or what has no effect in that model. A switch
that is newer than a checkpoint was off there, since no model had it yet.
"""

import argparse
from collections.abc import Iterator

from megatron.trainer.arguments.flags.parser import destinations
from megatron.trainer.arguments.flags.specification import Role
from megatron.trainer.arguments.rules.programs import ONLY_OF

MODEL_ARGUMENTS = destinations(Role.SHAPE)
"""What decides the shape or the meaning of the weights."""

# What facts are read from that are not the argument of their name.
_READ = ("group_query_attention", "num_query_groups", "position_embedding_type", "add_bias_linear", "add_qkv_bias")
_OF_ROTARY = ("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor",
              "use_rope_scaling", "rope_scaling_factor")  # fmt: skip
_OF_HEADS = ("num_classes", "class_names", "untie_embeddings_and_output_weights")
# Facts of some architectures only. Megatron-LM stores these arguments for every model.
_ONLY_OF = {name: ONLY_OF[name] for name in MODEL_ARGUMENTS if name in ONLY_OF} | {"class_names": ("bert-classify",)}
# Ours -> Megatron-LM's name, where its arguments follow megatron.core's configuration.
OTHER_NAMES = {"apply_layernorm_1p": "layernorm_zero_centered_gamma", "norm_epsilon": "layernorm_epsilon"}
# What a model had before Megatron-LM got the argument; also what None stands for.
WITHOUT_IT = {
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": 1,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "swiglu": False,
    "squared_relu": False,
    "quick_geglu": False,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": False,
    "add_bias_linear": True,
}
_GPT_LAYERS = "megatron.core.models.gpt.gpt_layer_specs"
# Parts of other networks, and the values that ask for none of them.
_NOT_BUILT_HERE = {
    "num_experts": (None, 0),
    "multi_latent_attention": (None, False),
    "experimental_attention_variant": (None,),
    "attention_output_gate": (None, False),
    "softmax_type": (None, "vanilla"),
    "window_size": (None,),
    "no_rope_freq": (None,),
    "softmax_scale": (None,),
    "glu_linear_offset": (None, 0),
    "activation_func_clamp_value": (None,),
    "use_mup": (None, False),
    "mtp_num_layers": (None, 0),
    "is_hybrid_model": (None, False),
    "hybrid_override_pattern": (None, ""),
    "hybrid_layer_pattern": (None, ""),
    "heterogeneous_layers_config_path": (None, ""),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "spec": (
        None,
        [_GPT_LAYERS, "get_gpt_layer_local_spec"],
        [_GPT_LAYERS, "get_gpt_layer_with_transformer_engine_spec"],
    ),
    "qk_l2_norm": (None, False),
    "position_embedding_type": (None, "learned_absolute", "rope", "none"),
    "normalization": (None, "LayerNorm", "RMSNorm"),
}


def differences(
    here: argparse.Namespace, there: argparse.Namespace | None, *, body_only: bool = False
) -> Iterator[tuple[str, object, object]]:
    """The facts in which two models differ, as (name, value here, value there). `body_only`: whatever their heads."""
    ours, theirs = _facts(here), _facts(there)
    architecture = getattr(here, "architecture", None)
    if body_only:
        ours = {name: value for name, value in ours.items() if name not in _OF_HEADS}
    for name, value in ours.items():
        if value is None or theirs[name] is None or value == theirs[name]:
            continue
        if architecture in _ONLY_OF.get(name, (architecture,)):
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
    rotary = {name: _value(args, name) for name in _OF_ROTARY}
    if not rotary["use_rope_scaling"]:
        rotary["rope_scaling_factor"] = None
    as_they_stand = [name for name in (*MODEL_ARGUMENTS, "class_names") if name not in (*_READ, *_OF_ROTARY)]
    return {
        **{name: _value(args, name) for name in as_they_stand},
        "num_query_groups": _key_value_heads(args),
        "position_embedding_type": positions,
        **{name: value if positions == "rope" else None for name, value in rotary.items()},
        "max_position_embeddings": _value(args, "max_position_embeddings") if positions == "learned_absolute" else None,
        **_biases(args),
    }


def _value(args: argparse.Namespace | None, name: str) -> object:
    """The argument by its name or Megatron-LM's; where neither is set, what models had before there was such an
    argument. None without any arguments."""
    if args is None:
        return None
    for each in (name, OTHER_NAMES.get(name)):
        if each is not None and getattr(args, each, None) is not None:
            return getattr(args, each)
    return WITHOUT_IT.get(name)


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
        if not padded:
            return True
        multiple = (getattr(side, "make_vocab_size_divisible_by", None) or 1) * (
            getattr(side, "tensor_model_parallel_size", None) or 1
        )
        low, high = max(low, padded - multiple), min(high, padded)
    return low < high
