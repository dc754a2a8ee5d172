"""The settings of Megatron-LM that the project's schedules do not support: each with flag, reason and remedy.

The settings are read from the arguments after Megatron-LM has validated them and before any process group exists. An
argument that a version of Megatron-LM lacks counts as off.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.pipeline.dropin.flags import (
    STANDARD,
    asks_for_schedule,
    flag_of,
    name_of,
    reason_against,
    runnable,
    weights_of,
)
from megatron.pipeline.schedules import PRESETS
from megatron.pipeline.start_up.core_version import dotted, installed_core_version
from megatron.pipeline.start_up.late_weights import require_predictions, take_error_feedback

_TELLS_ENDS_ALONE = (0, 16)
"""The version whose `get_batch` gives the borders of conversations to the first and the last stage alone.

Older versions give them to no stage."""


def _is_set(value: Any) -> bool:
    return bool(value)


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _is_other_than(*off: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in off


@dataclass(frozen=True, slots=True)
class Refusal:
    """An argument, the condition under which it is refused, and the words of the refusal.

    The error message is the flag with its value, then `reason`, then `remedy` after a semicolon.

    Attributes:
        flag: the flag that sets the argument; empty: the flag with the argument's name.
    """

    argument: str
    reason: str
    remedy: str
    is_refused: Callable[[Any], bool] = _is_set
    flag: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "flag", self.flag or f"--{self.argument.replace('_', '-')}")


OF_ALL = (
    Refusal("overlap_param_gather_with_optimizer_step", "gathers weights beside the schedule's program",
            "leave it out"),
    Refusal("use_megatron_fsdp", "shards weights, and schedules need whole ones", "use --use-distributed-optimizer"),
    Refusal("use_custom_fsdp", "shards weights, and schedules need whole ones", "use --use-distributed-optimizer"),
    Refusal("use_torch_fsdp2", "shards weights, and schedules need whole ones", "use --use-distributed-optimizer"),
    Refusal("cuda_graph_impl", "records launches in the order of Megatron-LM's own schedule", "use none",
            _is_other_than("none")),
    Refusal("enable_cuda_graph", "records launches in the order of Megatron-LM's own schedule", "leave it out"),
    Refusal("external_cuda_graph", "records launches in the order of Megatron-LM's own schedule", "leave it out"),
    Refusal("variable_seq_lengths",
            "sends shapes before tensors, and the schedule's channels have fixed shapes",
            "pad to --seq-length"),
    Refusal("decoder_seq_length", "has stages of an encoder and of a decoder, between which two tensors travel",
            "use a model with one stack of layers"),
    Refusal("context_parallel_size", "cuts the sequence, which is not supported", "use 1, with --sequence-parallel",
            _above_one),
    Refusal("mtp_num_layers", "adds losses that are scaled outside of the schedule", "leave it out"),
    Refusal("overlap_moe_expert_parallel_comm",
            "interleaves the forward of one microbatch with the backward of another by itself", "leave it out"),
    Refusal("delay_wgrad_compute", "delays weight gradients by itself",
            "leave it out, and use --pipeline-schedule zb-h1"),
    Refusal("defer_embedding_wgrad_compute", "delays weight gradients by itself", "leave it out"),
    Refusal("fine_grained_activation_offloading", "moves activations beside the schedule's program", "leave it out"),
    Refusal("num_microbatches_with_partial_activation_checkpoints",
            "recomputes by a microbatch's place in Megatron-LM's own schedule", "leave it out", _is_other_than()),
    Refusal("gtp_weight_remat_size", "shards weights, and schedules need whole ones", "use 1", _above_one),
    Refusal("experimental_attention_variant", "has losses that Megatron-LM's own schedule scales",
            "use another attention", lambda value: "dsa" in str(value)),
    Refusal("moe_grad_scale_func", "scales the experts' losses by itself", "leave it None", flag="moe_grad_scale_func"),
    Refusal("moe_paged_stash", "may run a batch twice", "leave it out"),
    Refusal("moe_expert_rank_capacity_factor", "may run a batch twice", "leave it out", _is_other_than()),
    Refusal("cpu_offloading", "moves activations beside the schedule's program", "leave it out",
            flag="--cpu-offloading-num-layers"),
    Refusal("step_batch_size_schedule", "sets batch sizes during the run, and all of them are proved at the start",
            "use --rampup-batch-size, or --global-batch-size alone"),
    Refusal("freeze_all_layers", "computes no backwards, so there is nothing to schedule", "leave it out"),
    Refusal("perform_rl_step", "generates between batches with the weights that are trained",
            "train without the drop-in"),
    Refusal("inprocess_restart", "restarts without closing the schedule's communicators",
            "leave it out, and let the launcher restart"),
    Refusal("modelopt_enabled", "changes the tensors that stages send", "leave it out"),
)  # fmt: skip

OF_DELAYED_WEIGHTS = (
    Refusal("rerun_mode", "computes a batch again if a result looks wrong, when the next batch has begun",
            "give --rerun-mode disabled", _is_other_than("disabled")),
    Refusal("save_wgrads_interval", "saves gradients between batches, when those of two batches exist", "leave it out"),
    Refusal("save_dgrads_interval", "saves gradients of one batch, and two are computed at once", "leave it out"),
    Refusal("save_params_interval", "saves weights between batches, when two versions exist",
            "save checkpoints instead"),
    Refusal("save_activations_interval", "saves activations of one batch, and two are computed at once",
            "leave it out"),
    Refusal("log_params_norm", "reads weights between batches, when two versions exist", "leave it out"),
    Refusal("log_num_zeros_in_grad", "reads gradients between batches, when those of two batches exist",
            "leave it out"),
    Refusal("qk_clip", "changes weights after the optimizer's step", "leave it out"),
    Refusal("log_max_attention_logit", "reduces over all ranks between batches", "leave it out"),
    Refusal("optimizer", "steps weights in a way that two versions cannot follow", "use adam or sgd",
            _is_other_than("adam", "sgd")),
    Refusal("optimizer_cuda_graph", "records a step that the engine makes", "leave it out"),
    Refusal("vision_pretraining_type", "changes weights between batches", "use classify, or flush",
            lambda value: value == "dino"),
    Refusal("moe_router_load_balancing_type", "balances the router after Megatron-LM's reductions", "use aux_loss",
            lambda value: any(kind in str(value) for kind in ("quantile", "global"))),
    Refusal("ddp_param_name_patterns_for_fp32_local_accumulation",
            "keeps gradients outside of the two gradient buffers", "leave it out"),
    Refusal("ddp_reduce_scatter_with_fp32_accumulation", "reduces gradients in another way than the chain",
            "leave it out"),
    Refusal("iterations_to_skip", "skips batches, by whose numbers weight versions are counted", "use flush"),
    Refusal("ckpt_convert_format", "saves one version of the weights and ends", "convert without --pipeline-schedule"),
    Refusal("ckpt_assume_constant_structure",
            "assumes checkpoints of one structure, and a skipped step saves one version fewer", "leave it out"),
    Refusal("expert_model_parallel_size", "keeps separate gradient buffers for experts", "use 1", _above_one),
    Refusal("moe_router_enable_expert_bias", "changes weights after the optimizer's step", "leave it out"),
    Refusal("calculate_per_token_loss", "divides gradients by a number that is known only after the last microbatch",
            "leave it out"),
    Refusal("ddp_average_in_collective", "averages gradients in the reduction, and the schedule's reduction sums them",
            "leave it out"),
    Refusal("num_distributed_optimizer_instances", "reduces gradients in two steps", "use 1", _above_one),
    Refusal("use_precision_aware_optimizer", "keeps its state in a form that two versions cannot follow",
            "leave it out"),
    Refusal("optimizer_cpu_offload", "steps weights on the host by itself", "leave it out"),
    Refusal("fp8", "casts weights once a batch, and two batches use different ones", "use bf16", flag="--fp8-format"),
    Refusal("fp4", "casts weights once a batch, and two batches use different ones", "use bf16", flag="--fp4-format"),
    Refusal("adlr_autoresume", "saves checkpoints on a path where the pipeline is not drained",
            "use --exit-signal-handler"),
    Refusal("non_persistent_ckpt_type", "keeps one version of the weights", "use --save-interval alone",
            _is_other_than("global")),
)  # fmt: skip


def require_supported(args: argparse.Namespace) -> None:
    """Raise ValueError if the validated `args` contain a combination that is not supported."""
    if not asks_for_schedule(args):
        _require_no_flag_without(args)
        return
    if args.pipeline_program is None:
        _require_schedule(args)
    elif args.pipeline_schedule is not None:
        raise ValueError(
            f"{flag_of(args)} takes the place of --pipeline-schedule {args.pipeline_schedule}; leave one of them out"
        )
    take_error_feedback(args)
    require_predictions(args, weights_of(args), name_of(args))
    _require_none_of(args, args)
    _require_borders_on_all_stages(args)
    if args.pipeline_timeline is not None and args.pipeline_timeline_iterations < 1:
        raise ValueError(
            f"--pipeline-timeline-iterations {args.pipeline_timeline_iterations} shows nothing; give 1 or more"
        )


def require_supported_model(args: argparse.Namespace, config: Any) -> None:
    """Check the settings of the built model again, since a model provider may set `config` and change `args`.

    Raises:
        ValueError: a combination that is not supported.
    """
    for settings in (args, config):
        _require_none_of(settings, args)


def _require_none_of(settings: Any, args: argparse.Namespace) -> None:
    of_weights = () if weights_of(args).drains else OF_DELAYED_WEIGHTS
    for refusal in (*OF_ALL, *of_weights):
        value = getattr(settings, refusal.argument, None)
        if refusal.is_refused(value):
            shown = refusal.flag if value is True else f"{refusal.flag} {value}"
            raise ValueError(f"{shown} {refusal.reason}, so it does not go with {flag_of(args)}; {refusal.remedy}")
    if of_weights:
        _require_format_for_two_versions(args)


def _require_no_flag_without(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag of the project that has no effect without a schedule."""
    given = {
        f"--pipeline-timeline {args.pipeline_timeline}": args.pipeline_timeline is not None,
        "--pipeline-log-saved-activations": args.pipeline_log_saved_activations,
        f"--pipeline-rank-mapping {args.pipeline_rank_mapping}": args.pipeline_rank_mapping != STANDARD,
        f"--2bw-provisional {args.pipeline_2bw_provisional}": args.pipeline_2bw_provisional != "off",
        "--2bw-error-feedback": args.pipeline_2bw_error_feedback,
    }
    flag = next((flag for flag, is_given in given.items() if is_given), None)
    if flag is not None:
        raise ValueError(f"{flag} is for a pipeline schedule; give --pipeline-schedule, or leave it out")


