"""The conversion of parsed flags to megatron.core's configurations; only this module knows the names of both."""

import warnings
from collections.abc import Iterable

import torch
from torch.nn.functional import gelu, relu, silu

from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.trainer.arguments.flags.config import TrainConfig, cuts_optimizer_state, expert_tensor_size
from megatron.trainer.arguments.flags.model import OF_LATENTS, OF_YARN
from megatron.trainer.arguments.rules.stages import layer_split, layout_of


def params_dtype(args: TrainConfig) -> torch.dtype:
    """The dtype of the weights that the model computes with."""
    return torch.half if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32


def _activation(args: TrainConfig) -> tuple:
    """The activation as (function, whether it is gated, whether to use megatron.core's fusion with the bias)."""
    if args.swiglu:
        return silu, True, args.bias_swiglu_fusion
    if args.quick_geglu:
        return quick_gelu, True, False
    if args.gated_gelu:
        return _tanh_gelu, True, False
    if args.squared_relu:
        return squared_relu, False, False
    if args.relu:
        return relu, False, False
    # The fused GELU adds the bias itself and uses the tanh approximation, so it needs a bias. It does not multiply by
    # the scores of experts.
    return gelu, False, args.bias_gelu_fusion and args.add_bias_linear and args.num_experts is None


def _tanh_gelu(hidden: torch.Tensor) -> torch.Tensor:
    return gelu(hidden, approximate="tanh")


_OF_EXPERTS = (
    "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_topk",
    "moe_router_pre_softmax", "moe_router_score_function", "moe_router_topk_scaling_factor", "moe_router_num_groups",
    "moe_router_group_topk", "moe_apply_probs_on_input", "moe_z_loss_coeff", "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate", "moe_router_force_load_balancing", "moe_router_dtype", "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity", "moe_token_drop_policy", "moe_token_dispatcher_type", "moe_grouped_gemm",
    "moe_permute_fusion", "moe_router_fusion", "moe_router_padding_for_quantization", "moe_deepep_num_sms",
    "expert_model_parallel_size", "moe_flex_dispatcher_backend",
)  # fmt: skip


def _same(args: TrainConfig, names: Iterable[str]) -> dict[str, object]:
    """The fields of megatron.core's configuration that have the same names as flags."""
    return {name: getattr(args, name) for name in names}


def _experts(args: TrainConfig) -> dict[str, object]:
    kinds, factors = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    return {
        "num_moe_experts": args.num_experts,
        "moe_router_load_balancing_type": kinds[0] if len(kinds) == 1 else kinds,
        "moe_aux_loss_coeff": factors[0] if len(kinds) == 1 else [*factors, *[0.0] * (len(kinds) - len(factors))],
        "expert_tensor_parallel_size": expert_tensor_size(args),
        **_same(args, _OF_EXPERTS),
    }


_OF_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "hidden_dropout",
    "attention_dropout", "fp32_residual_connection", "apply_residual_connection_post_layernorm", "normalization",
    "qk_layernorm", "add_bias_linear", "add_qkv_bias", "bias_dropout_fusion", "masked_softmax_fusion",
    "apply_rope_fusion", "persist_layer_norm", "rotary_interleaved", "attention_softmax_in_fp32",
    "apply_query_key_layer_scaling", "init_method_std", "use_cpu_initialization", "cross_entropy_loss_fusion",
    "cross_entropy_fusion_impl", "recompute_granularity", "recompute_method", "recompute_num_layers",
    "tensor_model_parallel_size", "context_parallel_size", "sequence_parallel", "fp16", "bf16",
    "gradient_accumulation_fusion", "deterministic_mode", "disable_bf16_reduced_precision_matmul",
    "calculate_per_token_loss", "transformer_impl",
)  # fmt: skip
_OF_OPTIMIZER = (
    "optimizer", "lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_eps", "sgd_momentum", "clip_grad", "fp16", "bf16", "loss_scale", "initial_loss_scale", "min_loss_scale",
    "loss_scale_window", "hysteresis",
)  # fmt: skip
_OF_FP8 = (
    "fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "first_last_layers_bf16",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
)  # fmt: skip
_OF_ATTENTION = (
    "softmax_type", "window_size", "window_attn_skip_freq", "glu_linear_offset", "activation_func_clamp_value",
)  # fmt: skip
_ROUNDED = "yarn_correction_range_round_to_int"  # no field of the configuration
_OF_MULTI_LATENT_ATTENTION = (
    *OF_LATENTS, "rope_type", "rotary_base", "rotary_percent", *(name for name in OF_YARN if name != _ROUNDED),
)  # fmt: skip


def _attention(args: TrainConfig) -> dict[str, object]:
    """The fields of windows, softmax sinks, clamped gates and MLA's latents."""
    names = _OF_ATTENTION + _OF_MULTI_LATENT_ATTENTION * args.multi_latent_attention
    return {name.removeprefix("yarn_"): getattr(args, name) for name in names}


def _with_yarn(args: TrainConfig, config: TransformerConfig) -> TransformerConfig:
    """`config` with the YaRN attributes that megatron.core's GPT reads and that are no fields of the configuration."""
    if args.position_embedding_type == "yarn":
        for name in OF_YARN:
            setattr(config, "yarn_" + name.removeprefix("yarn_"), getattr(args, name))
    return config


