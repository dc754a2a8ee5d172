"""Rules of FP8: which layers can compute in FP8, and which features exclude FP8 or delayed scaling."""

from megatron.planner.job.refusals import undivided_in_fp8
from megatron.trainer.arguments.flags.config import choice_of, expert_tensor_size
from megatron.trainer.arguments.flags.specification import Arguments
from megatron.trainer.arguments.flags.training import FP8_RECIPES
from megatron.trainer.arguments.rules.attention import latents_of
from megatron.trainer.arguments.rules.stages import layer_split


def fp8(args: Arguments) -> None:
    """Refuse flags that FP8 excludes. Runs after the rules of schedules and stages."""
    if args.fp8 is None:
        if args.moe_router_padding_for_quantization:
            raise ValueError("--moe-router-padding-for-quantization is for FP8; add --fp8-format, or leave it out")
        return
    flag = f"--fp8-format {args.fp8}"
    if args.architecture not in ("gpt", "bert"):
        raise ValueError(f"{flag} is for GPT and BERT, whose layers are in FP8 contexts; leave it out")
    if args.transformer_impl == "local":
        raise ValueError(f"{flag} needs the layers of --transformer-impl transformer_engine; use them, or leave it out")
    if args.fp8_recipe not in FP8_RECIPES:
        raise ValueError(
            f"--fp8-recipe {args.fp8_recipe}: quantizers of a user's own may keep a state that no checkpoint has; use "
            f"one of {', '.join(FP8_RECIPES)}"
        )
    if args.moe_router_padding_for_quantization and args.moe_token_dispatcher_type == "allgather":
        raise ValueError(
            "--moe-router-padding-for-quantization does not go with --moe-token-dispatcher-type allgather; use alltoall"
        )
    _pipeline(args, flag)
    _layers_in_bf16(args)
    _sizes(args, flag)


def _pipeline(args: Arguments, flag: str) -> None:
    """Refuse flags that move or count activations, which would include FP8 weights, and flags that move layers."""
    choice = choice_of(args)
    for name, is_asked, reason in (
        (choice.flag, choice.residency is not None, "weights that come from the host are cast anew each time"),
        (choice.flag, args.schedule.moves_activations, "weights in FP8 would be moved with activations"),
        ("--log-saved-activations", args.log_saved_activations, "weights in FP8 would be counted as activations"),
        ("--freeze-training", args.freeze_training, "frozen layers would cast their weights for every microbatch"),
    ):
        if is_asked:
            raise ValueError(f"{name} does not go with {flag}: {reason}; leave one of the two out")
    if args.fp8_recipe != "delayed":
        return
    for name, is_asked, reason in (
        ("--pipeline-recompute", args.pipeline_recompute or choice.recompute,
         "a recomputed forward would have the scales of a later microbatch"),
        ("--elastic-pipeline", args.elastic_pipeline, "scales would still be reduced over the ranks before a change"),
        ("--mtp-num-layers", args.mtp_num_layers, "its layers have contexts of their own, which move scales on again"),
    ):  # fmt: skip
        if is_asked:
            raise ValueError(
                f"{flag} with --fp8-recipe delayed does not go with {name}: {reason}; use --fp8-recipe tensorwise"
            )


def _layers_in_bf16(args: Arguments) -> None:
    if not args.first_last_layers_bf16:
        return
    if args.fp8_recipe == "delayed":
        raise ValueError(
            "--first-last-layers-bf16 does not go with --fp8-recipe delayed, which has one FP8 context for all layers "
            "of a stage; use --fp8-recipe tensorwise"
        )
    most = args.num_layers // layer_split(args)[0]
    for name in ("start", "end"):
        number = getattr(args, f"num_layers_at_{name}_in_bf16")
        if number > most:
            raise ValueError(
                f"--num-layers-at-{name}-in-bf16 {number} is more than {most}, the layers of a stage by "
                "megatron.core's rule; lower it"
            )


def _sizes(args: Arguments, flag: str) -> None:
    """Refuse sizes that Transformer Engine does not multiply in FP8."""
    t, groups = args.tensor_model_parallel_size, args.num_query_groups if args.group_query_attention else None
    latents = latents_of(args)
    tokens = args.micro_batch_size * args.seq_length // args.context_parallel_size
    expert = (args.moe_ffn_hidden_size or args.ffn_hidden_size) if args.num_experts else 0
    undivided = undivided_in_fp8(
        tensor=t,
        hidden=args.hidden_size,
        heads=(args.kv_channels * args.num_attention_heads, args.kv_channels * (groups or args.num_attention_heads)),
        latents=latents and (latents, args.num_attention_heads),
        feed_forward=(args.ffn_hidden_size, args.moe_shared_expert_intermediate_size or 0),
        expert=expert // expert_tensor_size(args),
        tokens=tokens // (t if args.sequence_parallel else 1),
        recipe=args.fp8_recipe,
    )
    if undivided is not None:
        raise ValueError(f"{flag}: {undivided}; change the size, or leave the flag out")
