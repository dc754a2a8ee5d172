"""What to set where a model of transformers cannot be captured as it comes."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class _Cause:
    """`found_in`: a pattern in the class of the module, its line of source and the reason. `remedy`: goes on behind a
    semicolon.
    """

    found_in: str
    remedy: str


_CONFIG = "in its configuration (config.json)"

_CAUSES = (
    _Cause(
        r"layerdrop|skip_the_layer",
        f"set layerdrop, encoder_layerdrop and decoder_layerdrop to 0.0 {_CONFIG}, where it has them",
    ),
    _Cause(r"DropPath|StochasticDepth|drop_path", f"set drop_path_rate to 0 {_CONFIG}"),
    _Cause(r"Experts ", f"set experts_implementation to batched_mm {_CONFIG}, which computes the same"),
    _Cause(r"label_index", f"set problem_type to single_label_classification {_CONFIG}"),
    _Cause(
        r"RotaryEmbedding ",
        f"set rope_type {_CONFIG} to default: up to the trained length dynamic has the same numbers; those of "
        "longrope differ",
    ),
    _Cause(r"(?i)flex_?attention|flash_?attn|flash_?attention", f"set attn_implementation to eager or sdpa {_CONFIG}"),
    _Cause(r"past_key_values|DynamicCache|use_cache", f"set use_cache to false {_CONFIG}"),
    _Cause(r"mask_time_|_compute_mask_indices", f"set apply_spec_augment to false {_CONFIG}"),
    _Cause(r"is_(index_)?global_attn", "no setting changes that, so choose a model without global attention"),
    _Cause(
        r"BatchNorm",
        "no setting changes that, so choose a model with LayerNorm, such as a ViT; in one of your own call eval() of "
        "that module, or use GroupNorm or LayerNorm",
    ),
    _Cause(r"vmap", "Hugging Face models do so for their masks before transformers 5, so install transformers>=5"),
)
"""The first that is found counts."""


def remedy_of(*clues: str, otherwise: str) -> str:
    """What to do. `clues`: the module's class, its line of source, the reason. `otherwise`: for an unknown cause."""
    text = " ".join(f"{clue} " for clue in clues)
    return next((each.remedy for each in _CAUSES if re.search(each.found_in, text)), otherwise)
