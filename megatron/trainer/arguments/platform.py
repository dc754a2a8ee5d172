"""The limits of the machine: flags that need CUDA, Transformer Engine or Apex.

A default that the machine does not support is turned off and noted once. A flag that the user gave is refused. Nothing
here asks the machine: a record describes it, so that the CUDA cases are tested without CUDA.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion

from megatron.pipeline.check import hardware_queues
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules.program_schedule import ProgramSchedule
from megatron.pipeline.start_up.core_version import Core, installed_core
from megatron.pipeline.start_up.late_weights import (
    LOOKS_UP_GRADIENTS,
    PUTS_GRADIENTS_OFF,
    engine_keeps_main_grad,
    engine_puts_off,
)
from megatron.planner.job.refusals import GATHER, RING
from megatron.planner.job.software import FLEX
from megatron.trainer.arguments.flags.config import choice_of, num_replicas
from megatron.trainer.arguments.flags.specification import Arguments
from megatron.trainer.arguments.rules.context import context_of_engine


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The features of a machine.

    Attributes:
        core: the differences between versions of megatron.core; by default, this machine's version.
        engine_keeps_main_grad: Transformer Engine's backward adds to the gradient buffer that was set at its forward.
        engine_puts_off: Transformer Engine's layers can defer weight gradients, as the split into I and W needs.
        without_fp8: an FP8 recipe that the machine does not support -> the reason.
    """

    is_cuda: bool
    has_transformer_engine: bool
    has_apex: bool
    has_deep_ep: bool = False
    core: Core = field(default_factory=installed_core)
    engine_keeps_main_grad: bool = False
    engine_puts_off: bool = True
    without_fp8: Mapping[str, str] = field(default_factory=dict)


_ENGINE = "transformer_engine"
_PACKAGES = {_ENGINE: "has_transformer_engine", "apex": "has_apex", "deep_ep": "has_deep_ep"}


def assumed_platform(packages: Iterable[str] | None) -> Platform:
    """A machine with CUDA and `packages`, each NAME or NAME==VERSION; None: with all of them, in their newest versions.

    Raises ValueError for an unknown package or an invalid version.
    """
    if packages is None:
        return Platform(is_cuda=True, **dict.fromkeys(_PACKAGES.values(), True))
    found: dict[str, str] = {}
    for word in [each for each in packages if each != "none"]:
        name, _, version = word.partition("==")
        name = name.replace("-", "_")
        if name not in _PACKAGES:
            raise ValueError(f"--assume-packages {word}: runs ask for {', '.join(_PACKAGES)}; leave it out")
        found[name] = version
    version = found.get(_ENGINE)
    try:
        keeps, puts_off = (engine_keeps_main_grad(version), engine_puts_off(version)) if version else (False, True)
    except InvalidVersion as error:
        raise ValueError(f"--assume-packages {_ENGINE}=={version}: {error}; write it as 2.6.0") from error
    has = {attribute: name in found for name, attribute in _PACKAGES.items()}
    return Platform(is_cuda=True, engine_keeps_main_grad=keeps, engine_puts_off=puts_off, **has)


