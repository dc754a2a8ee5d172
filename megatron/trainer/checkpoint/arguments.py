"""The arguments in a checkpoint: storing them, comparing them before a load, and taking them over on request.

A checkpoint holds the run's arguments under 'args', as Megatron-LM's checkpoints do. Loading weights into a model of
another shape would fail with an error about a tensor; comparing the models first gives an error that names the argument
to change.

Problem: two command lines may describe one model differently, and Megatron-LM completes its arguments before it stores
them. For example, with biases in all linear layers it stores `add_qkv_bias` as True, and it has other names for some
arguments. A plain comparison of arguments would refuse a checkpoint of the same model.

Solution: both sets of arguments are converted to facts about the network, and the facts are compared. A fact has the
name of the argument that a user would change. Its value is None if the arguments do not determine it, or if it has no
effect in that model. A switch that is newer than the checkpoint counts as off there, since no model had it yet.
"""

import argparse
from collections.abc import Collection, Iterator

import torch

from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.arguments.flags.config import TrainConfig, cuts_optimizer_state
from megatron.trainer.arguments.flags.experts import EXPERTS, has_experts
from megatron.trainer.arguments.flags.model import ATTENTION, OF_LATENTS, OF_YARN
from megatron.trainer.arguments.flags.parser import FLAGS, destinations
from megatron.trainer.arguments.flags.specification import Arguments, Role
from megatron.trainer.arguments.rules.programs import ONLY_OF

# --- facts about a model, independent of the names of arguments -------------------------------------------------------

MODEL_ARGUMENTS = destinations(Role.SHAPE)
"""The arguments that determine the shape or the meaning of the weights."""

# Arguments that do not become the fact of their name, but are combined with others.
_READ = ("group_query_attention", "num_query_groups", "position_embedding_type", "add_bias_linear", "add_qkv_bias")
_OF_ROTARY = ("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor",
              "use_rope_scaling", "rope_scaling_factor")  # fmt: skip
_OF_EXPERTS = tuple(flag.dest for flag in EXPERTS.flags if Role.SHAPE in flag.roles and flag.dest != "num_experts")
_OF_ATTENTION = tuple(flag.dest for flag in ATTENTION.flags)
_OF_HEADS = ("num_classes", "class_names", "untie_embeddings_and_output_weights")
# Facts of some architectures only. Megatron-LM stores these arguments for every model.
_ONLY_OF = {name: ONLY_OF[name] for name in MODEL_ARGUMENTS if name in ONLY_OF} | {"class_names": ("bert-classify",)}
# This project's name of an argument -> Megatron-LM's name, where Megatron-LM uses megatron.core's name.
OTHER_NAMES = {"apply_layernorm_1p": "layernorm_zero_centered_gamma", "norm_epsilon": "layernorm_epsilon"}
# Argument -> the value that models had before Megatron-LM had the argument; None in a checkpoint means this value, too.
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
    "residual_from_norm": False,
    "swiglu": False,
    "squared_relu": False,
    "quick_geglu": False,
    "gated_gelu": False,
    "relu": False,
    "scaled_tied_head": False,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": False,
    "add_bias_linear": True,
    "num_experts": 0,
    "multi_latent_attention": False,
    "softmax_type": "vanilla",
    "window_size": None,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "mtp_num_layers": 0,
    "hybrid_layer_pattern": "",
}
_LISTS = {flag.dest for flag in EXPERTS.flags if flag.nargs == "+"}
_GPT_LAYERS = "megatron.core.models.gpt.gpt_layer_specs"
# Arguments for parts of networks that this project does not build -> the values for a network without the part.
_NOT_BUILT_HERE = {
    "experimental_attention_variant": (None,),
    "attention_output_gate": (None, False),
    "no_rope_freq": (None,),
    "softmax_scale": (None,),
    "use_mup": (None, False),
    "moe_shared_expert_gate": (None, False),
    "moe_latent_size": (None,),
    "is_hybrid_model": (None, False),
    "hybrid_override_pattern": (None, ""),
    "heterogeneous_layers_config_path": (None, ""),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "spec": (
        None,
        [_GPT_LAYERS, "get_gpt_layer_local_spec"],
        [_GPT_LAYERS, "get_gpt_layer_with_transformer_engine_spec"],
        ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    ),
    "qk_l2_norm": (None, False),
    "position_embedding_type": (None, "learned_absolute", "rope", "yarn", "relative", "none"),
    "normalization": (None, "LayerNorm", "RMSNorm"),
}


