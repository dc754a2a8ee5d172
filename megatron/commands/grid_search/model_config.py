"""A Hugging Face model as flags of the training programs: from its `config.json`, or by its name.

A row of `FAMILIES` says under which key a family's configuration holds each fact, and which facts all models of the
family share without a key. Families without a row here are read as a run reads them, without defaults
(`trainer.arguments.hugging_face`). Unknown families are refused by name, and so is a key that changes the model and has
no flag. A configuration limits the length of sequences and does not say the trained length, so `--seq-length` is the
user's.

`--model` knows models by name, from the `config.json` of each. GPT-3 has GPT-2's layers; its sizes are those of Brown
et al. 2020 (175B), and of BPipe's Table 1. The others are the files that their makers published beside the weights.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.documents.faults import nearest, shown
from megatron.documents.files import read_document
from megatron.trainer.arguments.hugging_face import model_of
from megatron.trainer.arguments.model_families import FAMILIES as TRAINED
from megatron.trainer.plan.command import SEARCHED

_LAYERS = {"num_hidden_layers": "--num-layers", "hidden_size": "--hidden-size",
           "num_attention_heads": "--num-attention-heads", "vocab_size": "--vocab-size"}  # fmt: skip
_WIDE = {"intermediate_size": "--ffn-hidden-size"}
_ROTARY = {"rope_theta": "--rotary-base"}
_OF_EXPERTS = {"num_experts": "--num-experts", "num_experts_per_tok": "--moe-router-topk",
               "moe_intermediate_size": "--moe-ffn-hidden-size"}  # fmt: skip
_SHARED_EXPERT = {"shared_expert_intermediate_size": "--moe-shared-expert-intermediate-size"}
_RMS_GATED = ("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear",
              "--attention-dropout", "0", "--hidden-dropout", "0")  # fmt: skip
_SILU, _GELU = ("silu", "swish"), ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


@dataclass(frozen=True, kw_only=True)
class ConfigRules:
    """The rules by which the `config.json` of a family of models is read.

    Attributes:
        needs, may_have: key -> flag, for required keys and for keys with a default.
        flags: the flags that all models of the family have.
        activations: the supported values of the key `hidden_act` or `activation_function`.
        ties: whether embedding and output layer are tied if the configuration does not say so; None: there is no
            choice.
        attention_bias: the supported value of the key `attention_bias`, if there is such a key.
        remarks: key -> what the planner does not model if the key's value switches it on.
        architecture: the value of `--architecture`.
    """

    needs: Mapping[str, str]
    may_have: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    activations: tuple[str, ...] = _SILU
    ties: bool | None = False
    attention_bias: bool = False
    remarks: Mapping[str, str] = field(default_factory=dict)
    architecture: str = "gpt"


_LLAMA = ConfigRules(
    needs=_LAYERS | _WIDE, flags=_RMS_GATED,
    may_have=_ROTARY | {"num_key_value_heads": "--num-query-groups", "head_dim": "--kv-channels",
                        "rms_norm_eps": "--norm-epsilon"},
)  # fmt: skip


def _like_llama(*flags: str, needs: Mapping[str, str] = {}, may_have: Mapping[str, str] = {}) -> ConfigRules:
    return ConfigRules(
        needs={**_LLAMA.needs, **needs}, may_have={**_LLAMA.may_have, **may_have}, flags=(*_RMS_GATED, *flags)
    )


FAMILIES: dict[str, ConfigRules] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _like_llama("--add-qkv-bias"),
    "qwen3": _like_llama("--qk-layernorm"),
    "mixtral": _like_llama(needs={"num_local_experts": "--num-experts", "num_experts_per_tok": "--moe-router-topk"}),
    "qwen2_moe": _like_llama("--add-qkv-bias", needs=_OF_EXPERTS | _SHARED_EXPERT),
    "qwen3_moe": _like_llama("--qk-layernorm", needs=_OF_EXPERTS, may_have=_SHARED_EXPERT),
    "gpt2": ConfigRules(
        needs={"n_layer": "--num-layers", "n_embd": "--hidden-size", "n_head": "--num-attention-heads",
               "vocab_size": "--vocab-size", "n_positions": "--max-position-embeddings"},
        may_have={"n_inner": "--ffn-hidden-size", "resid_pdrop": "--hidden-dropout",
                  "attn_pdrop": "--attention-dropout", "layer_norm_epsilon": "--norm-epsilon"},
        activations=_GELU, ties=True,
    ),
    "gpt_neo": ConfigRules(
        needs={"num_layers": "--num-layers", "hidden_size": "--hidden-size", "num_heads": "--num-attention-heads",
               "vocab_size": "--vocab-size", "max_position_embeddings": "--max-position-embeddings"},
        may_have=_WIDE | {"resid_dropout": "--hidden-dropout", "attention_dropout": "--attention-dropout",
                          "layer_norm_epsilon": "--norm-epsilon"},
        activations=_GELU, ties=True,
        remarks={"attention_types": "attention to a window is priced, and trained, as attention to all tokens before"},
    ),
    "gpt_neox": ConfigRules(
        needs=_LAYERS | _WIDE,
        may_have={"rotary_pct": "--rotary-percent", "rotary_emb_base": "--rotary-base", **_ROTARY,
                  "hidden_dropout": "--hidden-dropout", "attention_dropout": "--attention-dropout",
                  "layer_norm_eps": "--norm-epsilon"},
        flags=("--position-embedding-type", "rope"), activations=_GELU, attention_bias=True,
        remarks={"use_parallel_residual": "attention and feed-forward layer are priced, and trained, one behind the "
                                          "other"},
    ),
    "bert": ConfigRules(
        needs=_LAYERS | _WIDE | {"max_position_embeddings": "--max-position-embeddings"},
        may_have={"hidden_dropout_prob": "--hidden-dropout", "attention_probs_dropout_prob": "--attention-dropout",
                  "layer_norm_eps": "--norm-epsilon"},
        activations=_GELU, ties=None, architecture="bert",
        remarks={"model_type": "priced, and trained, as Megatron-LM's BERT, whose norms come first; training with "
                               "--load-hf computes the published one"},
    ),
}  # fmt: skip
"""`model_type` -> the rules of a family whose configurations are read with their defaults."""
CONVERTED = tuple(name for name, row in TRAINED.items() if name not in FAMILIES and row.architecture in SEARCHED)
"""Further families, whose configurations are read as a run reads them: no default is assumed."""
KNOWN = (*FAMILIES, *CONVERTED)

_REFUSED = {
    "quantization_config": "weights that are quantized are not trained here",
    "mlp_bias": "biases of the feed-forward layer alone have no flag",
    "mlp_only_layers": "layers without experts at places of their own are not read",
}
"""Key -> why a model that switches it on is refused."""


_MODELS = ("model_script", "model_yaml", "model_config", "model")
"""Options that name a model."""


@dataclass(frozen=True)
class ConfiguredModel:
    """Flags of a training program, `--architecture`, and lines for the user on how the configuration was read."""

    argv: list[str]
    architecture: str
    notes: list[str]


def named_model(name: str) -> ConfiguredModel:
    """Return the model with a known name. Raises ValueError for an unknown name."""
    if name not in NAMED:
        near = nearest(name, NAMED)
        hint = f"; the nearest that is known is {near}" if near else ""
        raise ValueError(f"--model {name} is no model that is known{hint}; --list-models lists them")
    return _read(NAMED[name], f"--model {name}", sequence_length=None)


def model_of_config(path: str, *, sequence_length: int | None) -> ConfiguredModel:
    """The model of a `config.json`.

    Args:
        sequence_length: tokens of a training sequence; None: unknown. A window that is at least as long has no effect.

    Raises:
        ValueError: the file is no mapping, the family is unknown, a key is missing or no number, or has no flag.
    """
    document = read_document(path)
    if not isinstance(document, Mapping):
        raise ValueError(f"{path} is no mapping; give the config.json of a model")
    return _read(document, path, sequence_length=sequence_length)


def add_configured_arguments(model: argparse.ArgumentParser) -> None:
    """Add the flags that name a published model, or the `config.json` of one."""
    model.add_argument("--model-config", metavar="FILE",
                       help=f"config.json of Hugging Face: {', '.join(KNOWN)}; --seq-length besides")  # fmt: skip
    model.add_argument("--model", metavar="NAME", help="one that is known by name; --seq-length besides")
    model.add_argument("--list-models", action=_ListModels, help="the names that --model takes")


class _ListModels(argparse.Action):
    """Prints the names, and ends, as --help does."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(*NAMED, sep="\n")
        parser.exit()