def resolve_platform(args: Arguments, platform: Platform) -> list[str]:
    """Set the values in `args` that depend on the machine; return notes for the log, one sentence each.

    Raises ValueError for a flag that the user gave and the machine does not support.
    """
    notes = [*_choose_implementation(args, platform)]
    uses_engine = args.transformer_impl == "transformer_engine"
    where = "Transformer Engine" if platform.is_cuda else "CUDA"
    for flag, is_asked in {
        "--apply-layernorm-1p": args.apply_layernorm_1p,
        f"--fp8-format {args.fp8}": args.fp8 is not None,
        "--fp32-residual-connection": args.fp32_residual_connection,
        "--tp-comm-overlap": args.tp_comm_overlap and args.tensor_model_parallel_size > 1,
        "--cross-entropy-fusion-impl te": args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te",
        f"--attention-backend {args.attention_backend}": args.attention_backend in ("flash", "fused")
        or (args.attention_backend == "unfused" and args.architecture == "bert"),  # megatron.core's plain one is local
    }.items():
        if is_asked and not uses_engine:
            raise ValueError(f"{flag} needs {where} with --transformer-impl transformer_engine; leave the flag out")
    if args.fp8 is not None and (reason := platform.without_fp8.get(args.fp8_recipe)):
        raise ValueError(
            f"--fp8-format {args.fp8} with --fp8-recipe {args.fp8_recipe} is not for this machine: {reason}; use "
            "another recipe, or leave the flag out"
        )
    if args.num_experts and args.moe_token_dispatcher_type == FLEX and not (platform.is_cuda and platform.has_deep_ep):
        raise ValueError("--moe-token-dispatcher-type flex needs CUDA and the package deep_ep; use alltoall")
    if args.hybrid_layer_pattern is not None and not platform.core.has_hybrid_model:
        raise ValueError(
            f"--hybrid-layer-pattern {args.hybrid_layer_pattern} needs megatron.core 0.18 or later, which has the "
            f"HybridModel; give --num-layers {args.num_layers} in its place for the same GPT"
        )
    if (
        platform.core.weighs_further_tokens
        and args.mtp_num_layers
        and args.context_parallel_size > 1
        and args.calculate_per_token_loss
    ):
        raise ValueError(
            "--mtp-num-layers with --context-parallel-size and --calculate-per-token-loss: this megatron.core weighs "
            "the losses of a rank by its own tokens; use megatron.core 0.16, or leave one of them out"
        )
    if args.profile and not platform.is_cuda and not args.use_pytorch_profiler:
        raise ValueError("--profile marks ranges for nsys, which needs CUDA; add --use-pytorch-profiler")
    if args.distributed_backend == "nccl" and not platform.is_cuda:
        raise ValueError("--distributed-backend nccl needs CUDA; use gloo or leave the flag out")
    is_stepped_on_host = choice_of(args).residency is not None
    if args.optimizer_kernel == "fused" and platform.is_cuda and not is_stepped_on_host:
        raise ValueError(
            "--optimizer-kernel fused is for steps on a CPU; on a GPU Apex's and Transformer Engine's are fused "
            "where they are installed; leave the flag out"
        )
    if not platform.is_cuda:
        args.use_cpu_initialization = True

    def turn_off(name: str, available: bool, reason: str) -> None:
        if getattr(args, name) and not available:
            setattr(args, name, False)
            notes.append(f"{name} is off: {reason}")

    turn_off("gradient_accumulation_fusion", platform.is_cuda and platform.has_apex, "it needs CUDA and Apex")
    turn_off(
        "gradient_accumulation_fusion",
        not (uses_engine and platform.engine_keeps_main_grad and _keeps_several_gradient_buffers(args)),
        f"with the gradient buffers of {choice_of(args).name} it needs Transformer Engine "
        f"{LOOKS_UP_GRADIENTS} or later; the installed one adds to the buffer that its forward saw",
    )
    turn_off(
        "gradient_accumulation_fusion",
        not is_stepped_on_host,
        f"{choice_of(args).name} carries gradients to the host stage by stage",
    )
    turn_off("apply_rope_fusion", platform.is_cuda and uses_engine, "it needs Transformer Engine")
    turn_off("masked_softmax_fusion", platform.is_cuda and platform.has_apex, "it needs CUDA and Apex")
    turn_off("masked_softmax_fusion", not args.reset_attention_mask, f"its kernel reads no mask, and {_RESETS}")
    turn_off(
        "masked_softmax_fusion", not args.sft, "its kernel reads no mask, and --sft keeps conversations apart by one"
    )
    packs = {"--rotary-interleaved": args.rotary_interleaved, "--multi-latent-attention": args.multi_latent_attention}
    for name in (name for name, is_given in packs.items() if is_given):  # megatron.core does not pass the first to it
        turn_off("apply_rope_fusion", not args.sft, f"its kernels for conversations of --sft are not used with {name}")
    turn_off("masked_softmax_fusion", args.window_size is None, "its kernel knows no window")
    turn_off("masked_softmax_fusion", args.position_embedding_type != "relative", "its kernel adds no bias")
    for name in ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"):
        turn_off(name, platform.is_cuda and uses_engine, "it needs Transformer Engine")
    turn_off("persist_layer_norm", platform.is_cuda and platform.has_apex, "it needs CUDA and Apex")
    if uses_engine:
        context_of_engine(args)
    elif args.context_parallel_size > 1 and args.cp_comm_type[0] == RING:
        args.cp_comm_type = [GATHER]
        notes.append(f"cp_comm_type is {GATHER}: {RING} is Transformer Engine's, and transformer_impl is local")
    if args.position_embedding_type != "rope" or (args.multi_latent_attention and args.rope_type != "yarn"):
        args.apply_rope_fusion = False
    return [note for note in notes if not note.startswith("apply_rope") or args.position_embedding_type == "rope"]


_ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_VALUES_OF_BACKEND = {"flash": "100", "fused": "010", "unfused": "001", "local": "000", "auto": "111"}
"""Attention backend -> the values to which megatron.core sets these variables; it ends if they have other values."""
_SCALES = "NVTE_APPLY_QK_LAYER_SCALING"


def require_attention_environment(args: Arguments, environment: Mapping[str, str]) -> None:
    """Raise ValueError if a variable of Transformer Engine selects another attention than the flags."""
    wanted = dict(zip(_ATTENTION_VARIABLES, _VALUES_OF_BACKEND[args.attention_backend], strict=True))
    for name, value in wanted.items():
        if environment.get(name, value) != value:
            raise ValueError(
                f"{name} is {environment[name]}, and --attention-backend {args.attention_backend} asks for {value}; "
                f"unset {', '.join(_ATTENTION_VARIABLES)}, and choose the attention with the flag"
            )
    scales = "1" if args.apply_query_key_layer_scaling else "0"
    if args.transformer_impl == "transformer_engine" and environment.get(_SCALES, "0") != scales:
        raise ValueError(
            f"{_SCALES} is {environment.get(_SCALES, 'not set')}, which Transformer Engine goes by, and the flags say "
            f"{scales} (--apply-query-key-layer-scaling); export {_SCALES}={scales}"
        )


