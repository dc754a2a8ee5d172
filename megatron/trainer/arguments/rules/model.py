"""Rules about the network's shape, precision, recomputation, and the placement of ranks."""

from megatron.planner.job.configuration import layout_text
from megatron.trainer.arguments.flags.parser import PROGRAMS
from megatron.trainer.arguments.flags.specification import Arguments, name_of
from megatron.trainer.arguments.rules.ranges import ranges

REQUIRED = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings", "micro_batch_size",
)  # fmt: skip


_OTHER_LAYERS = {
    "M": "Mamba layers",
    "G": "gated delta nets",
    "D": "DeepSeek's sparse attention",
    "+": "latent attention",
    "E": "experts",
    "/": "layers that predict further tokens",
}
_NOT_IN_HYBRID = ("num_experts", "mtp_num_layers", "multi_latent_attention", "sft", "use_rope_scaling", "load_hf",
                  "elastic_pipeline", "freeze_training", "num_layer_list", "pipeline_model_parallel_layout",
                  "window_attn_skip_freq", "fp8", "first_last_layers_bf16", "residual_from_norm")  # fmt: skip
"""Flags that cannot be used with a HybridModel."""
_HELD_BY_AUTOGRAD = ("layernorm", "mla_up_proj")
"""Values of --recompute-modules whose recomputation keeps its inputs in the graph."""


