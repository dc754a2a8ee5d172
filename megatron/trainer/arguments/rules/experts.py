"""Rules of mixtures of experts: the options of routers, and the options that fit experts."""

from megatron.planner.job.software import ALL_TO_ALL, FLEX
from megatron.trainer.arguments.flags.config import choice_of, expert_tensor_size, num_replicas
from megatron.trainer.arguments.flags.experts import EXPERTS, LOSSES, pattern_of_layers
from megatron.trainer.arguments.flags.specification import Arguments, name_of

DISPATCHERS = ("allgather", ALL_TO_ALL, FLEX)


def experts(args: Arguments) -> None:
    """Check the flags of experts, and parse `moe_layer_freq`. Without experts, these flags must ask for nothing."""
    args.num_experts = args.num_experts or None
    if args.num_experts is None:
        lone = next(
            (
                flag.name
                for flag in EXPERTS.flags
                if flag.dest in args.given and flag.dest != "num_experts" and not _is_neutral(args, flag.dest)
            ),
            None,
        )
        if lone is not None:
            raise ValueError(f"{lone} is given, and --num-experts is not; give both, or neither")
        return
    _layers(args)
    _router(args)
    _losses(args)
    _parallel(args)
    if args.elastic_pipeline:
        raise ValueError("--elastic-pipeline: layers with experts are not moved to another pipeline; leave it out")


def _is_neutral(args: Arguments, name: str) -> bool:
    """Whether the flag asks for nothing: scripts for models without experts may give degrees of 1."""
    return name in ("expert_model_parallel_size", "expert_tensor_parallel_size") and getattr(args, name) == 1


def counted_tokens(args: Arguments) -> None:
    """Refuse routers that count tokens over a batch if the run does not count them.

    Runs after the rules of schedules.
    """
    if args.num_experts is None:
        return
    what = {
        "--moe-router-enable-expert-bias": args.moe_router_enable_expert_bias,
        "--moe-router-load-balancing-type global_aux_loss": "global_aux_loss" in args.moe_router_load_balancing_type,
    }
    asked = next((name for name, is_asked in what.items() if is_asked), None)
    if asked is None:
        return
    if args.freeze_training:
        raise ValueError(f"{asked}: frozen layers count no tokens of a batch; leave --freeze-training out")
    if choice_of(args).residency is not None:
        raise ValueError(f"{asked}: weights on the host keep no counts of a batch; choose another --pipeline-schedule")
    if args.moe_router_enable_expert_bias and args.schedule.weights.updates_alone:
        raise ValueError(
            f"{asked}: under {choice_of(args).flag} stages update alone, before the tokens of all ranks are counted; "
            "choose another schedule"
        )


def moved_activations(args: Arguments) -> None:
    """Refuse to move saved activations whose sizes depend on a router's choices. Runs after the rules of schedules."""
    if args.num_experts is not None and args.moves_activations and not args.moe_pad_expert_input_to_capacity:
        raise ValueError(
            "activations of experts differ in size between microbatches, so they cannot leave the device; add "
            "--moe-expert-capacity-factor and --moe-pad-expert-input-to-capacity, or choose another schedule"
        )


def _layers(args: Arguments) -> None:
    if isinstance(args.moe_layer_freq, str):
        args.moe_layer_freq = pattern_of_layers(args.moe_layer_freq, "--moe-layer-freq")
    pattern = args.moe_layer_freq
    if isinstance(pattern, int) and pattern < 1:
        raise ValueError(f"--moe-layer-freq {pattern} is below 1; give 1 or more")
    if isinstance(pattern, list) and (len(pattern) != args.num_layers or set(pattern) - {0, 1}):
        raise ValueError(
            f"--moe-layer-freq has {len(pattern)} entries, and the model {args.num_layers} layers; give a 1 or 0 for "
            "each layer"
        )
    if isinstance(pattern, list) and not any(pattern):
        raise ValueError("--moe-layer-freq leaves no layer with experts; leave --num-experts out")
    if args.moe_shared_expert_intermediate_size is not None and args.add_bias_linear:
        raise ValueError(
            "--moe-shared-expert-intermediate-size: megatron.core's has no biases; add --disable-bias-linear"
        )
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size


