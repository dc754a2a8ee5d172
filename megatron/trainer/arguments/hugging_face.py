"""Conversion between a Hugging Face model's `config.json` and flags, and runs that start from such a model.

Every flag that shapes a model and that the model's family does not set gets its default. So a flag that contradicts the
model is noticed, even one that is newer than the table of families.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.documents.faults import nearest, shown
from megatron.documents.files import read_document
from megatron.trainer.arguments.config_parts import Facts, present
from megatron.trainer.arguments.flags.experts import pattern_of_layers
from megatron.trainer.arguments.flags.model import window_of
from megatron.trainer.arguments.flags.parser import FLAGS, PROGRAMS, destinations
from megatron.trainer.arguments.flags.specification import Arguments, Flag, Role, name_of
from megatron.trainer.arguments.model_families import FAMILIES, NO_EFFECT, NOT_COMPUTED, Family

QUANTIZATION = "quantization_config"
"""The key that says how weights are quantized. Weights that are read are no longer quantized."""
_SHAPING = {flag.dest: flag for flag in FLAGS if Role.SHAPE in flag.roles}
_BY_DEST: dict[str, Flag] = {flag.dest: flag for flag in FLAGS}


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model that a configuration describes: its `model_type`, and all flags on which its weights depend."""

    model_type: str
    facts: Facts

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def argv(self) -> list[str]:
        """The model as command line words, without flags at their default."""
        words: list[str] = []
        for name, value in self.facts.items():
            flag = _BY_DEST[name]
            if value != _plain(name, flag.default):
                words += [flag.name] if flag.stores is not None else [flag.name, _word(value)]
        return words


def _word(value: object) -> str:
    """A value as a single command line word."""
    return f"{value}".replace(" ", "").strip("()")