def hybrid(args: Arguments) -> None:
    """Set the number of layers from --hybrid-layer-pattern; with `|` in the pattern, also the layers of each stage."""
    pattern = args.hybrid_layer_pattern = args.hybrid_layer_pattern or None
    if pattern is None:
        if args.spec is not None:
            raise ValueError(f"--spec {' '.join(args.spec)} is for --hybrid-layer-pattern; give both, or neither")
        return
    asked = f"--hybrid-layer-pattern {pattern}"
    if args.architecture != "gpt":
        raise ValueError(f"{asked} belongs to pretrain_gpt.py; leave it out")
    other = next((symbol for symbol in pattern if symbol not in "*-|"), None)
    if other is not None:
        named = f", which is for {_OTHER_LAYERS[other]}," if other in _OTHER_LAYERS else ""
        raise ValueError(f"{asked} has {other!r}{named} and only attention (*) and MLPs (-) are built; give *-*-...")
    stages = pattern.split("|")
    if not all(stage == "*-" * (len(stage) // 2) and stage for stage in stages):
        raise ValueError(
            f"{asked} has to be *- for each layer, in each stage, as a GPT has attention and an MLP; give *-*-..., and "
            "divide stages behind an MLP"
        )
    num_symbols = len(pattern) - pattern.count("|")
    if "num_layers" in args.given and args.num_layers != num_symbols:
        raise ValueError(f"{asked} has {num_symbols} layers, and --num-layers says {args.num_layers}; leave it out")
    given = [name_of(name) for name in _NOT_IN_HYBRID if getattr(args, name, None)]
    if args.context_parallel_size > 1:
        given.append("--context-parallel-size")
    if args.recompute_granularity == "full" or args.recompute_activations:
        given.append("--recompute-granularity full" if args.recompute_granularity else "--recompute-activations")
    if given:
        raise ValueError(f"{' and '.join(given)} cannot be used with --hybrid-layer-pattern; leave one of them out")
    args.num_layers = num_symbols // 2
    ranks = args.pipeline_model_parallel_size
    if len(stages) > 1 and (ranks == 1 or len(stages) % ranks):
        raise ValueError(
            f"{asked} has {len(stages)} stages, and --pipeline-model-parallel-size is {ranks}; leave the | out, or "
            "divide into as many stages"
        )
    if len(stages) > 1:
        args.pipeline_model_parallel_layout = layout_text([len(stage) // 2 for stage in stages])


def required(args: Arguments) -> None:
    missing = [name_of(name) for name in REQUIRED if getattr(args, name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} needed")


def degrees(args: Arguments) -> None:
    t, p, c = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if args.world_size % (t * p * c):
        shared = f" x context parallel size {c}" if c > 1 else ""
        raise ValueError(
            f"{args.world_size} processes cannot be divided into tensor parallel size {t} x pipeline "
            f"parallel size {p}{shared}; start a multiple of {t * p * c} processes"
        )
    args.data_parallel_size = args.world_size // (t * p * c)
    args.transformer_pipeline_model_parallel_size = p


def placement(args: Arguments) -> None:
    if args.rank_mapping == "optimized" and args.rank_topology is None:
        raise ValueError("--rank-mapping optimized needs --rank-topology, a file with the nodes and their bandwidths")


def heads(args: Arguments) -> None:
    if args.kv_channels is None:
        if args.hidden_size % args.num_attention_heads:
            raise ValueError(
                f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads "
                f"{args.num_attention_heads}; change one, or give --kv-channels"
            )
        args.kv_channels = args.hidden_size // args.num_attention_heads
    t = args.tensor_model_parallel_size
    if args.num_attention_heads % t:
        raise ValueError(
            f"--num-attention-heads {args.num_attention_heads} is not divisible by --tensor-model-parallel-size {t}"
        )
    if args.group_query_attention:
        if args.num_attention_heads % args.num_query_groups:
            raise ValueError(
                f"--num-attention-heads {args.num_attention_heads} is not divisible by "
                f"--num-query-groups {args.num_query_groups}"
            )
        _groups_over_ranks(args.num_query_groups, args.kv_channels, t)
    elif "num_query_groups" in args.given and args.num_query_groups not in (1, args.num_attention_heads):
        raise ValueError(f"--num-query-groups {args.num_query_groups} needs --group-query-attention")


def _groups_over_ranks(groups: int, channels: int, t: int) -> None:
    """Check that each rank has whole query groups, or that a whole number of ranks shares one."""
    if groups % t and t % groups:
        raise ValueError(
            f"neither of --num-query-groups {groups} and --tensor-model-parallel-size {t} divides the other, so groups "
            f"cannot be dealt out to ranks alike; make one a multiple of the other"
        )
    if 2 * groups * channels % t:
        raise ValueError(
            f"--tensor-model-parallel-size {t} does not divide the {2 * groups * channels} rows of keys and values "
            f"(2 x --num-query-groups {groups} x {channels} channels); make the former smaller"
        )


def feed_forward(args: Arguments) -> None:
    kinds = [
        name_of(name) for name in ("swiglu", "squared_relu", "quick_geglu", "gated_gelu", "relu") if getattr(args, name)
    ]
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)} exclude each other; keep one")
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = 4 * args.hidden_size
        if args.swiglu:
            args.ffn_hidden_size = max(64, int(4 * args.hidden_size * 2 / 3) // 64 * 64)
    if args.ffn_hidden_size % args.tensor_model_parallel_size:
        raise ValueError(
            f"--ffn-hidden-size {args.ffn_hidden_size} is not divisible by --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size}"
        )


def attention(args: Arguments) -> None:
    if args.use_flash_attn:
        if args.attention_backend not in ("auto", "flash"):
            raise ValueError(f"--use-flash-attn and --attention-backend {args.attention_backend} exclude each other")
        args.attention_backend = "flash"
    if args.reset_attention_mask and not args.create_attention_mask_in_dataloader:
        raise ValueError(
            "--reset-attention-mask needs the mask that --no-create-attention-mask-in-dataloader leaves out"
        )


def positions(args: Arguments) -> None:
    if args.use_rotary_position_embeddings:
        if args.position_embedding_type != "rope" and "position_embedding_type" in args.given:
            raise ValueError(
                f"--use-rotary-position-embeddings and --position-embedding-type {args.position_embedding_type} "
                "exclude each other; keep one"
            )
        args.position_embedding_type = "rope"
    if args.position_embedding_type == "relative" and args.architecture != "t5":
        raise ValueError("--position-embedding-type relative belongs to pretrain_t5.py; choose another")
    if not args.add_position_embedding and args.position_embedding_type == "learned_absolute":
        args.position_embedding_type = "none"
    if args.seq_length > args.max_position_embeddings:
        raise ValueError(
            f"--seq-length {args.seq_length} is beyond --max-position-embeddings "
            f"{args.max_position_embeddings}; raise the latter or shorten the sequences"
        )
    if args.position_embedding_type == "rope" and int(args.kv_channels * args.rotary_percent) % 2:
        raise ValueError(
            f"rotary embeddings need an even number of channels, not {args.kv_channels} x "
            f"{args.rotary_percent}; change --kv-channels or --rotary-percent"
        )
    args.encoder_seq_length = args.seq_length


def residual(args: Arguments) -> None:
    """Check that the model supports --residual-from-norm: its stacks must have one kind of layer."""
    if not args.residual_from_norm:
        return
    other = {
        f"the model of {PROGRAMS[args.architecture][0]}": args.architecture not in ("gpt", "bert"),
        "--mtp-num-layers": args.mtp_num_layers,
        "--recompute-modules layernorm": "layernorm" in (args.recompute_modules or ()),  # its output is not kept
    }
    if given := [name for name, is_given in other.items() if is_given]:
        raise ValueError(f"--residual-from-norm is not computed with {' and '.join(given)}; leave it out")


def sequence_parallel(args: Arguments) -> list[str]:
    t = args.tensor_model_parallel_size
    if args.sequence_parallel and t == 1:
        args.sequence_parallel = False
        return ["--sequence-parallel has no effect with --tensor-model-parallel-size 1"]
    if args.tp_comm_overlap and t > 1 and not args.sequence_parallel:
        raise ValueError(
            "--tp-comm-overlap overlaps what --sequence-parallel sends; add the latter, or leave the former out"
        )
    if args.sequence_parallel and args.seq_length % t:
        raise ValueError(
            f"--sequence-parallel needs --seq-length {args.seq_length} divisible by --tensor-model-parallel-size {t}"
        )
    return []


def precision(args: Arguments) -> None:
    if args.fp16 and args.bf16:
        raise ValueError("--fp16 and --bf16 exclude each other; keep one")
    if args.loss_scale is not None and not args.fp16:
        raise ValueError("--loss-scale needs --fp16")
    if args.fp16_lm_cross_entropy and not args.fp16:
        raise ValueError("--fp16-lm-cross-entropy needs --fp16")
    if args.fp32_residual_connection and not (args.fp16 or args.bf16):
        raise ValueError("--fp32-residual-connection needs --fp16 or --bf16")
    if args.grad_reduce_in_bf16 and not args.bf16:
        raise ValueError("--grad-reduce-in-bf16 needs --bf16")
    if args.grad_reduce_in_bf16 and args.accumulate_allreduce_grads_in_fp32:
        raise ValueError("--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; keep one")
    if args.bf16 and not args.grad_reduce_in_bf16:
        args.accumulate_allreduce_grads_in_fp32 = True
    if args.apply_query_key_layer_scaling:
        args.attention_softmax_in_fp32 = True
    if args.fp16 and args.loss_scale is None:
        if args.min_loss_scale > args.initial_loss_scale:
            raise ValueError(
                f"--min-loss-scale {args.min_loss_scale} is greater than --initial-loss-scale "
                f"{args.initial_loss_scale}; lower the former or raise the latter"
            )
        args.check_for_nan_in_loss_and_grad = False  # an overflow lowers the dynamic loss scale and is no error


def recompute(args: Arguments) -> None:
    if args.checkpoint_activations:
        names = ("recompute_activations", "recompute_granularity", "recompute_method", "recompute_num_layers")
        if newer := [name_of(name) for name in names if name in args.given]:
            raise ValueError(f"--checkpoint-activations is the old form of {' and '.join(newer)}; leave it out")
        args.recompute_granularity, args.recompute_method, args.recompute_num_layers = "full", "uniform", 1
    if args.recompute_activations:
        if args.recompute_granularity == "full":
            raise ValueError("--recompute-activations and --recompute-granularity full exclude each other; keep one")
        args.recompute_granularity = "selective"
    if args.recompute_granularity == "full":
        if args.recompute_method is None or args.recompute_num_layers is None:
            raise ValueError("--recompute-granularity full needs --recompute-method and --recompute-num-layers")
    elif args.recompute_method is not None or args.recompute_num_layers is not None:
        raise ValueError("--recompute-method and --recompute-num-layers need --recompute-granularity full")
    if args.recompute_modules and args.recompute_granularity != "selective":
        raise ValueError("--recompute-modules needs --recompute-granularity selective")
    if args.recompute_granularity == "selective":
        args.recompute_modules = args.recompute_modules or ["core_attn"]
        if "moe" in args.recompute_modules and not args.num_experts:
            raise ValueError("--recompute-modules moe needs --num-experts; leave it out, or use mlp")
        if "mlp" in args.recompute_modules and args.add_bias_linear:
            raise ValueError(
                "--recompute-modules mlp never returns in megatron.core 0.16 with biases; add "
                "--disable-bias-linear or use --recompute-granularity full"
            )
    if args.pipeline_recompute and args.recompute_granularity == "full":
        raise ValueError("--pipeline-recompute and --recompute-granularity full do the same; keep one")


def freed_activations(args: Arguments) -> None:
    """Refuse to move or count saved activations that autograd does not free. Runs after the rules of schedules."""
    held = [each for each in args.recompute_modules or () if each in _HELD_BY_AUTOGRAD]
    if held and (args.moves_activations or args.log_saved_activations):
        raise ValueError(
            f"--recompute-modules {' '.join(held)}: megatron.core has autograd hold their inputs, and activations that "
            "cannot be freed can be neither moved nor counted; recompute core_attn instead, or leave out the flag or "
            "schedule that moves or counts them"
        )


def multi_token(args: Arguments) -> None:
    """Check the flags of multi-token prediction; 0 layers mean none."""
    args.mtp_num_layers = args.mtp_num_layers or None
    if args.mtp_num_layers is None:
        if "mtp_loss_scaling_factor" in args.given:
            raise ValueError("--mtp-loss-scaling-factor is given, and --mtp-num-layers is not; give both, or neither")
        return
    asked = f"--mtp-num-layers {args.mtp_num_layers}"
    if args.position_embedding_type == "learned_absolute":
        raise ValueError(
            f"{asked}: its layers embed tokens away from the first stage, where learned positions are; add "
            "--position-embedding-type rope"
        )
    if args.freeze_training or args.elastic_pipeline or args.activation_cache is not None:
        raise ValueError(
            f"{asked}: the embedding, of which its layers have a copy, would freeze with the first layers; leave out "
            "the flags that freeze layers or change the pipeline"
        )
    if args.recompute_method == "uniform" and args.recompute_num_layers > 1:
        raise ValueError(
            f"{asked}: megatron.core recomputes its layers one by one, not --recompute-num-layers "
            f"{args.recompute_num_layers} at once; give 1, or use --recompute-method block"
        )


RULES = (
    hybrid, required, ranges, degrees, placement, heads, feed_forward, attention, positions, sequence_parallel,
    precision, recompute, multi_token, residual,
)  # fmt: skip
