"""Notes on flags that have no effect because of other flags.

Problem: Megatron-LM silently accepts a flag that has no effect beside the other flags, and the user relies on numbers
or files that do not exist.

Solution: one table of conditions. If Megatron-LM also accepts the flag and computes the same, the run writes a note.
Flags that would make the run compute other numbers than asked for are refused by other rules. A flag that repeats a
default, or turns off what is not on (`--no-rope-fusion` without rope), gets no note. The table is a part of
docs/flags.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron.planner.job.software import FLEX
from megatron.trainer.arguments.flags.config import cuts_optimizer_state
from megatron.trainer.arguments.flags.parser import FLAGS, shown
from megatron.trainer.arguments.flags.specification import Arguments

FLAG_OF = {each.dest: each for each in FLAGS}


@dataclass(frozen=True)
class Idle:
    """Flags that have no effect under a condition on the arguments.

    Attributes:
        names: the destinations of the flags.
        holds: whether the condition holds, so that the given flags have no effect.
        reason: the reason, as a clause.
    """

    names: str
    holds: Callable[[Arguments], bool]
    reason: str


def _about(subject: str, names: str, value: str | None = None) -> Idle:
    """The row of flags that are about the value `value` of the flag `subject`, or about any value of it."""
    said = FLAG_OF[subject].name if value is None else shown(FLAG_OF[subject], value)

    def is_other(args: Arguments) -> bool:
        given = getattr(args, subject)
        return not given if value is None else given != value

    return Idle(names, is_other, f"it is about {said}")


def _steps(args: Arguments) -> int:
    """The number of training iterations."""
    return 0 if args.skip_train else args.train_iters


def _warms_up(args: Arguments) -> bool:
    return bool(args.lr_warmup_iters or args.lr_warmup_samples or args.lr_warmup_fraction)


def _records(args: Arguments) -> bool:
    return bool(args.tensorboard_dir or args.wandb_project)


_OF_FILES = ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")
_OTHER_TOKENIZER = "the tokenizer of --tokenizer-type does not read it"

ROWS = (
    Idle(
        "apply_residual_connection_post_layernorm",
        lambda args: True,
        "megatron.core's layers take the residual before the normalization, in Megatron-LM, too",
    ),
    Idle(
        "rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling",
        lambda args: args.position_embedding_type != "rope",
        "it is about rotary positions, which --position-embedding-type rope has",
    ),
    _about("position_embedding_type", "relative_attention_num_buckets relative_attention_max_distance", "relative"),
    Idle(
        "rotary_base",
        lambda args: args.position_embedding_type not in ("rope", "yarn") and not args.multi_latent_attention,
        "it is about rotary positions, which --position-embedding-type rope has",
    ),
    Idle(
        "rotary_seq_len_interpolation_factor",
        lambda args: args.multi_latent_attention and args.position_embedding_type == "rope",
        "megatron.core's multi-latent attention does not read it",
    ),
    _about("sft", "sft_tokenizer_prompt_format"),
    Idle(
        "add_qkv_bias",
        lambda args: args.multi_latent_attention,
        "the projections of --multi-latent-attention have no biases",
    ),
    Idle(
        "rope_scaling_factor",
        lambda args: args.position_embedding_type != "rope" or not args.use_rope_scaling,
        "it is the factor of --use-rope-scaling",
    ),
    Idle(
        "reset_position_ids",
        lambda args: args.position_embedding_type != "learned_absolute",
        "only learned positions are looked up by their numbers (--position-embedding-type learned_absolute)",
    ),
    Idle(
        "add_qkv_bias",
        lambda args: args.add_bias_linear,
        "all linear layers have biases, unless --disable-bias-linear is given",
    ),
    Idle(
        "attention_softmax_in_fp32",
        lambda args: not (args.fp16 or args.bf16),
        "without --fp16 and --bf16 everything is computed in FP32",
    ),
    Idle(
        "init_method_std",
        lambda args: args.init_method_xavier_uniform,
        "--init-method-xavier-uniform draws by the shape of a weight",
    ),
    Idle(
        "cross_entropy_fusion_impl",
        lambda args: not args.cross_entropy_loss_fusion,
        "it is the kernel of --cross-entropy-loss-fusion",
    ),
    _about("moe_token_dispatcher_type", "moe_deepep_num_sms", FLEX),
    Idle("cp_comm_type", lambda args: args.context_parallel_size == 1, "each rank has whole sequences"),
    Idle("tp_comm_overlap", lambda args: args.tensor_model_parallel_size == 1, "with one tensor rank nothing is sent"),
    Idle("make_vocab_size_divisible_by", lambda args: args.architecture == "vit", "images have no vocabulary"),
    Idle(
        "pipeline_extra_warmup account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        lambda args: args.pipeline_model_parallel_size == 1,
        "one pipeline rank has all layers",
    ),
    Idle(
        "ddp_pad_buckets_for_high_nccl_busbw",
        lambda args: not cuts_optimizer_state(args),
        "only buckets that --use-distributed-optimizer cuts into shards are padded",
    ),
    _about("fp8", "fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo first_last_layers_bf16"),
    Idle(
        "fp8_margin fp8_amax_history_len fp8_amax_compute_algo",
        lambda args: args.fp8 is not None and args.fp8_recipe != "delayed",
        "it is about --fp8-recipe delayed",
    ),
    _about("first_last_layers_bf16", "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"),
    Idle("adam_beta1 adam_beta2 adam_eps", lambda args: args.optimizer == "sgd", "--optimizer sgd has no moments"),
    _about(
        "optimizer",
        "muon_momentum muon_use_nesterov muon_split_qkv muon_scale_mode muon_extra_scale_factor muon_num_ns_steps "
        "muon_coefficient_type muon_fp32_matmul_prec muon_tp_mode muon_scalar_lr muon_scalar_min_lr",
        "muon",
    ),
    Idle(
        "muon_tp_mode",
        lambda args: args.optimizer == "muon" and args.tensor_model_parallel_size == 1,
        "one tensor rank has whole matrices",
    ),
    Idle(
        "muon_scalar_min_lr",
        lambda args: args.optimizer == "muon" and args.muon_scalar_lr is None,
        "it is the smallest of --muon-scalar-lr",
    ),
    Idle("sgd_momentum", lambda args: args.optimizer != "sgd", "it is that of --optimizer sgd"),
    Idle(
        "weight_decay",
        lambda args: bool({"start_weight_decay", "end_weight_decay"} & {*args.given}),
        "--start-weight-decay and --end-weight-decay say it",
    ),
    Idle("min_lr", lambda args: args.lr_decay_style == "constant", "--lr-decay-style constant never decays"),
    Idle(
        "lr_decay_iters lr_decay_samples",
        lambda args: args.lr_decay_style == "constant" and args.lr_warmup_fraction is None,
        "--lr-decay-style constant never decays",
    ),
    _about("lr_decay_style", "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples", "WSD"),
    Idle("lr_warmup_init", lambda args: not _warms_up(args), "there is no warm-up"),
    Idle("decoupled_min_lr", lambda args: args.decoupled_lr is None, "it is the smallest of --decoupled-lr"),
    Idle(
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
        lambda args: args.load is None,
        "no checkpoint is loaded without --load",
    ),
    Idle(
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        lambda args: not args.fp16 or args.loss_scale is not None,
        "the loss is scaled dynamically with --fp16 and without --loss-scale alone",
    ),
    Idle(
        "manual_gc_interval manual_gc_eval",
        lambda args: not args.manual_gc,
        "without --manual-gc Python collects garbage when it wants",
    ),
    Idle(
        "tiktoken_pattern tiktoken_num_special_tokens tiktoken_special_tokens",
        lambda args: args.tokenizer_type != "TikTokenizer",
        _OTHER_TOKENIZER,
    ),
    Idle("vocab_file", lambda args: args.tokenizer_type not in _OF_FILES, _OTHER_TOKENIZER),
    Idle("merge_file", lambda args: args.tokenizer_type != "GPT2BPETokenizer", _OTHER_TOKENIZER),
    Idle(
        "tokenizer_model",
        lambda args: args.tokenizer_type in (*_OF_FILES, "NullTokenizer", "ByteLevelTokenizer"),
        _OTHER_TOKENIZER,
    ),
    Idle("save_interval", lambda args: args.save is None, "nothing is saved without --save"),
    Idle(
        "save_interval",
        lambda args: args.save is not None and not args.skip_train and args.save_interval > args.train_iters,
        "training ends before, and saves at its end",
    ),
    Idle(
        "dist_ckpt_strictness ckpt_fully_parallel_load",
        lambda args: args.load is None and args.pretrained_checkpoint is None,
        "no checkpoint is loaded without --load",
    ),
    Idle("eval_interval", lambda args: args.eval_iters == 0, "--eval-iters 0 evaluates nothing"),
    Idle(
        "save save_interval eval_interval exit_interval exit_duration_in_mins pipeline_timeline freeze_training "
        "elastic_pipeline",
        lambda args: args.skip_train,
        "--skip-train evaluates, and neither trains nor saves",
    ),
    Idle(
        "log_interval",
        lambda args: not args.skip_train and args.train_iters < args.log_interval,
        "training ends before the first line of the log",
    ),
    Idle(
        "tensorboard_log_interval",
        lambda args: _records(args) and not args.skip_train and args.train_iters < args.tensorboard_log_interval,
        "training ends before the first value is recorded",
    ),
    Idle(
        "tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard log_validation_ppl_to_tensorboard "
        "log_memory_to_tensorboard log_world_size_to_tensorboard",
        lambda args: not _records(args),
        "nothing is recorded without --tensorboard-dir or --wandb-project",
    ),
    _about("wandb_project", "wandb_entity wandb_exp_name wandb_save_dir"),
    Idle(
        "use_pytorch_profiler profile_step_start profile_step_end profile_ranks",
        lambda args: not args.profile,
        "nothing is profiled without --profile",
    ),
    Idle(
        "profile",
        lambda args: _steps(args) <= args.profile_step_start,
        "training ends before --profile-step-start, so no iteration is profiled",
    ),
    Idle("profile", lambda args: min(args.profile_ranks) >= args.world_size, "the job has no rank of --profile-ranks"),
    Idle(
        "pipeline_timeline_iterations",
        lambda args: args.pipeline_timeline is None,
        "nothing is traced without --pipeline-timeline",
    ),
)


def without_effect(args: Arguments) -> list[str]:
    """Notes on given flags that have no effect."""
    given = set(args.given)
    return [
        f"{shown(FLAG_OF[name], value)} has no effect: {row.reason}"
        for row in ROWS
        for name in row.names.split()
        if name in given and (value := getattr(args, name)) != FLAG_OF[name].default and row.holds(args)
    ]


RULES = (without_effect,)
