"""The parts of a Hugging Face model's `config.json`, each with the flags that say it.

Problem: a configuration has dozens of keys, and a key that is read wrongly, or not at all, changes the numbers
silently. With a rotary base of 10,000 in place of its 1,000,000, Mixtral's logits differ by 1.5%, and nothing
complains.

Solution: a family of models (`model_families`) has a part for each key that says something of the model. A part reads
its keys as values of flags and writes them back. A key that changes the model must be there: no default of
transformers is assumed, but for keys that are newer than files without them, where absence means that a thing is off.
Keys without influence on a trained model are listed. Every other key, and every value that no flag says, is an error
(`hugging_face`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.documents.faults import shown

Facts = dict[str, object]
"""Destination of a flag -> its value."""


class Part:
    """Some keys of a configuration. `names`: these keys."""

    names: tuple[str, ...]

    def read(self, config: Mapping[str, object]) -> Facts:
        """The values of flags that the keys mean. Raises ValueError for a key that is missing, or that no flag says."""
        raise NotImplementedError

    def write(self, facts: Facts) -> dict[str, object]:
        """The keys with the values that mean these flags."""
        raise NotImplementedError


def present(config: Mapping[str, object], names: Iterable[str], remedy: str = "write it into config.json") -> object:
    """The value of the first of these keys that is there. Raises ValueError where none is."""
    names = tuple(names)
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ValueError(f"{' or '.join(names)} is missing, and no default is assumed; {remedy}")


def number(name: str, value: object, kind: type) -> int | float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (kind is int and value != int(value)) or value < 0:
        raise ValueError(f"{name} is {shown(value)}; give {'a whole' if kind is int else 'a'} number of 0 or more")
    return kind(value)


def shared_width(config: Mapping[str, object], *names: str) -> int:
    """Channels of a head where the heads share the hidden size; `names`: keys of that, and of the number of heads."""
    width, heads = (number(name, present(config, [name]), int) for name in names)
    if not heads or width % heads:
        raise ValueError(
            f"{names[0]} {width} is not divisible by {names[1]} {heads}, and no key says how wide a head is"
        )
    return width // heads


def head_dim(config: Mapping[str, object]) -> int:
    return shared_width(config, "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class Number(Part):
    """A key that is the value of a flag.

    Attributes:
        key, also: the key, and other names of it in older or newer files.
        dests: the destinations that have this value.
        absent: the key may be missing or null, and then has the value that this makes of the facts read before.
    """

    key: str
    dests: tuple[str, ...]
    kind: type = int
    also: tuple[str, ...] = ()
    absent: object = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.key, *self.also)

    def read(self, config: Mapping[str, object]) -> Facts:
        if self.absent is not None and all(config.get(name) is None for name in self.names):
            value = self.absent(config)
        else:
            value = number(self.key, present(config, self.names), self.kind)
        return dict.fromkeys(self.dests, value)

    def write(self, facts: Facts) -> dict[str, object]:
        return {self.key: facts[self.dests[0]]}


@dataclass(frozen=True)
class Only(Part):
    """A key that may have some values alone, the first of which is written.

    Attributes:
        absent: it may be missing, which means the first value.
        reason: why no other value.
    """

    key: str
    values: tuple[object, ...]
    reason: str
    absent: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, config: Mapping[str, object]) -> Facts:
        value = config.get(self.key, self.values[0] if self.absent else _MISSING)
        if value is _MISSING:
            present(config, self.names)
        if not any(value == each and type(value) is type(each) for each in self.values):
            raise ValueError(f"{self.key} is {shown(value)}: {self.reason}")
        return {}

    def write(self, facts: Facts) -> dict[str, object]:
        return {self.key: self.values[0]}


_MISSING = object()


@dataclass(frozen=True)
class Switch(Part):
    """A key that turns a flag on or off. `inverted`: the flag is on where the key is false."""

    key: str
    dest: str
    inverted: bool = False
    absent: bool | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, config: Mapping[str, object]) -> Facts:
        value = config.get(self.key, self.absent)
        if value is None:
            value = present(config, self.names)
        if not isinstance(value, bool):
            raise ValueError(f"{self.key} is {shown(value)}; give true or false")
        return {self.dest: value != self.inverted}

    def write(self, facts: Facts) -> dict[str, object]:
        return {self.key: bool(facts[self.dest]) != self.inverted}


class WidthOfHeads(Part):
    """GPT-2's heads share the hidden size; no key says how wide one is."""

    names = ()

    def read(self, config: Mapping[str, object]) -> Facts:
        return {"kv_channels": shared_width(config, "n_embd", "n_head")}

    def write(self, facts: Facts) -> dict[str, object]:
        return {}


class KeyValueHeads(Part):
    """The number of heads of keys and values."""

    names = ("num_key_value_heads",)

    def read(self, config: Mapping[str, object]) -> Facts:
        groups = number(self.names[0], present(config, self.names), int)
        is_grouped = groups != config.get("num_attention_heads")
        return {"group_query_attention": is_grouped, "num_query_groups": groups if is_grouped else 1}

    def write(self, facts: Facts) -> dict[str, object]:
        grouped = facts["group_query_attention"]
        return {self.names[0]: facts["num_query_groups" if grouped else "num_attention_heads"]}


