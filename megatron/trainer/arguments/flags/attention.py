"""Flags of attention other than the usual: latents (MLA), sliding windows, sinks, YaRN, and the gates beside them."""

from dataclasses import dataclass

from megatron.trainer.arguments.flags.experts import pattern_of_layers
from megatron.trainer.arguments.flags.specification import Group, Role, negation, option, switch


def window_of(text: str) -> tuple[int, int]:
    """What `--window-size` says: `127,0` or `(127, 0)`. Raises ValueError."""
    try:
        left, right = (int(word) for word in text.strip().strip("()").split(","))
    except ValueError:
        raise ValueError(f"--window-size {text} is not two whole numbers; write for example 127,0") from None
    return left, right


def layers_with_windows(text: str) -> int | list[int]:
    """What `--window-attn-skip-freq` says, as `layers_with_experts` reads such patterns. Raises ValueError."""
    return pattern_of_layers(text, "--window-attn-skip-freq")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Attention:
    """Attention with latents (MLA), sliding windows, softmax sinks, YaRN's rotary positions, and the clamped gates of
    GPT-OSS."""

    multi_latent_attention: bool = switch("Make queries, keys and values from latents of a low rank (MLA).")
    q_lora_rank: int | None = option(
        None, "Rank of the latent of queries. Default: queries are a projection of the residual stream."
    )
    kv_lora_rank: int = option(32, "Rank of the latent of keys and values.")
    qk_head_dim: int = option(128, "Channels of a head's queries and keys that are not rotated.")
    qk_pos_emb_head_dim: int = option(64, "Further channels of a head's queries and keys, which are rotated.")
    v_head_dim: int = option(128, "Channels of a head's values.")
    rope_type: str | None = option(
        None,
        "Rotary positions of --multi-latent-attention. Default: yarn. Without it: --position-embedding-type.",
        choices=("rope", "yarn"),
    )
    rotary_scaling_factor: float = option(
        1.0, "YaRN's factor: how far sequences are longer than the original ones.",
        aliases=("--yarn-rotary-scaling-factor",),
    )  # fmt: skip
    mscale: float = option(
        1.0, "YaRN's factor of the attention's temperature, in the rotation.", aliases=("--yarn-mscale",)
    )
    mscale_all_dim: float = option(
        0.0,
        "What divides --mscale in the rotation; with --multi-latent-attention it also scales all scores.",
        aliases=("--yarn-mscale-all-dim",),
    )
    yarn_original_max_position_embeddings: int = option(
        4096, "Longest sequence before YaRN.", aliases=("--original-max-position-embeddings",)
    )
    yarn_beta_fast: float = option(
        32.0, "Rotations in the original sequence above which YaRN leaves a channel alone.", aliases=("--beta-fast",)
    )
    yarn_beta_slow: float = option(
        1.0, "Rotations in the original sequence below which YaRN slows a channel.", aliases=("--beta-slow",)
    )
    yarn_correction_range_round_to_int: bool = negation(
        "--no-yarn-correction-range-round-to-int", "Do not round the channels between which YaRN changes over."
    )
    softmax_type: str = option(
        "vanilla",
        "off-by-one: add 1 to the denominator of the softmax. learnable: add the exponential of a weight of each head.",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    window_size: str | tuple[int, int] | None = option(
        None, "L,0: a token attends to itself and the L tokens before it. Default: to all before it.", metavar="L,R"
    )
    window_attn_skip_freq: str | int | list[int] | None = option(
        None,
        "The layers without --window-size: every n-th, or a list of 1 for a window and 0 for none, as ([1]*3+[0])*2. "
        "Default: no layer.",
    )
    glu_linear_offset: float = option(0.0, "Added to the linear half of a gated MLP before the product.")
    activation_func_clamp_value: float | None = option(
        None, "Clamp the halves of a gated MLP: both from above, the linear one from below, too."
    )


ATTENTION = Group.of(Attention, "attention", Role.SHAPE)
OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
OF_YARN = (
    "rotary_scaling_factor", "mscale", "mscale_all_dim", "yarn_original_max_position_embeddings", "yarn_beta_fast",
    "yarn_beta_slow", "yarn_correction_range_round_to_int",
)  # fmt: skip