def _differences(
    here: TrainConfig, there: argparse.Namespace | None, *, body_only: bool = False
) -> Iterator[tuple[str, object, object]]:
    """Yield the facts in which two models differ, as (name, value here, value there).

    `body_only`: do not compare heads.
    """
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
    """Yield the arguments of a saved model, as (name, value), that require a part that this project does not build."""
    for name, neutral in _NOT_BUILT_HERE.items():
        value = getattr(there, name, None)
        if value not in neutral:
            yield name, value
    pattern = getattr(there, "hybrid_layer_pattern", None) or ""
    if set(pattern) - set("*-|"):
        yield "hybrid_layer_pattern", pattern


def _facts(args: TrainConfig | argparse.Namespace | None) -> dict[str, object]:
    positions = _positions(args)
    attention = _attention(args, positions)
    rotary = {name: _value(args, name) for name in _OF_ROTARY}
    num_experts = _value(args, "num_experts")
    pattern = _undivided(_value(args, "hybrid_layer_pattern"))
    if not rotary["use_rope_scaling"]:
        rotary["rope_scaling_factor"] = None
    as_they_stand = [
        name
        for name in (*MODEL_ARGUMENTS, "class_names")
        if name not in (*_READ, *_OF_ROTARY, *_OF_EXPERTS, *_OF_ATTENTION)
    ]
    return {
        **{name: _value(args, name) for name in as_they_stand},
        "hybrid_layer_pattern": pattern,
        # Megatron-LM counts attention and MLPs as separate layers.
        **({"num_layers": pattern.count("-")} if pattern else {}),
        "num_query_groups": _key_value_heads(args),
        "position_embedding_type": positions,
        **{name: value if positions == "rope" else None for name, value in rotary.items()},
        **({"rotary_base": rotary["rotary_base"]} if positions == "yarn" or attention["rope_type"] else {}),
        "max_position_embeddings": _value(args, "max_position_embeddings") if positions == "learned_absolute" else None,
        **{name: _of_experts(args, name) if num_experts else None for name in _OF_EXPERTS},
        **_biases(args),
        **attention,
        "attention_scale": None if args is None else _value(args, "attention_scale") or "",
    }


def _undivided(pattern: str | None) -> str | None:
    """The layers of a HybridModel, without the marks that divide them into stages."""
    return pattern and pattern.replace("|", "")


def _attention(args: TrainConfig | argparse.Namespace | None, positions: object) -> dict[str, object]:
    """The facts about attention; "" for a feature that the model lacks, None for settings that have no effect."""
    facts = {flag.dest: _value(args, flag.dest) for flag in ATTENTION.flags}
    if args is None:
        return facts
    facts = {flag.dest: flag.default if facts[flag.dest] is None else facts[flag.dest] for flag in ATTENTION.flags}
    is_latent, window, pattern = (
        facts[name] for name in ("multi_latent_attention", "window_size", "window_attn_skip_freq")
    )
    facts["rope_type"] = (facts["rope_type"] or "yarn") if is_latent else None
    for name in ("q_lora_rank", "activation_func_clamp_value"):
        facts[name] = facts[name] or ""
    facts["window_size"] = ",".join(map(str, window)) if window else ""
    if isinstance(pattern, int):
        pattern = [int(number % pattern != 0) for number in range(1, args.num_layers + 1)]
    facts["window_attn_skip_freq"] = (pattern or [1] * args.num_layers) if window else None
    unused = (*(() if is_latent else OF_LATENTS), *(() if is_latent or positions == "yarn" else OF_YARN))
    return facts | dict.fromkeys(unused)


def _value(args: TrainConfig | argparse.Namespace | None, name: str) -> object:
    """The value of an argument, by its name or Megatron-LM's name; if it is not set, its value in older models.

    None if there are no arguments.
    """
    if args is None:
        return None
    for each in (name, OTHER_NAMES.get(name)):
        if each is not None and getattr(args, each, None) is not None:
            return getattr(args, each)
    return WITHOUT_IT.get(name)


def _of_experts(args: TrainConfig | argparse.Namespace, name: str) -> object:
    """The value of an argument about experts: False or 0 if not set; for `moe_layer_freq`, 1 or 0 for each layer."""
    value = _value(args, name)
    if name == "moe_layer_freq" and isinstance(value, int):
        return [int(each) for each in has_experts(value, args.num_layers)]
    return value if value is not None else 0


def _key_value_heads(args: TrainConfig | argparse.Namespace | None) -> object:
    """The number of key-value heads; without grouped queries that of attention heads, whatever number is stored."""
    grouped = _value(args, "group_query_attention")
    return _value(args, "num_query_groups" if grouped else "num_attention_heads")


def _positions(args: TrainConfig | argparse.Namespace | None) -> object:
    """The kind of position embedding, with Megatron-LM's old flags taken into account."""
    kind = _value(args, "position_embedding_type")
    if _value(args, "use_rotary_position_embeddings"):
        return "rope"
    if kind == "learned_absolute" and _value(args, "add_position_embedding") is False:
        return "none"
    return kind