def read_config(path: Path | str) -> dict[str, object]:
    """The content of a configuration: a file, or a folder's `config.json`. Raises ValueError if it cannot be read."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    config = read_document(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no object; give the config.json of a model")
    return config


def model_of(config: Mapping[str, object], source: object) -> HuggingFaceModel:
    """The model that a configuration describes. Raises ValueError that names `source`."""
    try:
        return _model_of(config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _model_of(config: Mapping[str, object]) -> HuggingFaceModel:
    _require_known_quantization(config.get(QUANTIZATION))
    kind = present(config, ["model_type"])
    if kind in NOT_COMPUTED:
        raise ValueError(f"model_type is {shown(kind)}: {NOT_COMPUTED[kind]}")
    if kind not in FAMILIES:
        raise ValueError(f"model_type is {shown(kind)}, and these can be converted: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    known = {*NO_EFFECT, *family.no_effect, QUANTIZATION, *(name for part in family.parts for name in part.names)}
    for key in config:
        if key not in known:
            near = nearest(key, known)
            raise ValueError(
                f"{key} is {shown(config[key])}, and no such key of {kind} is known here"
                f"{f' (the nearest is {near})' if near else ''}; take it out if the model is the same without it"
            )
    facts = {name: flag.default for name, flag in _SHAPING.items()} | family.fixed
    for part in family.parts:
        facts |= part.read(config)
    return HuggingFaceModel(kind, {name: _plain(name, value, facts["num_layers"]) for name, value in facts.items()})


def _require_known_quantization(quantization: object) -> None:
    """Raise ValueError if weights are quantized in a way that `files.safetensors_files` does not read."""
    if not quantization:
        return
    asked = quantization if isinstance(quantization, Mapping) else {}
    method, block = asked.get("quant_method"), asked.get("weight_block_size")
    if method == "mxfp4" or (method == "fp8" and block == [128, 128] and asked.get("fmt", "e4m3") == "e4m3"):
        return
    raise ValueError(
        f"{QUANTIZATION} is {shown(quantization)}: only weights quantized to MXFP4, or to FP8 (e4m3) with a scale "
        "for each 128 x 128 block, are read; save the model in bf16 first"
    )


_NEUTRAL = {"rotary_seq_len_interpolation_factor": 1, "moe_router_topk_scaling_factor": 1.0, "mtp_num_layers": 0}
"""Values that mean the same as None."""


def _plain(name: str, value: object, num_layers: int | None = None) -> object:
    """A flag's value in the form in which two models are compared.

    Patterns of layers become lists; a pattern of all layers becomes the default.
    """
    if value is None or _NEUTRAL.get(name) == value:
        return None
    if name == "window_size":
        return window_of(value) if isinstance(value, str) else tuple(value)
    if name in ("moe_layer_freq", "window_attn_skip_freq"):
        is_window = name.startswith("window")
        if isinstance(value, str):
            value = pattern_of_layers(value, name_of(name))
        if isinstance(value, int) and value > 1 and num_layers is not None:
            value = [int((layer + is_window) % value == 0) ^ is_window for layer in range(num_layers)]
        if isinstance(value, list) and value and all(each == 1 for each in value):
            return None if is_window else 1
    return value


# --- a run that starts from such a model ------------------------------------------------------------------------------


def load_hf(args: Arguments) -> list[str]:
    """Complete the model's flags from the folder's configuration, for `--load-hf`; return notes."""
    if not args.load_hf:  # the rule about paths refuses an empty path
        return []
    if args.architecture not in _PROGRAMS:
        raise ValueError(
            f"--load-hf belongs to {' and '.join(_PROGRAMS.values())}, whose models can be converted; leave it out"
        )
    for name in ("pretrained_checkpoint", "use_checkpoint_args"):
        if getattr(args, name):
            raise ValueError(f"--load-hf and {_BY_DEST[name].name} exclude each other: both say the model; keep one")
    folder = Path(args.load_hf)
    if not folder.is_dir():
        raise ValueError(
            f"--load-hf {args.load_hf} is no folder; download the model first, since nothing is downloaded here"
        )
    model = model_of(read_config(folder), folder / "config.json")
    if model.family.architecture != args.architecture:
        raise ValueError(
            f"--load-hf {args.load_hf} holds a {model.model_type}, which {_PROGRAMS[model.family.architecture]} "
            "trains; use that"
        )
    return take_over(args, model, folder / "config.json")


_PROGRAMS = {family.architecture: PROGRAMS[family.architecture][0] for family in FAMILIES.values()}
"""Architecture with models that can be converted -> the program that trains it."""


def take_over(args: Arguments, model: HuggingFaceModel, source: object) -> list[str]:
    """Complete parsed arguments from a model, for `--load-hf`; return a note that lists the flags taken from it.

    Raises ValueError for a command line flag that contradicts the model.
    """
    taken = []
    for name, kind in _OLD_NAMES.items():
        if name in args.given and model.facts["position_embedding_type"] not in (kind, "rope", "yarn"):
            raise ValueError(
                f"{_BY_DEST[name].name} contradicts {source}, which says --position-embedding-type "
                f"{model.facts['position_embedding_type']}; leave the flag out, or give the folder of another model"
            )
    for name, value in model.facts.items():
        flag = _BY_DEST[name]
        if name in args.given:
            given = _plain(name, getattr(args, name), model.facts["num_layers"])
            if given != value and name not in model.family.free and not _says_the_same(name, given, model):
                raise ValueError(
                    f"{_written(flag, getattr(args, name))} contradicts {source}, which says {_said(flag, value)}; "
                    f"{_remedy(flag, value)}, or give the folder of another model"
                )
            continue
        if getattr(args, name) != value and value != _plain(name, flag.default):
            taken.append(_written(flag, value))
        setattr(args, name, value)
    return [f"taken from {source}: {' '.join(taken)}"] if taken else []


_OLD_NAMES = {"use_rotary_position_embeddings": "rope", "add_position_embedding": "none"}
"""Old flags for a kind of position embedding -> that kind. With rotary embeddings they have no further meaning."""


def _says_the_same(name: str, given: object, model: HuggingFaceModel) -> bool:
    """Whether a flag says, in other words, that every head has its own keys and values."""
    facts = model.facts
    return not facts["group_query_attention"] and (name, given) in (
        ("group_query_attention", True),
        ("num_query_groups", facts["num_attention_heads"]),
    )


def _written(flag: Flag, value: object) -> str:
    if flag.stores is not None:
        return flag.name if value == flag.stores else f"a command line without {flag.name}"
    return f"{flag.name} {' '.join(map(str, value)) if flag.nargs and isinstance(value, list) else _word(value)}"


def _said(flag: Flag, value: object) -> str:
    if flag.stores is not None:
        return f"that {flag.dest} is {value}"
    return f"{flag.name} {_word(value)}" if value is not None else f"nothing of {flag.name}"


def _remedy(flag: Flag, value: object) -> str:
    return (
        "leave the flag out"
        if flag.stores is not None or value is None
        else f"give {flag.name} {_word(value)}, or leave it out"
    )


# --- back to a configuration ------------------------------------------------------------------------------------------


def facts_of(args: Arguments) -> Facts:
    """The model's flags in completed arguments, in the form of `HuggingFaceModel.facts`."""
    facts = {
        name: _plain(name, getattr(args, name), args.num_layers)
        for name in (*_SHAPING, *_FURTHER)
        if hasattr(args, name)
    }
    if not facts["group_query_attention"] or facts["num_query_groups"] == facts["num_attention_heads"]:
        facts |= {"group_query_attention": False, "num_query_groups": 1}
    if facts["position_embedding_type"] not in ("rope", "yarn"):
        facts |= {name: _plain(name, _BY_DEST[name].default) for name in _OF_ROTARY}
    if not facts["use_rope_scaling"]:
        facts["rope_scaling_factor"] = _BY_DEST["rope_scaling_factor"].default
    if facts["add_bias_linear"]:
        facts["add_qkv_bias"] = False
    if facts.get("encoder_num_layers") is not None:
        facts["num_layers"] = None  # the sum of both stacks
    if facts.get("num_experts") is None:
        facts |= {name: _plain(name, flag.default) for name, flag in _SHAPING.items() if name.startswith("moe_")}
    return facts


