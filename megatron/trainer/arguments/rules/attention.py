"""Rules of special attention: latents (MLA), sliding windows, softmax sinks, YaRN, and clamped gates."""

from collections.abc import Iterator

from megatron.planner.memory.architecture import Latents, Windows
from megatron.trainer.arguments.flags.experts import pattern_of_layers
from megatron.trainer.arguments.flags.model import ATTENTION, OF_LATENTS, OF_YARN, window_of
from megatron.trainer.arguments.flags.specification import Arguments, name_of

_FLAGS = {flag.dest: flag for flag in ATTENTION.flags}


def attention(args: Arguments) -> Iterator[str]:
    """Check the flags, and convert `window_size` and `window_attn_skip_freq` to numbers. Yields notes."""
    _latents(args)
    _yarn(args)
    _windows(args)
    if args.softmax_type == "learnable" and args.init_method_xavier_uniform:
        raise ValueError(
            "--softmax-type learnable has a vector of weights, which --init-method-xavier-uniform cannot draw; leave "
            "one out"
        )
    yield from _gates(args)


def _latents(args: Arguments) -> None:
    if not args.multi_latent_attention:
        if lone := _given(args, OF_LATENTS):
            raise ValueError(f"{lone} is given, and --multi-latent-attention is not; give both, or neither")
        if args.rope_type == "yarn":
            raise ValueError(
                "--rope-type yarn is that of --multi-latent-attention; for other attention use "
                "--position-embedding-type yarn"
            )
        if "mla_up_proj" in (args.recompute_modules or ()):
            raise ValueError("--recompute-modules mla_up_proj needs --multi-latent-attention; leave it out")
        return
    if args.group_query_attention:
        raise ValueError(
            "--group-query-attention and --multi-latent-attention exclude each other, since every head makes keys and "
            "values of the latent; keep one"
        )
    if args.position_embedding_type == "yarn":
        raise ValueError(
            "--position-embedding-type yarn rotates whole heads, and --multi-latent-attention a part by itself; use "
            "--position-embedding-type rope and --rope-type yarn"
        )
    for name in ("rotary_interleaved", "use_rope_scaling"):
        if getattr(args, name):
            raise ValueError(f"{name_of(name)} is not built for --multi-latent-attention; leave it out")
    args.rope_type = args.rope_type or "yarn"
    if args.qk_pos_emb_head_dim % 2:
        raise ValueError(
            f"--qk-pos-emb-head-dim {args.qk_pos_emb_head_dim} is odd, and rotary embeddings turn pairs of channels; "
            "give an even number"
        )
    t = args.tensor_model_parallel_size
    for what, width in (
        ("--q-lora-rank", args.q_lora_rank or 0),
        ("--kv-lora-rank plus --qk-pos-emb-head-dim", args.kv_lora_rank + args.qk_pos_emb_head_dim),
    ):
        if width % t:
            raise ValueError(
                f"{what} is {width}, which --tensor-model-parallel-size {t} does not divide; change one of them"
            )


def _yarn(args: Arguments) -> None:
    for name in OF_YARN:  # Megatron-LM's checkpoints leave some of them to megatron.core's defaults
        if getattr(args, name) is None:
            setattr(args, name, _FLAGS[name].default)
    if not uses_yarn(args):
        if lone := _given(args, OF_YARN if not args.multi_latent_attention else OF_YARN[3:]):
            raise ValueError(
                f"{lone} is about YaRN; add --position-embedding-type yarn, or --rope-type yarn with "
                "--multi-latent-attention, or leave it out"
            )
        return
    if args.multi_latent_attention and not args.yarn_correction_range_round_to_int:
        raise ValueError(
            "--no-yarn-correction-range-round-to-int: megatron.core's multi-latent attention rounds them; leave it out"
        )
    if not args.multi_latent_attention and args.kv_channels % 2:
        raise ValueError(f"YaRN turns pairs of channels, and a head has {args.kv_channels}; change --kv-channels")
    if args.rotary_percent != 1.0 or args.rotary_interleaved or args.use_rope_scaling:
        raise ValueError(
            "YaRN goes with none of --rotary-percent, --rotary-interleaved and --use-rope-scaling; leave them out"
        )
    if args.rotary_seq_len_interpolation_factor not in (None, 1):
        raise ValueError(
            "--rotary-seq-len-interpolation-factor has no effect on YaRN, whose factor is --rotary-scaling-factor; "
            "use that"
        )