_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The only values of Llama 3's scaling that megatron.core knows."""


class Rotary(Part):
    """Base and scaling of rotary positions: `rope_parameters`, in older files `rope_theta` and `rope_scaling`."""

    names = ("rope_parameters", "rope_theta", "rope_scaling")

    def read(self, config: Mapping[str, object]) -> Facts:
        given: dict[str, object] = {}
        for name in ("rope_scaling", "rope_parameters"):
            mapping = config.get(name) or {}
            if not isinstance(mapping, Mapping):
                raise ValueError(f"{name} is {shown(mapping)}; give an object, or null")
            for key, value in mapping.items():
                key = "rope_type" if key == "type" else key
                if given.setdefault(key, value) != value:
                    raise ValueError(f"{key} is {shown(given[key])} in rope_scaling and {shown(value)} in {name}")
        if (
            config.get("rope_theta") is not None
            and given.setdefault("rope_theta", config["rope_theta"]) != config["rope_theta"]
        ):
            raise ValueError(
                f"rope_theta is {shown(config['rope_theta'])}, and rope_parameters say {shown(given['rope_theta'])}; "
                "keep the right one"
            )
        kind = given.pop("rope_type", None if given.keys() - {"rope_theta", "partial_rotary_factor"} else "default")
        base = number(
            "rope_theta", present(given, ["rope_theta"], "write the base of the rotary positions into config.json"), int
        )
        facts: Facts = {"rotary_base": base, "use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None}
        del given["rope_theta"]
        if kind == "llama3":
            for key, value in _LLAMA_3.items():
                if present(given, [key]) != value:
                    raise ValueError(
                        f"rope_scaling.{key} is {shown(given[key])}, and megatron.core knows {value} alone; such a "
                        "model cannot be computed here"
                    )
            facts |= {
                "use_rope_scaling": True,
                "rope_scaling_factor": number("factor", present(given, ["factor"]), float),
            }
            given = {key: value for key, value in given.items() if key not in (*_LLAMA_3, "factor")}
        elif kind == "linear":
            facts["rotary_seq_len_interpolation_factor"] = number("factor", present(given, ["factor"]), int)
            given.pop("factor")
        elif kind != "default":
            raise ValueError(
                f"the rotary positions are scaled by {shown(kind)}, and flags say default, linear and llama3 alone; "
                "such a model cannot be computed here"
            )
        if given.get("partial_rotary_factor", 1.0) != 1.0 or given.keys() - {"partial_rotary_factor"}:
            key = min(given.keys())
            raise ValueError(
                f"{key} of the rotary positions is {shown(given[key])}, which no flag says; leave it out if the "
                "model is the same without it"
            )
        return facts

    def write(self, facts: Facts) -> dict[str, object]:
        # In the older keys, which every version of transformers reads. Of the newer ones an older version would know
        # nothing, and take a default.
        scaling: dict[str, object] | None = None
        if facts["use_rope_scaling"]:
            scaling = {"rope_type": "llama3", "factor": float(facts["rope_scaling_factor"]), **_LLAMA_3}
        elif facts["rotary_seq_len_interpolation_factor"] is not None:
            scaling = {"rope_type": "linear", "factor": float(facts["rotary_seq_len_interpolation_factor"])}
        return {"rope_theta": float(facts["rotary_base"]), "rope_scaling": scaling}


class Gelu(Part):
    """GPT-2's activation. megatron.core has the tanh approximation in its fusion with the bias alone."""

    names = ("activation_function",)

    def read(self, config: Mapping[str, object]) -> Facts:
        value = present(config, self.names)
        if value not in ("gelu_new", "gelu_pytorch_tanh", "gelu"):
            raise ValueError(
                f"activation_function is {shown(value)}, and flags say gelu_new, gelu_pytorch_tanh and gelu alone"
            )
        return {"bias_gelu_fusion": value != "gelu"}

    def write(self, facts: Facts) -> dict[str, object]:
        return {"activation_function": "gelu_new" if facts["bias_gelu_fusion"] else "gelu"}


class Window(Part):
    """Attention to a window of tokens, which is not taken over and has to be off."""

    names = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

    def read(self, config: Mapping[str, object]) -> Facts:
        # Where the key is missing, the families that have it do not use their window.
        is_used = config.get("use_sliding_window", not str(config.get("model_type")).startswith("qwen"))
        if config.get("sliding_window") is not None and is_used:
            raise ValueError(
                f"sliding_window is {shown(config['sliding_window'])}, and windows are not taken over from "
                "config.json; set it to null if sequences are no longer than that"
            )
        kinds = config.get("layer_types")
        if kinds is not None and set(kinds) != {"full_attention"}:
            other = next(each for each in kinds if each != "full_attention")
            raise ValueError(f"layer_types names {shown(other)}, and layers are taken over with full_attention alone")
        return {}

    def write(self, facts: Facts) -> dict[str, object]:
        return {"sliding_window": None}