_RESETS = "--reset-attention-mask keeps documents apart by one"


def _needs_local(args: Arguments) -> str | None:
    """Why the model needs local layers; None: Transformer Engine's layers can compute it, too."""
    if args.residual_from_norm:
        return "--residual-from-norm adds to what norms give, which Transformer Engine's layers do not hand out"
    if args.position_embedding_type == "relative":
        return "--position-embedding-type relative adds its bias in local attention"
    return None


def _keeps_several_gradient_buffers(args: Arguments) -> bool:
    """Whether a batch accumulates gradients while those of the previous batch are reduced."""
    weights = choice_of(args).policy
    return weights.overlaps_updates and not args.pipeline_2bw_single_gradient_buffer


def _choose_implementation(args: Arguments, platform: Platform) -> Iterable[str]:
    """Set `args.transformer_impl`. Yields a note if the schedule, the masks or the model decide it."""
    can_use_engine = platform.is_cuda and platform.has_transformer_engine
    splits = args.schedule.splits_backward
    needs = f"{choice_of(args).flag} splits backwards into I and W"
    hinders = _what_hinders_halves(args.program, platform) if splits else None
    if args.transformer_impl is None:
        local = hinders or args.reset_attention_mask or _needs_local(args)
        args.transformer_impl = "transformer_engine" if can_use_engine and not local else "local"
        if can_use_engine and hinders:
            yield f"transformer_impl is local: {needs}, and {hinders}"
        elif can_use_engine and args.reset_attention_mask:
            yield f"transformer_impl is local: Transformer Engine's causal attention reads no mask, and {_RESETS}"
        elif can_use_engine and local:
            yield f"transformer_impl is local: {local}"
    elif args.transformer_impl == "transformer_engine" and args.reset_attention_mask:
        raise ValueError(
            f"--transformer-impl transformer_engine has a causal attention that reads no mask, and {_RESETS}; use "
            "--transformer-impl local, or leave the latter out"
        )
    elif args.transformer_impl == "transformer_engine" and (reason := _needs_local(args)):
        raise ValueError(
            f"--transformer-impl transformer_engine does not compute this model: {reason}; use --transformer-impl local"
        )
    elif args.transformer_impl == "transformer_engine" and not can_use_engine:
        missing = "the transformer_engine package, which is not installed" if platform.is_cuda else "CUDA"
        raise ValueError(f"--transformer-impl transformer_engine needs {missing}; use --transformer-impl local")
    elif args.transformer_impl == "transformer_engine" and hinders:
        raise ValueError(
            f"--transformer-impl transformer_engine does not go with these halves: {needs}, and {hinders}; use "
            "--transformer-impl local, or another schedule"
        )
    if args.transformer_impl == "transformer_engine" and splits and args.tp_comm_overlap:
        raise ValueError(
            f"--tp-comm-overlap computes gradients of weights beside copies, and {needs}, which puts them off; leave "
            "one of the two out"
        )


def _what_hinders_halves(program: ProgramSchedule | None, platform: Platform) -> str | None:
    """Why Transformer Engine's layers cannot follow I and W; None: they can. `program`: that of a user's file."""
    if not platform.engine_puts_off:
        return f"layers of Transformer Engine can put weight gradients off from {PUTS_GRADIENTS_OFF} on"
    for row in program.program.rows if program is not None else ():
        waiting: dict[int, list[int]] = defaultdict(list)  # stage -> microbatches, in the order of their I
        for each in row:
            if each.kind is Kind.BACKWARD_INPUT:
                waiting[each.stage].append(each.microbatch)
            elif each.kind is Kind.BACKWARD_WEIGHT and (first := waiting[each.stage].pop(0)) != each.microbatch:
                return (
                    f"its {each} stands before the W of microbatch {first}, whose I was first, while each layer of "
                    "Transformer Engine keeps what it puts off in a queue, first in, first out"
                )
    return None


# --- CUDA_DEVICE_MAX_CONNECTIONS, checked for the job that the flags describe -----------------------------------------


def require_hardware_queues(args: Arguments, environment: Mapping[str, str]) -> None:
    """Refuse an environment with too few hardware queues for a job over NCCL. Raises ValueError.

    Args:
        args: the validated arguments.
        environment: see `hardware_queues`.
    """
    hardware_queues.require_hardware_queues(
        args.schedule,
        environment,
        flag=choice_of(args).flag,
        tensor=args.tensor_model_parallel_size * args.context_parallel_size,
        data=num_replicas(args),
        pipeline=args.pipeline_model_parallel_size,
        distributed_optimizer=args.use_distributed_optimizer,
        max_microbatches=max(args.batch_sizes.all_num_microbatches()),
        moves_activations=args.moves_activations,
        reduces_scales=args.fp8 is not None and args.fp8_recipe == "delayed",
    )
