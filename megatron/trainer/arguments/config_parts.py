"""The parts of a Hugging Face model's `config.json`, each with the flags that correspond to it.

Problem: a configuration has dozens of keys, and a key that is read wrongly, or not at all, changes the numbers
silently. With a rotary base of 10,000 instead of 1,000,000, Mixtral's logits differ by 1.5%, and nothing reports it.

Solution: a family of models (`model_families`) has a part for each key that describes the model. A part converts its
keys to values of flags and back. A key that changes the model must be present: no default of transformers is assumed,
except for keys that are newer than some files; there, absence means that the feature is off. Keys without influence on
a trained model are listed. Every other key, and every value that no flag expresses, is an error (`hugging_face`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.documents.faults import shown

Facts = dict[str, object]
"""Destination of a flag -> its value."""


class Part(ABC):
    """A part of a configuration, made of the keys `names`."""

    names: tuple[str, ...]

    @abstractmethod
    def read(self, config: Mapping[str, object]) -> Facts:
        """Convert the keys to flags. Raises ValueError for a missing key, or for a value that no flag expresses."""

    @abstractmethod
    def write(self, facts: Facts) -> dict[str, object]:
        """Convert flags to the keys."""


def present(config: Mapping[str, object], names: Iterable[str], remedy: str = "write it into config.json") -> object:
    """The value of the first of the keys `names` that is present and not null. Raises ValueError if there is none."""
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


def truth(name: str, value: object) -> bool:
    """Return `value`, the value of the key `name`. Raises ValueError if it is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}; give true or false")
    return value


def shared_width(config: Mapping[str, object], *names: str) -> int:
    """Hidden size / number of heads, from the two keys `names`. Raises ValueError if the quotient is not whole."""
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
    """A key that gives the value of flags.

    Attributes:
        key, also: the key, and its other names in older or newer files.
        dests: the destinations that have this value.
        absent: configuration -> the value of a missing or null key; None: the key must be present.
        neutral: the value to write if the flag is not given.
    """

    key: str
    dests: tuple[str, ...]
    kind: type = int
    also: tuple[str, ...] = ()
    absent: object = None
    neutral: int | float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.key, *self.also)

    def read(self, config: Mapping[str, object]) -> Facts:
        if self.absent is not None and all(config.get(name) is None for name in self.names):
            value = self.absent(config)
        else:
            value = number(self.key, present(config, self.names), self.kind)
            for name in self.names:
                if config.get(name) not in (None, value):
                    raise ValueError(f"{self.key} is {value}, and {name} {shown(config[name])}; keep the right one")
        return dict.fromkeys(self.dests, value)

    def write(self, facts: Facts) -> dict[str, object]:
        value = facts[self.dests[0]]
        return {self.key: self.neutral if value is None else value}


@dataclass(frozen=True)
class Only(Part):
    """A key with few supported values; the first one is written.

    Attributes:
        absent: whether the key may be missing, which means the first value.
        reason: why other values are not supported.
    """

    key: str
    values: tuple[object, ...]
    reason: str
    absent: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, config: Mapping[str, object]) -> Facts:
        if self.key not in config and not self.absent:
            present(config, self.names)
        value = config.get(self.key, self.values[0])
        if not any(value == each and type(value) is type(each) for each in self.values):
            raise ValueError(f"{self.key} is {shown(value)}: {self.reason}")
        return {}

    def write(self, facts: Facts) -> dict[str, object]:
        return {self.key: self.values[0]}


@dataclass(frozen=True)
class Switch(Part):
    """A key that turns a flag on or off. `inverted`: the flag is on if the key is false."""

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
        return {self.dest: truth(self.key, value) != self.inverted}

    def write(self, facts: Facts) -> dict[str, object]:
        return {self.key: bool(facts[self.dest]) != self.inverted}


@dataclass(frozen=True)
class WidthOfHeads(Part):
    """Heads that divide the hidden size equally; no key gives the width of a head.

    Attributes:
        width, heads: the keys of the hidden size and of the number of heads.
    """

    width: str = "hidden_size"
    heads: str = "num_attention_heads"
    names = ()

    def read(self, config: Mapping[str, object]) -> Facts:
        return {"kv_channels": shared_width(config, self.width, self.heads)}

    def write(self, facts: Facts) -> dict[str, object]:
        return {}