def _biases(args: TrainConfig | argparse.Namespace | None) -> dict[str, object]:
    """The facts about biases. If all linear layers have biases, the projection of queries, keys and values has one."""
    linear, of_queries = _value(args, "add_bias_linear"), _value(args, "add_qkv_bias")
    return {"add_bias_linear": linear, "add_qkv_bias": of_queries if linear is None else linear or bool(of_queries)}


def _same_vocabulary(args: TrainConfig, saved: argparse.Namespace | None) -> bool:
    """Whether two padded vocabulary sizes can belong to one vocabulary.

    The size is padded to a multiple that depends on the tensor-parallel degree, so padded sizes may differ.
    """
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


# --- the arguments of a checkpoint ------------------------------------------------------------------------------------

_TAKEN_UNLESS_GIVEN = (*destinations(Role.SAVED), "padded_vocab_size")
_ARCHITECTURES = {"gpt": "GPT", "bert": "BERT", "t5": "T5", "vit": "ViT", "bert-classify": "BERT that tells classes"}
_BODIES = {"bert-classify": "bert"}  # architecture -> the architecture whose weights it accepts without the head
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)


def saved_arguments(args: TrainConfig, **position: int) -> argparse.Namespace:
    """A copy of the arguments that any program can unpickle: plain values only, with paths as text.

    `position`: values that replace those of the arguments.
    """
    values = {name: value for name, value in vars(args).items() if _is_plain(value)}
    values.update({name: str(value) for name, value in vars(args).items() if hasattr(value, "__fspath__")})
    return argparse.Namespace(**{**values, **position})


def check_same_model(
    args: TrainConfig, saved: argparse.Namespace | None, path: object, *, body_only: bool = False
) -> None:
    """Check that the saved model is the same as the model of `args`.

    The models are compared, not the spellings of their arguments. A switch that the checkpoint's program did not have
    yet counts as off. Other facts that one side does not determine are not compared. `body_only`: heads may differ.
    Raises CheckpointError that names the first argument that differs.
    """
    _check_can_be_built(args, saved, path, body_only=body_only)
    for name, here, there in _differences(args, saved, body_only=body_only):
        values = f"{name} is {there!r} there and {here!r} here"
        if name == "padded_vocab_size":
            raise CheckpointError(
                f"checkpoint {path} holds a model of another vocabulary: {values}. Use the tokenizer that it was "
                "trained with, and its --make-vocab-size-divisible-by."
            )
        if name == "class_names":
            raise CheckpointError(
                f"checkpoint {path} tells other classes: {values}. Give the training data that it was trained with, or "
                "take its weights but for the head with --pretrained-checkpoint."
            )
        raise CheckpointError(
            f"checkpoint {path} holds another model: {values}. {_remedy(name, there)}, or pass --use-checkpoint-args "
            "to take the model's arguments from the checkpoint."
        )


def _remedy(name: str, value: object) -> str:
    """The change to the command line that gives an argument the value `value`, as part of a sentence."""
    if name == "num_query_groups":
        return f"Pass --group-query-attention --num-query-groups {value}"
    flag = next(flag for flag in FLAGS if flag.dest == name)
    if flag.stores is None:
        return f"Pass {flag.name} {value}" if value != "" else f"Leave {flag.name} out"
    return f"Pass {flag.name}" if value == flag.stores else f"Leave {flag.name} out"


def _check_can_be_built(
    args: TrainConfig, saved: argparse.Namespace | None, path: object, *, body_only: bool = False
) -> None:
    """Check that the saved model has the architecture of this program, and only parts that this project builds.

    Megatron-LM's checkpoints do not name their architecture. Raises CheckpointError for another model.
    """
    here, there = getattr(args, "architecture", None), getattr(saved, "architecture", None)
    fits = here == there or (body_only and _BODIES.get(here) == there)
    if None not in (here, there) and not fits:
        ours, theirs = _ARCHITECTURES[here], _ARCHITECTURES[there]
        remedy = ", or take its weights but for the head with --pretrained-checkpoint" * (_BODIES.get(here) == there)
        raise CheckpointError(
            f"checkpoint {path} holds a {theirs}, and this program wants a {ours}; give it to a program for a {theirs}"
            f", or another --load{remedy}"
        )
    for name, value in parts_not_built(saved):
        raise CheckpointError(
            f"checkpoint {path} holds a model that is not built here: {name} is {value!r} there; train it with "
            "Megatron-LM, or give another --load"
        )


def require_same_masters(args: TrainConfig, saved: argparse.Namespace | None, path: object) -> None:
    """Raise CheckpointError if an FP32 run, which has no separate master weights, loads a 16-bit run's optimizer state.

    A state that the distributed optimizer shards, on either side, is accepted.
    """
    if saved is None or cuts_optimizer_state(saved) or cuts_optimizer_state(args):
        return
    flag = next((flag for flag in ("bf16", "fp16") if getattr(saved, flag, False)), None)
    if flag is not None and not (args.bf16 or args.fp16):
        raise CheckpointError(
            f"checkpoint {path} was saved with --{flag}, whose optimizer state has FP32 masters beside the weights; "
            f"pass --{flag} to go on with it, or --no-load-optim to train in FP32 with a fresh optimizer state"
        )


