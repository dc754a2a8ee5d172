"""The ranges of numbers among the flags, independent of the other flags.

Problem: a number outside its range (a warm-up of -3 iterations, a momentum of 2) parses, and then training makes no
sense or ends in an assertion deep inside a library.

Solution: one table of ranges, in which every numeric flag stands once; a test checks that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from megatron.pipeline.schedules.compatibility import FEWEST_ON_DEVICE
from megatron.trainer.arguments.flags.specification import Arguments, name_of

_YEAR = 365 * 24 * 60  # minutes


@dataclass(frozen=True)
class Range:
    """A set of allowed values.

    Attributes:
        words: the set in words that follow "must be".
        contains: whether a value is in the set.
        names: the arguments that must be in the set, separated by spaces.
    """

    words: str
    contains: Callable[[float], bool]
    names: str

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        return tuple(self.names.split())


RANGES = (
    Range(
        "greater than 0",
        lambda value: value > 0,
        "num_layers fp8_amax_history_len hidden_size num_attention_heads seq_length encoder_num_layers "
        "decoder_num_layers encoder_seq_length decoder_seq_length max_position_embeddings micro_batch_size "
        "ffn_hidden_size kv_channels q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim "
        "rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow "
        "activation_func_clamp_value num_query_groups rotary_base rotary_seq_len_interpolation_factor "
        "rope_scaling_factor make_vocab_size_divisible_by vocab_size padded_vocab_size init_method_std "
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
        "microbatch_group_size_per_virtual_pipeline_stage decoder_first_pipeline_num_layers "
        "decoder_last_pipeline_num_layers freeze_interval activation_cache_gib recompute_num_layers "
        "global_batch_size train_iters train_samples epochs num_classes moe_ffn_hidden_size "
        "moe_shared_expert_intermediate_size expert_model_parallel_size expert_tensor_parallel_size "
        "moe_deepep_num_sms moe_router_topk moe_router_topk_scaling_factor moe_router_num_groups "
        "moe_router_group_topk moe_expert_capacity_factor img_h img_w num_channels patch_dim save_interval "
        "eval_interval exit_interval exit_duration_in_mins log_interval tensorboard_log_interval "
        "tensorboard_queue_size pipeline_memory_limit pipeline_synthesis_seconds "
        "pipeline_measured_batches "
        "pipeline_timeline_iterations l2l_resident_stages dry_run "
        "dry_run_gpus_per_node dry_run_host_memory num_dataset_builder_threads lr lr_decay_iters "
        "lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples adam_eps muon_extra_scale_factor "
        "muon_num_ns_steps initial_loss_scale min_loss_scale hysteresis relative_attention_max_distance "
        "attention_scale",
    ),
    Range(
        "at least 0",
        lambda value: value >= 0,
        "norm_epsilon mscale mscale_all_dim glu_linear_offset num_experts mtp_num_layers "
        "mtp_loss_scaling_factor moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate "
        "pipeline_2bw_provisional_microbatches weight_decay start_weight_decay end_weight_decay clip_grad "
        "min_lr decoupled_lr decoupled_min_lr muon_scalar_lr muon_scalar_min_lr lr_warmup_init "
        "lr_warmup_iters lr_warmup_samples eval_iters manual_gc_interval num_workers fp8_margin "
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 freeze_start vocab_extra_ids "
        "tiktoken_num_special_tokens ckpt_step logging_level profile_step_start profile_step_end "
        "profile_ranks",
    ),
    Range(
        "at least 0 and less than 1",
        lambda value: 0 <= value < 1,
        "attention_dropout hidden_dropout adam_beta1 adam_beta2 sgd_momentum muon_momentum lr_warmup_fraction",
    ),
    Range(f"at least {FEWEST_ON_DEVICE}", lambda value: value >= FEWEST_ON_DEVICE, "pipeline_offload_activations"),
    Range("at least 4", lambda value: value >= 4, "relative_attention_num_buckets"),
    Range("greater than 0 and at most 1", lambda value: 0 < value <= 1, "rotary_percent"),
    Range("greater than 0 and less than 1", lambda value: 0 < value < 1, "mask_prob freeze_alpha"),
    Range("greater than -1 and less than 1", lambda value: -1 < value < 1, "freeze_watch_validation"),
    Range("at least 1", lambda value: value >= 1, "failure_timeout"),
    Range("at least 0 and at most 1", lambda value: 0 <= value <= 1, "short_seq_prob minimum_speed"),
    Range("greater than 0; leave it out for a dynamic scale", lambda value: value > 0, "loss_scale"),
    # megatron.core counts up to it in steps of 1 and compares for equality.
    Range("a whole number greater than 0", lambda value: value > 0 and value % 1 == 0, "loss_scale_window"),
    # The limit of the data's shuffle; seeds with the offsets of layers and ranks go only to PyTorch's 64-bit
    # generators.
    Range("at least 0 and at most 2**32 - 1", lambda value: 0 <= value < 2**32, "seed"),
    Range(
        f"greater than 0 and at most {_YEAR}, a year", lambda value: 0 < value <= _YEAR, "distributed_timeout_minutes"
    ),
)


def ranges(args: Arguments) -> None:
    """Check that every number is in its range."""
    for allowed in RANGES:
        for name in allowed.arguments:
            given = getattr(args, name)
            for value in given if isinstance(given, list) else [given]:
                if value is not None and not allowed.contains(value):
                    raise ValueError(f"{name_of(name)} {value} must be {allowed.words}")