class KeyValueHeads(Part):
    """The number of key-value heads."""

    names = ("num_key_value_heads",)

    def read(self, config: Mapping[str, object]) -> Facts:
        groups = number(self.names[0], present(config, self.names), int)
        is_grouped = groups != config.get("num_attention_heads")
        return {"group_query_attention": is_grouped, "num_query_groups": groups if is_grouped else 1}

    def write(self, facts: Facts) -> dict[str, object]:
        grouped = facts["group_query_attention"]
        return {self.names[0]: facts["num_query_groups" if grouped else "num_attention_heads"]}


class Gelu(Part):
    """GPT-2's activation. megatron.core has the tanh approximation only in its fusion with the bias."""

    names = ("activation_function",)

    def read(self, config: Mapping[str, object]) -> Facts:
        value = present(config, self.names)
        if value not in ("gelu_new", "gelu_pytorch_tanh", "gelu"):
            raise ValueError(
                f"activation_function is {shown(value)}, and flags can express only gelu_new, gelu_pytorch_tanh and "
                "gelu"
            )
        return {"bias_gelu_fusion": value != "gelu"}

    def write(self, facts: Facts) -> dict[str, object]:
        return {"activation_function": "gelu_new" if facts["bias_gelu_fusion"] else "gelu"}


_FEED_FORWARDS = {"relu": ("relu", False, "relu"), "gated-gelu": ("gated_gelu", True, "gelu_new")}
"""Value of `feed_forward_proj` -> the flag, and the values of the keys that transformers derives from it."""


class FeedForward(Part):
    """A T5's activation. transformers also writes the keys that it derives from `feed_forward_proj`."""

    names = ("feed_forward_proj", "is_gated_act", "dense_act_fn")

    def read(self, config: Mapping[str, object]) -> Facts:
        value = config.get(self.names[0], "relu")  # files of the original T5 do not have the key
        if not isinstance(value, str) or value not in _FEED_FORWARDS:
            known = " and ".join(_FEED_FORWARDS)
            raise ValueError(f"feed_forward_proj is {shown(value)}, and flags can express only {known}")
        flag, *made = _FEED_FORWARDS[value]
        for name, own in zip(self.names[1:], made, strict=True):
            if config.get(name, own) != own:
                raise ValueError(f"feed_forward_proj is {value}, and {name} {shown(config[name])}; keep the right one")
        return {other: other == flag for other, *_ in _FEED_FORWARDS.values()}

    def write(self, facts: Facts) -> dict[str, object]:
        return {self.names[0]: next(kind for kind, (flag, *_) in _FEED_FORWARDS.items() if facts[flag])}


class HeadOfT5(Part):
    """A T5's output layer: the embedding with a scaled input, or an untied layer.

    Newer versions of transformers write `tie_word_embeddings` true for both, and another key that distinguishes them.
    """

    names = ("tie_word_embeddings", "scale_decoder_outputs")

    def read(self, config: Mapping[str, object]) -> Facts:
        tied, scaled = (config.get(name) for name in self.names)
        for name, value in zip(self.names, (tied, scaled), strict=True):
            if value is not None:
                truth(name, value)
        tied = tied is not False  # files of the original T5 do not have the key
        scaled = tied if scaled is None else scaled
        if scaled and not tied:
            raise ValueError(
                "tie_word_embeddings is false, and scale_decoder_outputs true: no flag scales the input of a head of "
                "its own; such a model cannot be computed here"
            )
        return {"untie_embeddings_and_output_weights": not scaled, "scaled_tied_head": scaled}

    def write(self, facts: Facts) -> dict[str, object]:
        return {self.names[0]: bool(facts["scaled_tied_head"])}


class Stacks(Part):
    """The layers of an encoder and of a decoder; the decoder has as many as the encoder unless its key differs."""

    names = ("num_layers", "num_decoder_layers")

    def read(self, config: Mapping[str, object]) -> Facts:
        encoder = number(self.names[0], present(config, self.names[:1]), int)
        decoder = config.get(self.names[1])
        return {
            "encoder_num_layers": encoder,
            "decoder_num_layers": encoder if decoder is None else number(self.names[1], decoder, int),
        }

    def write(self, facts: Facts) -> dict[str, object]:
        return {self.names[0]: facts["encoder_num_layers"], self.names[1]: facts["decoder_num_layers"]}