def what_changes(args: TrainConfig, saved: argparse.Namespace | None) -> list[str]:
    """Lines for the log of a run that resumes with another pipeline program or another order of samples."""
    return [line for line in (_other_program(args, saved), _other_samples(args, saved)) if line]


def _other_samples(args: TrainConfig, saved: argparse.Namespace | None) -> str | None:
    """The line about samples if the resumed run trains on other samples or in another order; otherwise None.

    The position of a run counts samples, so after such a change it refers to other samples.
    """
    if saved is None or getattr(args, "skip_train", False):
        return None
    values = [(flag, getattr(saved, flag.dest), getattr(args, flag.dest)) for flag in FLAGS
              if Role.ORDER in flag.roles and hasattr(saved, flag.dest) and hasattr(args, flag.dest)]  # fmt: skip
    changed = [f"{flag.name} {_words(there)} (now {_words(here)})" for flag, there, here in values
               if _words(here).replace(" ", "") != _words(there).replace(" ", "")]  # fmt: skip
    if changed:
        return (
            f"was saved with {', '.join(changed)}: the samples, or their order from the first on, are others, so the "
            "run takes some twice and some never; give the former values to go on where it stopped"
        )
    there, here = _length(saved), _length(args)
    if there in (None, here):
        return None
    return (
        f"was saved by a run of {there} samples, and this run has {here}: data that a run passes through several times "
        "are shuffled over all passes together, so their order changes"
    )


def _length(args: TrainConfig) -> int | None:
    """The number of samples of the whole run; a ramp-up of the batch size is not taken into account."""
    iterations, size = getattr(args, "train_iters", None), getattr(args, "global_batch_size", None)
    return getattr(args, "train_samples", None) or (iterations and size and iterations * size)


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _other_program(args: TrainConfig, saved: argparse.Namespace | None) -> str | None:
    """The line about the pipeline program if the resumed run has another one; otherwise None.

    Such a change is safe, since a checkpoint is a drained state without microbatches in flight.
    """
    here, there = (getattr(each, "pipeline_program_sha256", None) for each in (args, saved))
    if here == there:
        return None
    was = f"program {there[:12]}" if there else f"schedule {getattr(saved, 'pipeline_schedule', 'of Megatron-LM')}"
    goes_on = f"program {here[:12]}" if here else f"schedule {args.pipeline_schedule}"
    return f"was saved under {was}; the run goes on with {goes_on}"


def with_saved_arguments(
    args: Arguments, saved: argparse.Namespace | None, path: object, *, further: Collection[str] = ()
) -> Arguments:
    """Replace parsed arguments of the model by those of a checkpoint, for --use-checkpoint-args.

    Arguments that determine the shape always come from the checkpoint; a switch that the checkpoint's program did not
    have yet is off. `further` arguments come from the checkpoint if it has them. The model's other arguments, and the
    tokenizer's, keep the values given on the command line (`args.given`). Raises CheckpointError if the checkpoint has
    no arguments or its model cannot be built.
    """
    if saved is None:
        raise CheckpointError(
            f"checkpoint {path} holds no arguments, so --use-checkpoint-args has nothing to take over"
        )
    _check_can_be_built(args, saved, path)
    taken = {}
    for name in (*MODEL_ARGUMENTS, *_TAKEN_UNLESS_GIVEN):
        their_name = name if hasattr(saved, name) else OTHER_NAMES.get(name, name)
        if hasattr(saved, their_name) and (name in MODEL_ARGUMENTS or name not in args.given):
            taken[name] = getattr(saved, their_name)
        elif name in MODEL_ARGUMENTS and name in WITHOUT_IT:
            taken[name] = WITHOUT_IT[name]
    taken |= {name: getattr(saved, name) for name in further if hasattr(saved, name)}
    for name in taken.keys() & _LISTS:  # Megatron-LM stores a single value without its list
        taken[name] = taken[name] if isinstance(taken[name], list) else [taken[name]]
    own, pattern = getattr(args, "hybrid_layer_pattern", None), _undivided(taken["hybrid_layer_pattern"])
    taken["hybrid_layer_pattern"] = own if own and _undivided(own) == pattern else pattern  # stages may differ
    if pattern:
        taken["num_layers"] = len(pattern)  # Megatron-LM's count, whichever program saved the checkpoint
    return Arguments(**{**vars(args), **taken})


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(item) for pair in value.items() for item in pair)
    return type(value) in _PLAIN