def transformer_config(args: TrainConfig) -> TransformerConfig:
    """The model's configuration. Raises ValueError if megatron.core refuses a combination of options.

    Its pipeline size is the number of ranks over which layers are split (`layer_split`). The configurations of stages
    are derived from it.
    """
    dtype = params_dtype(args)
    activation, is_gated, fuses_bias = _activation(args)
    (num_ranks, num_virtual), layout = layer_split(args), layout_of(args)
    options = {}
    if args.init_method_xavier_uniform:
        options["init_method"] = options["output_layer_init_method"] = torch.nn.init.xavier_uniform_
    if args.recompute_granularity == "selective":
        options["recompute_modules"] = list(args.recompute_modules)
    if args.num_experts is not None:
        options |= _experts(args)
    if args.mtp_num_layers is not None:
        options |= _same(args, ("mtp_num_layers", "mtp_loss_scaling_factor"))
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="full scope is deprecated")  # about megatron.core's own default
            made = kind(
                num_query_groups=args.num_query_groups if args.group_query_attention else None,
                softmax_scale=args.attention_scale,
                layernorm_epsilon=args.norm_epsilon,
                layernorm_zero_centered_gamma=args.apply_layernorm_1p,
                activation_func=activation,
                gated_linear_unit=is_gated,
                bias_activation_fusion=fuses_bias,
                attention_backend=AttnBackend[args.attention_backend],
                cp_comm_type=args.cp_comm_type[0],
                pipeline_model_parallel_size=num_ranks,
                virtual_pipeline_model_parallel_size=num_virtual,
                pipeline_model_parallel_layout=layout,
                num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
                num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
                account_for_embedding_in_pipeline_split=layout is None and args.account_for_embedding_in_pipeline_split,
                account_for_loss_in_pipeline_split=layout is None and args.account_for_loss_in_pipeline_split,
                params_dtype=dtype,
                pipeline_dtype=torch.float32 if args.fp32_residual_connection else dtype,
                tp_comm_overlap=args.tp_comm_overlap and args.tensor_model_parallel_size > 1,
                **_same(args, _OF_MODEL),
                **_attention(args),
                **_same(args, _OF_FP8),
                **options,
            )
        config = _with_yarn(args, made)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"megatron.core refuses this model: {error}") from error
    # megatron.core accepts deferred weight gradients only with its own overlap of the experts' all-to-all.
    config.delay_wgrad_compute = args.transformer_impl == "transformer_engine" and args.schedule.splits_backward
    return config


def optimizer_config(args: TrainConfig) -> OptimizerConfig:
    """The configuration of the optimizer."""
    return OptimizerConfig(
        **_same(args, _OF_OPTIMIZER),
        params_dtype=params_dtype(args),
        use_distributed_optimizer=cuts_optimizer_state(args),
    )


def ddp_config(args: TrainConfig) -> DistributedDataParallelConfig:
    """The configuration of the gradient buffers.

    `overlap_grad_reduce` stays off, since it would start reductions from backward hooks; here the program's REDUCE_GRAD
    starts them, beside computations. Without it, megatron.core makes one bucket of each buffer. The check for NaN stays
    off: all ranks find NaN in the gradient norm, whereas the check would find it only on the rank of the bucket.
    """
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        use_distributed_optimizer=cuts_optimizer_state(args),
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        check_for_nan_in_grad=False,
        pad_buckets_for_high_nccl_busbw=args.ddp_pad_buckets_for_high_nccl_busbw,
    )


def param_scheduler(args: TrainConfig, optimizer: object) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay.

    The schedule counts samples, as in Megatron-LM, so that it stays correct during a ramp-up of the batch size; flags
    that count iterations are converted to samples.
    """
    if args.train_samples is not None:
        decay = args.lr_decay_samples or args.train_samples
        warmup, wsd, end = args.lr_warmup_samples, args.lr_wsd_decay_samples, args.train_samples
    else:
        total = args.train_iters or 1
        samples_after = args.batch_sizes.samples_after
        decay_iters = args.lr_decay_iters or total
        decay, warmup, end = samples_after(decay_iters), samples_after(args.lr_warmup_iters), samples_after(total)
        wsd_iters = args.lr_wsd_decay_iters
        wsd = None if wsd_iters is None else decay - samples_after(max(decay_iters - wsd_iters, 0))
    if args.lr_warmup_fraction is not None:
        warmup = int(args.lr_warmup_fraction * decay)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=end,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=wsd,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def rotary_embedding(args: TrainConfig, config: TransformerConfig) -> RotaryEmbedding | None:
    """The rotary embedding of a model that this project assembles; None if its positions are not rotary."""
    if args.position_embedding_type != "rope":
        return None
    return RotaryEmbedding(
        kv_channels=config.kv_channels,
        rotary_percent=args.rotary_percent,
        rotary_interleaved=config.rotary_interleaved,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        use_cpu_initialization=config.use_cpu_initialization,
    )


def positions_of(tokens: torch.Tensor) -> torch.Tensor:
    """The positions of tokens in their samples: int64 [b, s], for token ids [b, s]."""
    return torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