def refuse_several_models(options: argparse.Namespace) -> None:
    """Raise ValueError if more than one option names a model."""
    given = [name for name in _MODELS if vars(options).get(name) is not None]
    if len(given) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{names} exclude each other; keep one")


def read_configured(options: argparse.Namespace, *, sequence_length: int | None) -> ConfiguredModel | None:
    """The model of --model or --model-config; None without either. Raises ValueError for an unsupported model."""
    if options.model is not None:
        return named_model(options.model)
    if options.model_config is not None:
        return model_of_config(options.model_config, sequence_length=sequence_length)
    return None


def _read(config: Mapping[str, object], source: str, *, sequence_length: int | None) -> ConfiguredModel:
    if config.get("model_type") in CONVERTED:
        model = model_of(config, source)
        return ConfiguredModel(model.argv(), model.family.architecture, [])
    config = {key: value for key, value in config.items() if value is not None}  # null: the family's default
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        kind = f"{shown(config['model_type'])} is not" if "model_type" in config else "is missing, which has to be"
        raise ValueError(
            f"{source}: model_type {kind} among {', '.join(KNOWN)}; give the model by flags, or by --model-yaml"
        )
    for key, reason in _REFUSED.items():
        if config.get(key):
            raise ValueError(f"{source}: {key} is {shown(config[key])}, and {reason}; give the model by flags")
    _refuse_window(config, source, sequence_length)
    if config.get("attention_bias", family.attention_bias) != family.attention_bias:
        raise ValueError(
            f"{source}: attention_bias is {shown(config['attention_bias'])}, and {config['model_type']} is read with "
            f"{family.attention_bias}; give the model by flags"
        )
    config = {**_in_older_keys(config), **config}
    argv = [*family.flags]
    for key, flag in (*family.needs.items(), *family.may_have.items()):
        value = config.get(key)
        if value is None and key not in family.needs:
            continue
        argv += [flag, _number(value, f"{source}: {key}")]
    activation = config.get("hidden_act", config.get("activation_function", family.activations[0]))
    if activation not in family.activations:
        raise ValueError(
            f"{source}: the activation is {shown(activation)}, and {config['model_type']} is read with "
            f"{' or '.join(family.activations)}; give the model by flags"
        )
    if "--num-query-groups" in argv:
        argv.append("--group-query-attention")
    ties = config.get("tie_word_embeddings", family.ties)
    if ties not in (True, False, None):
        raise ValueError(f"{source}: tie_word_embeddings is {shown(ties)}; give true or false")
    if family.ties is not None and not ties:
        argv.append("--untie-embeddings-and-output-weights")
    if config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"{source}: decoder_sparse_step is {shown(config['decoder_sparse_step'])}, and experts are read for every "
            "layer; give the model by flags, with --moe-layer-freq"
        )
    notes = [f"{source}: {key}: {remark}" for key, remark in family.remarks.items() if config.get(key)]
    return ConfiguredModel([*argv, *_scaled(config, source)], family.architecture, notes)