_FURTHER = (
    "vocab_size", "max_position_embeddings", "attention_dropout", "hidden_dropout", "bias_gelu_fusion",
    "moe_router_dtype",
)  # fmt: skip
_OF_ROTARY = tuple(name for name in destinations(Role.SHAPE) if name.startswith(("rotary_", "rope_", "use_rope_")))


def config_of(args: Arguments, *, dtype: str, model_type: str | None = None) -> dict[str, object]:
    """Make the configuration of the model that completed arguments describe.

    Args:
        dtype: torch's name for the dtype of the weights.
        model_type: the model family; None: the first one that fits.

    Raises ValueError if no family fits; with `model_type`, the error names the flag that does not fit.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} cannot be converted; these can: {', '.join(FAMILIES)}")
    facts, misfits = facts_of(args), []
    own = [name for name, family in FAMILIES.items() if family.architecture == args.architecture]
    for name in own if model_type is None else (model_type,):
        family = FAMILIES[name]
        config = {"architectures": [family.model], "model_type": name, "torch_dtype": dtype}
        for part in family.parts:
            config |= part.write(facts)
        try:
            there = _model_of(config).facts
        except ValueError as error:
            misfits.append((len(facts), f"{name} would need another value: {error}"))
            continue
        found = list(_differences(facts, there, family.free))
        if not found:
            return config
        misfits.append((len(found), f"nearest is {name}, where {found[0]}"))
    raise ValueError(f"the model is of no family that can be converted; {min(misfits)[1]}")


def difference(here: Facts, there: Facts, free: tuple[str, ...] = ()) -> str | None:
    """A clause about the first flag in which two models differ; None if they are the same."""
    return next(_differences(here, there, free), None)


def _differences(here: Facts, there: Facts, free: tuple[str, ...]) -> Iterator[str]:
    for name, value in there.items():
        if name not in free and name in here and here[name] != value:
            yield f"{_BY_DEST[name].name} is {value!r}, and it is {here[name]!r} here"