def _require_schedule(args: argparse.Namespace) -> None:
    name, stages = args.pipeline_schedule, args.virtual_pipeline_model_parallel_size or 1
    if name not in PRESETS:
        raise ValueError(f"there is no --pipeline-schedule {name}; choose from {', '.join(runnable())}")
    if reason := reason_against(name):
        raise ValueError(f"--pipeline-schedule {name} {reason}")
    preset = PRESETS[name]
    if preset.interleaves and stages == 1:
        raise ValueError(
            f"--pipeline-schedule {name} is for several stages on each rank, and there is one; give "
            "--num-virtual-stages-per-pipeline-rank, or use flush"
        )
    if not preset.interleaves and stages > 1:
        raise ValueError(
            f"--pipeline-schedule {name} is for one stage on each rank, and there are {stages}; leave "
            "--num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage out, or use interleaved"
        )


def _require_borders_on_all_stages(args: argparse.Namespace) -> None:
    """Raise ValueError if the stages between the first and the last do not get the borders of conversations.

    On such stages conversations would attend to each other without any error, as under Megatron-LM's own schedule.
    """
    stages = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
    if not getattr(args, "sft", False) or stages <= 2:
        return
    version = installed_core_version()
    if version is not None and version[:2] == _TELLS_ENDS_ALONE:
        raise ValueError(
            f"--sft on {stages} pipeline stages: get_batch of Megatron-LM {dotted(version)} gives cu_seqlens to the "
            "first and the last stage alone, so conversations would see each other in the others; use 2 stages, "
            "Megatron-LM 0.17 or later, or this project's own pretrain_gpt.py"
        )


def _require_format_for_two_versions(args: argparse.Namespace) -> None:
    saves = getattr(args, "save", None) is not None or getattr(args, "load", None) is not None
    checkpoint_format = getattr(args, "ckpt_format", "torch")
    if saves and checkpoint_format != "torch_dist":
        raise ValueError(
            f"--ckpt-format {checkpoint_format} has no place for the two weight versions of {flag_of(args)}; "
            "use torch_dist"
        )