# --- experts ----------------------------------------------------------------------------------------------------------


class DenseBefore(Part):
    """The number of first layers that have no experts."""

    names = ("first_k_dense_replace", "moe_layer_freq")

    def read(self, config: Mapping[str, object]) -> Facts:
        layers = number("num_hidden_layers", config["num_hidden_layers"], int)
        dense = number(self.names[0], present(config, self.names[:1]), int)
        if config.get("moe_layer_freq") not in (None, 1):
            raise ValueError(
                f"moe_layer_freq is {shown(config['moe_layer_freq'])}, and behind the first {dense} every layer has "
                "experts in this family"
            )
        if dense >= layers:
            raise ValueError(f"first_k_dense_replace is {dense}, and of {layers} layers none is left with experts")
        return {"moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1}

    def write(self, facts: Facts) -> dict[str, object]:
        pattern = facts["moe_layer_freq"]
        return {"first_k_dense_replace": 0 if pattern == 1 else pattern.index(1), "moe_layer_freq": 1}


class SharedExperts(Part):
    """Experts that process every token; flags make them one wide expert. Read after the width of an expert."""

    names = ("n_shared_experts",)

    def read(self, config: Mapping[str, object]) -> Facts:
        count = number(self.names[0], present(config, self.names), int)
        width = number("moe_intermediate_size", present(config, ["moe_intermediate_size"]), int)
        if count == 0:
            raise ValueError("n_shared_experts is 0, and layers of this family have one at least")
        return {"moe_shared_expert_intermediate_size": count * width}

    def write(self, facts: Facts) -> dict[str, object]:
        width = facts["moe_shared_expert_intermediate_size"] or 0
        return {self.names[0]: width // (facts["moe_ffn_hidden_size"] or 1)}


@dataclass(frozen=True)
class GroupsOfExperts(Part):
    """Groups of experts; a token takes experts from some of the groups only.

    megatron.core scores a group by its best experts, as many as a token takes per group on average. DeepSeek-V3 scores
    a group by its best two experts, DeepSeek-V2 by the best one.

    Attributes:
        rated_by: the number of a group's experts that score the group in this family.
        method: the value of `topk_method` that turns groups on; None: they are always on.
    """

    rated_by: int
    method: str | None = None
    names = ("n_group", "topk_group", "topk_method")

    def read(self, config: Mapping[str, object]) -> Facts:
        none = {"moe_router_num_groups": None, "moe_router_group_topk": None}
        if self.method is not None:
            method = present(config, ["topk_method"])
            if method == "greedy":
                return none
            if method != self.method:
                raise ValueError(f"topk_method is {shown(method)}, and this family has only greedy and {self.method}")
        groups, taken = (number(name, present(config, [name]), int) for name in ("n_group", "topk_group"))
        if groups <= 1 or taken == groups:
            return none
        experts = number("num_experts_per_tok", present(config, ["num_experts_per_tok"]), int)
        if not taken or experts % taken or experts // taken != self.rated_by:
            raise ValueError(
                f"topk_group is {taken} and num_experts_per_tok {experts}: megatron.core rates a group by its "
                f"{experts // max(taken, 1)} best experts, and this family by {self.rated_by}; such a model cannot be "
                "computed here"
            )
        return {"moe_router_num_groups": groups, "moe_router_group_topk": taken}

    def write(self, facts: Facts) -> dict[str, object]:
        groups = facts["moe_router_num_groups"]
        method = {} if self.method is None else {"topk_method": "greedy" if groups is None else self.method}
        return {"n_group": groups or 1, "topk_group": facts["moe_router_group_topk"] or 1, **method}


class Normalized(Part):
    """Division of the chosen experts' sigmoid scores by their sum; megatron.core divides if there are two or more."""

    names = ("norm_topk_prob",)

    def read(self, config: Mapping[str, object]) -> Facts:
        experts, value = present(config, ["num_experts_per_tok"]), present(config, self.names)
        if value is not (experts != 1):
            raise ValueError(
                f"norm_topk_prob is {shown(value)}, and megatron.core divides the scores of {shown(experts)} experts "
                f"by their sum{' never' if experts == 1 else ''}; such a model cannot be computed here"
            )
        return {}

    def write(self, facts: Facts) -> dict[str, object]:
        return {self.names[0]: facts["moe_router_topk"] != 1}