def _refuse_window(config: Mapping[str, object], source: str, sequence_length: int | None) -> None:
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True):
        return
    if sequence_length is None or not isinstance(window, int) or window < sequence_length:
        raise ValueError(
            f"{source}: sliding_window is {shown(window)}, and attention to a window is not modelled; give sequences "
            "that are no longer by --seq-length, or the model by flags"
        )


def _in_older_keys(config: Mapping[str, object]) -> Mapping[str, object]:
    """Older key -> a value that newer files keep in a mapping of its own, or under another key."""
    given, found = config.get("rope_parameters"), {}
    if isinstance(given, Mapping):
        found = {"rope_theta": given.get("rope_theta"), "rotary_pct": given.get("partial_rotary_factor")}
    return {**found, "num_experts": config.get("num_local_experts")}


def _scaled(config: Mapping[str, object], source: str) -> tuple[str, ...]:
    """The flags of Llama 3.1's scaling of rotary frequencies. Others change neither time nor memory, and have no
    flag."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping) or scaling.get("rope_type") != "llama3":
        return ()
    return (
        "--use-rope-scaling",
        "--rope-scaling-factor",
        _number(scaling.get("factor"), f"{source}: rope_scaling.factor"),
    )


def _number(value: object, what: str) -> str:
    """Return a number as the text of a flag's value. Raises ValueError for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        said = "missing" if value is None else f"{shown(value)}, no number{' from 0 on' if is_number else ''}"
        raise ValueError(f"{what} is {said}; give the config.json of a model")
    return f"{int(value)}" if value == int(value) else repr(value)