def _router(args: Arguments) -> None:
    count, topk = args.num_experts, args.moe_router_topk
    groups, group_topk = args.moe_router_num_groups, args.moe_router_group_topk
    if topk > count:
        raise ValueError(f"--moe-router-topk {topk} is more than --num-experts {count}; lower the former")
    if (groups is None) != (group_topk is None):
        raise ValueError("--moe-router-num-groups and --moe-router-group-topk belong together; give both")
    if groups is not None and (
        count % groups or group_topk > groups or topk % group_topk or topk // group_topk > count // groups
    ):
        raise ValueError(
            f"--moe-router-num-groups {groups} has to divide --num-experts {count}, and --moe-router-group-topk "
            f"{group_topk} to be at most the former and to divide --moe-router-topk {topk}, and a group needs as many "
            "experts as a token takes from it; change one of them"
        )
    if args.moe_router_enable_expert_bias and args.moe_router_score_function != "sigmoid":
        raise ValueError("--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid; add it")
    needs_pre_softmax = topk == 1 and args.moe_router_score_function == "softmax"
    if needs_pre_softmax and not args.moe_router_pre_softmax and args.moe_router_load_balancing_type != ["sinkhorn"]:
        raise ValueError(
            "--moe-router-topk 1 needs --moe-router-pre-softmax, since the softmax of one score has no gradient"
        )
    if args.moe_apply_probs_on_input and topk != 1:
        raise ValueError(f"--moe-apply-probs-on-input needs --moe-router-topk 1, not {topk}; leave it out")
    if args.moe_pad_expert_input_to_capacity and args.moe_expert_capacity_factor is None:
        raise ValueError("--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor")


def _losses(args: Arguments) -> None:
    kinds, factors = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    for kind in kinds:
        if kind not in LOSSES:
            raise ValueError(f"--moe-router-load-balancing-type {kind} is none of {', '.join(LOSSES)}")
    if len(factors) != len(kinds) and factors != [0.0]:
        raise ValueError(
            f"--moe-aux-loss-coeff has {len(factors)} values and --moe-router-load-balancing-type {len(kinds)}; give a "
            "value for each"
        )
    if len(kinds) > 1 and ({"sinkhorn", "none"} & {*kinds} or len({*kinds}) < len(kinds)):
        raise ValueError(
            f"--moe-router-load-balancing-type {' '.join(kinds)}: sinkhorn and none stand alone, and none is given "
            "twice"
        )
    if kinds == ["none"] and any(factors):
        raise ValueError("--moe-router-load-balancing-type none has no loss for --moe-aux-loss-coeff; leave one out")
    if kinds == ["sinkhorn"] and (any(factors) or args.moe_expert_capacity_factor is not None):
        raise ValueError(
            "--moe-router-load-balancing-type sinkhorn goes neither with --moe-aux-loss-coeff nor with "
            "--moe-expert-capacity-factor; leave them out"
        )


def _shared_out(args: Arguments) -> None:
    """Check the degrees of expert parallelism."""
    ep, t, cut = args.expert_model_parallel_size, args.tensor_model_parallel_size, expert_tensor_size(args)
    if args.num_experts % ep:
        raise ValueError(
            f"--num-experts {args.num_experts} is not divisible by --expert-model-parallel-size {ep}; change one"
        )
    if cut not in (1, t):
        raise ValueError(
            f"--expert-tensor-parallel-size {cut} is neither 1 nor --tensor-model-parallel-size {t}; give one of them"
        )
    if ep * cut < t:
        raise ValueError(
            f"--expert-tensor-parallel-size {cut} with --expert-model-parallel-size {ep} would leave copies of an "
            f"expert on the {t} tensor ranks, and copies are summed over replicas alone; raise the latter to "
            f"{t // cut}, or leave the former out"
        )
    if num_replicas(args) * t % (cut * ep):
        raise ValueError(
            f"--expert-model-parallel-size {ep} does not divide the {num_replicas(args) * t // cut} ranks of a stage "
            "that share out experts; lower it, or start more ranks"
        )


def _parallel(args: Arguments) -> None:
    t = args.tensor_model_parallel_size
    _shared_out(args)
    if args.moe_enable_deepep and args.moe_token_dispatcher_type != FLEX:
        raise ValueError("--moe-enable-deepep is about --moe-token-dispatcher-type flex; give both, or neither")
    if args.moe_token_dispatcher_type not in DISPATCHERS:
        raise ValueError(
            f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type} is none of {', '.join(DISPATCHERS)}"
        )
    if t > 1 and not args.sequence_parallel:
        raise ValueError("experts with --tensor-model-parallel-size above 1 need --sequence-parallel; add it")
    if t > 1 and args.add_bias_linear:
        raise ValueError(
            "experts with --tensor-model-parallel-size above 1 have no biases in megatron.core; add "
            "--disable-bias-linear"
        )
    for name, cut in (("moe_ffn_hidden_size", expert_tensor_size(args)), ("moe_shared_expert_intermediate_size", t)):
        width = getattr(args, name)
        if width is not None and width % cut:
            raise ValueError(f"{name_of(name)} {width} is not divisible by --tensor-model-parallel-size {cut}")
