"""The parts of a `config.json` about attention: rotary positions, windows, and the widths of latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.documents.faults import shown
from megatron.trainer.arguments.config_parts import Facts, Part, number, present, truth

_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The only values of Llama 3's scaling that megatron.core supports."""
_YARN = {
    "factor": "rotary_scaling_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
}
"""YaRN's keys -> the destinations of their flags."""


@dataclass(frozen=True)
class Rotary(Part):
    """Base and scaling of rotary positions: `rope_parameters`, in older files `rope_theta` and `rope_scaling`.

    Attributes:
        latents: whether the positions are those of latent attention (MLA).
    """

    latents: bool = False
    names = ("rope_parameters", "rope_theta", "rope_scaling")

    def read(self, config: Mapping[str, object]) -> Facts:
        given = self._given(config)
        kind = given.pop("rope_type", None if given.keys() - {"rope_theta", "partial_rotary_factor"} else "default")
        base = number(
            "rope_theta", present(given, ["rope_theta"], "write the base of the rotary positions into config.json"), int
        )
        facts: Facts = {"rotary_base": base, "use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None}
        if self.latents:
            facts["rope_type"] = "rope"
        del given["rope_theta"]
        if kind == "yarn":
            facts |= self._yarn(given)
        elif kind == "llama3" and not self.latents:
            facts |= _llama_3(given)
        elif kind == "linear" and not self.latents:
            facts["rotary_seq_len_interpolation_factor"] = number("factor", present(given, ["factor"]), int)
            given.pop("factor")
        elif kind != "default":
            known = "only default and yarn" if self.latents else "only default, linear, llama3 and yarn"
            raise ValueError(
                f"the rotary positions are scaled by {shown(kind)}, and flags can express {known}; such a model cannot "
                "be computed here"
            )
        if given.get("partial_rotary_factor", 1.0) != 1.0 or given.keys() - {"partial_rotary_factor"}:
            key = min(given.keys())
            raise ValueError(
                f"{key} of the rotary positions is {shown(given[key])}, which no flag can express; leave it out if the "
                "model is the same without it"
            )
        return facts

    def _given(self, config: Mapping[str, object]) -> dict[str, object]:
        """The keys of both spellings together."""
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
        return given

    def _yarn(self, given: dict[str, object]) -> Facts:
        """The flags of YaRN; removes the keys that it reads from `given`."""
        facts: Facts = {"rope_type": "yarn"} if self.latents else {"position_embedding_type": "yarn"}
        for key, dest in _YARN.items():
            kind = int if key.startswith("original") else float
            facts[dest] = number(key, present(given, [key]), kind)
            del given[key]
        rounds = given.pop("truncate", True)  # files older than this key are of models that round
        if not isinstance(rounds, bool) or (self.latents and not rounds):
            raise ValueError(
                f"truncate of YaRN is {shown(rounds)}, and megatron.core's latent attention supports only true"
            )
        scales = [given.pop(key, None) for key in ("mscale", "mscale_all_dim")]
        if scales != [None, None]:
            # With only one of them, or with 0, transformers uses another temperature than megatron.core and DeepSeek.
            if not all(scales):
                raise ValueError(
                    f"mscale of YaRN is {shown(scales[0])} and mscale_all_dim {shown(scales[1])}, which "
                    "implementations read differently; give both, above 0, or neither"
                )
            facts |= {
                name: number(name, value, float)
                for name, value in zip(("mscale", "mscale_all_dim"), scales, strict=True)
            }
        return facts | {"yarn_correction_range_round_to_int": rounds}

    def write(self, facts: Facts) -> dict[str, object]:
        # In the older keys, which every version of transformers reads. An older version would not know the newer keys,
        # and use defaults.
        scaling: dict[str, object] | None = None
        if facts["rope_type" if self.latents else "position_embedding_type"] == "yarn":
            scaling = {"rope_type": "yarn", **{key: facts[dest] for key, dest in _YARN.items()}}
            scaling["truncate"] = facts["yarn_correction_range_round_to_int"]
            if (facts["mscale"], facts["mscale_all_dim"]) != (1.0, 0.0):
                scaling |= {name: facts[name] for name in ("mscale", "mscale_all_dim")}
        elif facts["use_rope_scaling"]:
            scaling = {"rope_type": "llama3", "factor": float(facts["rope_scaling_factor"]), **_LLAMA_3}
        elif facts["rotary_seq_len_interpolation_factor"] is not None:
            scaling = {"rope_type": "linear", "factor": float(facts["rotary_seq_len_interpolation_factor"])}
        return {"rope_theta": float(facts["rotary_base"]), "rope_scaling": scaling}


def _llama_3(given: dict[str, object]) -> Facts:
    """The flags of Llama 3's scaling; removes the keys that it reads from `given`."""
    for key, value in _LLAMA_3.items():
        if present(given, [key]) != value:
            raise ValueError(
                f"rope_scaling.{key} is {shown(given[key])}, and megatron.core supports only {value}; such a model "
                "cannot be computed here"
            )
    facts = {"use_rope_scaling": True, "rope_scaling_factor": number("factor", present(given, ["factor"]), float)}
    for key in (*_LLAMA_3, "factor"):
        del given[key]
    return facts


@dataclass(frozen=True)
class Window(Part):
    """Attention to a sliding window of tokens.

    Attributes:
        layers: the layers with a window, if the configuration has one: "none", "all", "listed" in `layer_types`, or
            "from" the layer `max_window_layers` on unless `layer_types` lists them.
        switched: whether the window also requires `use_sliding_window`.
    """

    layers: str = "none"
    switched: bool = False
    names = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

    def read(self, config: Mapping[str, object]) -> Facts:
        window, switch = config.get("sliding_window"), config.get("use_sliding_window", not self.switched)
        if not truth("use_sliding_window", switch) or window is None:
            window = None
        elif self.layers == "none":
            raise ValueError(
                f"sliding_window is {shown(window)}, and models of this family have no windows; take it out"
            )
        elif number("sliding_window", window, int) == 0:
            raise ValueError("sliding_window is 0, and a token attends to itself at least; give 1 or more")
        has_window = self._layers(config, window is not None)
        if window is None or not any(has_window):
            return {"window_size": None, "window_attn_skip_freq": None}
        return {
            "window_size": (int(window) - 1, 0),
            "window_attn_skip_freq": None if all(has_window) else [int(each) for each in has_window],
        }

    def _layers(self, config: Mapping[str, object], has_window: bool) -> list[bool]:
        """For each layer, whether it has the window."""
        kinds, count = config.get("layer_types"), int(number("num_hidden_layers", config["num_hidden_layers"], int))
        first = config.get("max_window_layers")
        if self.layers == "listed":
            kinds = present(config, ["layer_types"])
        if kinds is None:
            if self.layers == "from" and has_window:
                return [layer >= number("max_window_layers", present(config, ["max_window_layers"]), int)
                        for layer in range(count)]  # fmt: skip
            if self.layers == "all" and has_window and first not in (None, 0):
                raise ValueError(f"max_window_layers is {shown(first)}, and all layers of this family have the window")
            return [has_window] * count
        if not isinstance(kinds, list) or len(kinds) != count:
            raise ValueError(f"layer_types is {shown(kinds)}; give one for each of the {count} layers")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(
                    f"layer_types names {shown(kind)}, and layers have full_attention or sliding_attention"
                )
        found = [kind == "sliding_attention" for kind in kinds]
        if (any(found) and not has_window) or (self.layers in ("none", "all") and found != [has_window] * count):
            raise ValueError(
                f"layer_types names {shown('sliding_attention' if any(found) else 'full_attention')}, and the other "
                "keys of windows contradict it; make them agree"
            )
        return found

    def write(self, facts: Facts) -> dict[str, object]:
        if facts["window_size"] is None:
            listed = {"layer_types": ["full_attention"] * facts["num_layers"]} if self.layers == "listed" else {}
            return {"sliding_window": None, **listed}
        pattern = facts["window_attn_skip_freq"] or [1] * facts["num_layers"]
        kinds = ["sliding_attention" if each else "full_attention" for each in pattern]
        return {
            "sliding_window": facts["window_size"][0] + 1,
            **({"use_sliding_window": True} if self.switched else {}),
            **({"layer_types": kinds} if self.layers in ("from", "listed") else {}),
        }


_WIDTHS = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}