def _windows(args: Arguments) -> None:
    if isinstance(args.window_attn_skip_freq, str):
        args.window_attn_skip_freq = pattern_of_layers(args.window_attn_skip_freq, "--window-attn-skip-freq")
    if isinstance(args.window_size, str):
        args.window_size = window_of(args.window_size)
    pattern = args.window_attn_skip_freq
    if args.window_size is None:
        if pattern is not None:
            raise ValueError("--window-attn-skip-freq is given, and --window-size is not; give both, or neither")
        return
    left, right = args.window_size
    if left < 0 or right != 0:
        raise ValueError(
            f"--window-size {left},{right}: a window begins at a token of at least 0 places before and ends at the "
            "token itself; write for example 127,0"
        )
    if args.reset_attention_mask:
        raise ValueError(
            "--window-size takes the place of the mask with which --reset-attention-mask keeps documents apart; leave "
            "one out"
        )
    if isinstance(pattern, int) and pattern < 2:
        raise ValueError(
            f"--window-attn-skip-freq {pattern} leaves no layer with a window; give 2 or more, or leave "
            "--window-size out"
        )
    if isinstance(pattern, list) and (len(pattern) != args.num_layers or set(pattern) - {0, 1} or not any(pattern)):
        raise ValueError(
            f"--window-attn-skip-freq has {len(pattern)} entries, and the model {args.num_layers} layers; give a 1 or "
            "0 for each layer, and at least one 1"
        )
    if isinstance(pattern, list) and args.mtp_num_layers:
        raise ValueError(
            f"--mtp-num-layers {args.mtp_num_layers}: a pattern of --window-attn-skip-freq says of no further layer "
            "whether it has a window; give a whole number"
        )


def _gates(args: Arguments) -> Iterator[str]:
    asked = [name for name in ("glu_linear_offset", "activation_func_clamp_value") if name in args.given]
    if not asked or (args.glu_linear_offset == 0 and args.activation_func_clamp_value is None):
        return
    if not (args.swiglu or args.quick_geglu):
        raise ValueError(f"{name_of(asked[0])} needs a gated MLP; add --quick-geglu or --swiglu, or leave it out")
    if args.swiglu and args.bias_swiglu_fusion:
        args.bias_swiglu_fusion = False
        yield f"bias_swiglu_fusion is off: its kernel knows no {name_of(asked[0])}"


def uses_yarn(args: Arguments) -> bool:
    """Whether positions are rotated by YaRN."""
    return args.position_embedding_type == "yarn" or (args.multi_latent_attention and args.rope_type == "yarn")


def latents_of(args: Arguments) -> Latents | None:
    """The planner's record of the latents; None without latent attention."""
    if not args.multi_latent_attention:
        return None
    return Latents(
        query_rank=args.q_lora_rank or 0,
        key_rank=args.kv_lora_rank,
        head=args.qk_head_dim,
        rotated=args.qk_pos_emb_head_dim,
        value=args.v_head_dim,
    )


def windows_of(args: Arguments) -> Windows | None:
    """The planner's record of the windows; None without windows.

    If `window_attn_skip_freq` is a number n, every n-th layer, counted from 1, has no window.
    """
    if args.window_size is None:
        return None
    pattern = args.window_attn_skip_freq
    if not isinstance(pattern, list):
        pattern = [pattern is None or number % pattern != 0 for number in range(1, args.num_layers + 1)]
    return Windows(before=args.window_size[0], share=sum(map(bool, pattern)) / args.num_layers)


def _given(args: Arguments, names: tuple[str, ...]) -> str | None:
    """The first of the flags `names` that the command line set to another value than the default; None without one."""
    found = (name for name in names if name in args.given and getattr(args, name) != _FLAGS[name].default)
    return next((_FLAGS[name].name for name in found), None)