_LLAMA_2 = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
          "vocab_size")  # fmt: skip
_GPT2 = ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions")
_BERT = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
         "max_position_embeddings")  # fmt: skip
_LLAMA_31 = {
    "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}
}  # fmt: skip
_QWEN = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6}
_ROWS: tuple[tuple[str, str, tuple[str, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ("gpt2", "gpt2", _GPT2, (12, 768, 12, 50257, 1024), {}),
    ("gpt2-medium", "gpt2", _GPT2, (24, 1024, 16, 50257, 1024), {}),
    ("gpt2-large", "gpt2", _GPT2, (36, 1280, 20, 50257, 1024), {}),
    ("gpt2-xl", "gpt2", _GPT2, (48, 1600, 25, 50257, 1024), {}),
    ("gpt3-13b", "gpt2", _GPT2, (40, 5120, 40, 51200, 2048), {}),
    ("gpt3-96b", "gpt2", _GPT2, (80, 9984, 104, 51200, 2048), {}),
    ("gpt3-134b", "gpt2", _GPT2, (84, 11520, 120, 51200, 2048), {}),
    ("gpt3-175b", "gpt2", _GPT2, (96, 12288, 96, 51200, 2048), {}),
    ("bert-large", "bert", _BERT, (24, 1024, 16, 4096, 30522, 512), {}),
    ("gpt-neox-20b", "gpt_neox", (*_LLAMA_2[:3], *_LLAMA_2[4:]), (44, 6144, 64, 24576, 50432),
     {"rotary_pct": 0.25, "rotary_emb_base": 10_000, "layer_norm_eps": 1e-5, "use_parallel_residual": True,
      "hidden_act": "gelu_fast", "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    ("llama-2-7b", "llama", _LLAMA_2, (32, 4096, 32, 32, 11008, 32000), {"rms_norm_eps": 1e-5}),
    ("llama-2-13b", "llama", _LLAMA_2, (40, 5120, 40, 40, 13824, 32000), {"rms_norm_eps": 1e-5}),
    ("llama-2-70b", "llama", _LLAMA_2, (80, 8192, 64, 8, 28672, 32000), {"rms_norm_eps": 1e-5}),
    ("llama-3.1-8b", "llama", _LLAMA_2, (32, 4096, 32, 8, 14336, 128256), _LLAMA_31),
    ("llama-3.1-70b", "llama", _LLAMA_2, (80, 8192, 64, 8, 28672, 128256), _LLAMA_31),
    ("llama-3.1-405b", "llama", _LLAMA_2, (126, 16384, 128, 8, 53248, 128256), _LLAMA_31),
    ("mistral-7b", "mistral", _LLAMA_2, (32, 4096, 32, 8, 14336, 32768), _QWEN | {"rms_norm_eps": 1e-5}),
    ("mixtral-8x7b", "mixtral", _LLAMA_2, (32, 4096, 32, 8, 14336, 32000),
     _QWEN | {"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2}),
    ("mixtral-8x22b", "mixtral", _LLAMA_2, (56, 6144, 48, 8, 16384, 32000),
     _QWEN | {"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2}),
    ("qwen2.5-0.5b", "qwen2", _LLAMA_2, (24, 896, 14, 2, 4864, 151936), _QWEN | {"tie_word_embeddings": True}),
    ("qwen2.5-7b", "qwen2", _LLAMA_2, (28, 3584, 28, 4, 18944, 152064), _QWEN),
    ("qwen2.5-72b", "qwen2", _LLAMA_2, (80, 8192, 64, 8, 29568, 152064), _QWEN),
    ("qwen3-8b", "qwen3", _LLAMA_2, (36, 4096, 32, 8, 12288, 151936), _QWEN | {"head_dim": 128}),
    ("qwen3-32b", "qwen3", _LLAMA_2, (64, 5120, 64, 8, 25600, 151936), _QWEN | {"head_dim": 128}),
    ("qwen3-30b-a3b", "qwen3_moe", _LLAMA_2, (48, 2048, 32, 4, 6144, 151936),
     _QWEN | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}),
)  # fmt: skip

NAMED: dict[str, dict[str, Any]] = {
    name: {"model_type": family, **dict(zip(keys, sizes, strict=True)), **more}
    for name, family, keys, sizes, more in _ROWS
}
"""Name of a model -> the content of its `config.json`."""