class LatentWidths(Part):
    """Ranks and widths of latent attention (MLA). Every head has its own keys and values."""

    names = ("q_lora_rank", *_WIDTHS, "num_key_value_heads", "head_dim", "qk_head_dim")

    def read(self, config: Mapping[str, object]) -> Facts:
        facts: Facts = {dest: number(key, present(config, [key]), int) for key, dest in _WIDTHS.items()}
        if "q_lora_rank" not in config:
            present(config, ["q_lora_rank"], "write it into config.json, null where queries have no latent")
        rank = config["q_lora_rank"]
        facts["q_lora_rank"] = None if rank is None else number("q_lora_rank", rank, int)
        facts["kv_channels"] = facts["qk_head_dim"]  # as in Megatron-LM's recipes; nothing depends on it
        rotated = facts["qk_pos_emb_head_dim"]
        present(config, ["num_key_value_heads"])
        for key, value in (  # only newer files have the last two
            ("num_key_value_heads", config.get("num_attention_heads")),
            ("head_dim", rotated),
            ("qk_head_dim", facts["qk_head_dim"] + rotated),
        ):
            if config.get(key) not in (None, value):
                raise ValueError(
                    f"{key} is {shown(config[key])}, and the other keys of latent attention make it {value}"
                )
        return facts

    def write(self, facts: Facts) -> dict[str, object]:
        widths = {key: facts[dest] for key, dest in _WIDTHS.items()}
        return {**widths, "q_lora_rank": facts["q_lora_rank"], "num_key_value_heads": facts["num_attention_heads"]}
