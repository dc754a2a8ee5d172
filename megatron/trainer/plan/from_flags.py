"""Conversion of checked flags to the planner's records, and a proof of the run's programs.

`PricedFlags` are flags that a search prices although training may refuse them: context parallelism and experts.
This module imports no torch, so that a search starts at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron.pipeline.check import CheckReport, check_periodic
from megatron.pipeline.schedules import PipelineSchedule
from megatron.pipeline.simulate.costs import Costs
from megatron.planner import (
    ActivationSetting,
    Cluster,
    Configuration,
    Demand,
    Recompute,
    TrainingState,
    demand_of,
    most,
)
from megatron.planner.job.refusals import GATHER, RING
from megatron.planner.job.software import ALL_TO_ALL, FLEX, Software, has_flash_attention
from megatron.planner.memory.architecture import FP32, ExpertDegrees
from megatron.planner.memory.hosted import Hosting
from megatron.planner.memory.muon import MuonSetting
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.trainer.arguments.architecture import architecture
from megatron.trainer.arguments.flags.config import (
    TrainConfig,
    choice_of,
    expert_tensor_size,
    num_expert_replicas,
    num_replicas,
)
from megatron.trainer.arguments.flags.specification import Arguments, Flag
from megatron.trainer.arguments.rules.experts import DISPATCHERS

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


# --- context parallelism and shared experts ---------------------------------------------------------------------------


DEGREES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
"""The destinations of the flags that shard experts; a search puts them into its configurations."""


@dataclass(frozen=True, kw_only=True)
class PricedFlags:
    """The user's settings for context parallelism and experts, which a search prices.

    Attributes:
        context, expert, expert_tensor: degrees, as a configuration has them.
        gathers_keys, dispatcher, overlaps_experts: as in `Software`.
    """

    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    gathers_keys: bool = False
    dispatcher: str = ALL_TO_ALL
    overlaps_experts: bool = False


def read_priced(given: Arguments, flags: Sequence[Flag], *, has_experts: bool) -> PricedFlags:
    """Read the priced flags among the parsed flags. `has_experts`: whether the model has experts.

    Raises:
        ValueError: a value is invalid or has no price, or the model has no experts for a flag about experts.
    """
    names = {flag.dest: flag.name for flag in flags}
    values = {name: getattr(given, name) for name in names}
    kind = given.cp_comm_type
    if given.context_parallel_size > 1 and set(kind) != {RING} and set(kind) != {GATHER}:
        raise ValueError(f"--cp-comm-type {' '.join(kind)} has no price; give {RING} or {GATHER}")
    if given.context_parallel_size < 1:
        raise ValueError(f"--context-parallel-size {given.context_parallel_size} is below 1; give 1 or more")
    for name in DEGREES:
        if values.get(name) is not None and values[name] < 1:
            raise ValueError(f"{names[name]} {values[name]} is below 1; give 1 or more")
    expert = values.get("expert_model_parallel_size") or 1
    dispatcher = given.moe_token_dispatcher_type if "moe_token_dispatcher_type" in given.given else ALL_TO_ALL
    if dispatcher not in (ALL_TO_ALL, FLEX):
        if dispatcher not in DISPATCHERS or expert > 1:
            raise ValueError(f"--moe-token-dispatcher-type {dispatcher} has no price; give {ALL_TO_ALL} or {FLEX}")
        dispatcher = ALL_TO_ALL  # on one rank nothing is sent
    if not has_experts:
        lone = "--overlap-moe-expert-parallel-comm" if values.get("overlap_moe_expert_parallel_comm") else None
        if expert > 1:
            lone = names["expert_model_parallel_size"]
        if dispatcher != ALL_TO_ALL:
            lone = f"--moe-token-dispatcher-type {dispatcher}"
        if lone is not None:
            raise ValueError(f"{lone} is given, and --num-experts is not; give both, or neither")
    return PricedFlags(
        context=given.context_parallel_size,
        expert=expert,
        expert_tensor=values.get("expert_tensor_parallel_size") if has_experts else None,
        gathers_keys=GATHER in kind,
        dispatcher=dispatcher,
        overlaps_experts=values.get("overlap_moe_expert_parallel_comm", False),
    )


# --- the planner's records --------------------------------------------------------------------------------------------

_HALF = 2


def activation_setting(args: TrainConfig) -> ActivationSetting:
    """The memory-relevant settings of the run's activations; `args.transformer_impl` must be resolved."""
    element = _HALF if args.fp16 or args.bf16 else FP32
    return ActivationSetting(
        tensor=args.tensor_model_parallel_size,
        micro_batch_size=args.micro_batch_size,
        element_bytes=element,
        residual_bytes=FP32 if args.fp32_residual_connection else element,
        sequence_parallel=args.sequence_parallel,
        saves_scores=not has_flash_attention(args.transformer_impl, args.attention_backend, element),
        softmax_in_fp32=args.attention_softmax_in_fp32,
        fused_gate=args.swiglu and args.bias_swiglu_fusion,
        further_gates=int(args.quick_geglu) + (args.activation_func_clamp_value is not None),
        recompute=_recompute(args),
        context=args.context_parallel_size,
        gathers_keys=gathers_keys(args),
        defers_gathered=args.transformer_impl == "transformer_engine",
        experts=expert_degrees(args),
        fp8=args.fp8 is not None,
        unquantized=(args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16)
        if args.first_last_layers_bf16
        else (0, 0),
    )


def gathers_keys(args: TrainConfig | Arguments) -> bool:
    """Whether context parallel ranks gather keys and values."""
    return args.cp_comm_type[0] == GATHER


def expert_degrees(args: TrainConfig) -> ExpertDegrees | None:
    """The degrees of expert parallelism; None without it."""
    if args.num_experts is None or args.expert_model_parallel_size == 1:
        return None
    return ExpertDegrees(parallel=args.expert_model_parallel_size, tensor=expert_tensor_size(args))


_BYTES = {"fp32": FP32, "bf16": _HALF}


def training_state(args: TrainConfig) -> TrainingState:
    """The bytes that the run keeps for each parameter."""
    weight = _HALF if args.fp16 or args.bf16 else FP32
    return TrainingState(
        weight_bytes=weight,
        gradient_bytes=FP32 if args.accumulate_allreduce_grads_in_fp32 else weight,
        num_moments=int(args.sgd_momentum > 0) if args.optimizer == "sgd" else 2,
        moment_bytes=(_BYTES[args.exp_avg_dtype] + _BYTES[args.exp_avg_sq_dtype]) / 2,
        distributed_optimizer=args.use_distributed_optimizer,
        data=num_replicas(args),
        expert_data=num_expert_replicas(args),
        muon=_muon(args) if args.optimizer == "muon" else None,
        keeps_state=args.optimistic_steps,
        multiplies_elsewhere=args.optimistic_steps and args.fp16,
    )


def _muon(args: TrainConfig) -> MuonSetting:
    return MuonSetting(
        num_steps=args.muon_num_ns_steps,
        splits_qkv=args.muon_split_qkv,
        gathers=args.muon_tp_mode == "duplicated",
        element_bytes=_HALF if args.muon_fp32_matmul_prec == "medium" else FP32,
    )


def uses_nccl(args: TrainConfig) -> bool:
    """Whether the run communicates over NCCL if it has CUDA."""
    return args.distributed_backend != "gloo"


WITHOUT_ENGINE = {
    "apply_rope_fusion": False, "moe_permute_fusion": False, "moe_router_fusion": False, "fp8": None,
    "moe_router_padding_for_quantization": False,
}  # fmt: skip
"""Flags for which megatron.core's configuration needs a fused kernel that may be missing here -> neutral value.

No shape depends on them."""


def layers_of_stages(config: TransformerConfig) -> tuple[int, ...]:
    """The number of layers of each stage, as megatron.core splits them."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    num_ranks, num_virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    layout = config.pipeline_model_parallel_layout

    def count(rank: int, virtual: int) -> int:
        if layout is not None:
            return layout.layout[rank][virtual].count(LayerType.decoder)
        return get_num_layers_to_build(config, vp_stage=virtual, pp_rank=rank)

    return tuple(count(rank, virtual) for virtual in range(num_virtual) for rank in range(num_ranks))


def _recompute(args: TrainConfig) -> Recompute:
    if args.recompute_granularity == "full":
        return Recompute(method=args.recompute_method, num_layers=args.recompute_num_layers)
    modules = frozenset(args.recompute_modules or ()) if args.recompute_granularity == "selective" else frozenset()
    asks = args.pipeline_recompute and args.made_program is None  # a program that was made recomputes only some stages
    return Recompute(modules=modules, whole_stage=asks or choice_of(args).recompute)


@dataclass(frozen=True, kw_only=True)
class RunSoftware(Software):
    """The software of a run, from its flags, for any parallel degrees.

    Attributes:
        setting, state: the same for all configurations of the run.
        with_halves: the software with the layers that split backwards need; None: the layers are the same.
    """

    setting: ActivationSetting
    state: TrainingState
    with_halves: RunSoftware | None = None

    def of(self, configuration: Configuration) -> RunSoftware:
        return self if self.with_halves is None or not configuration.splits_backward else self.with_halves

    def activation_setting(self, configuration: Configuration) -> ActivationSetting:
        general = super().activation_setting(configuration)
        return replace(
            self.setting,
            tensor=configuration.tensor,
            micro_batch_size=configuration.micro_batch_size,
            sequence_parallel=configuration.sequence_parallel and configuration.tensor > 1,
            recompute=general.recompute,
            context=general.context,
            gathers_keys=general.gathers_keys,
            experts=general.experts,
        )

    def training_state(self, configuration: Configuration) -> TrainingState:
        return replace(
            self.state, distributed_optimizer=configuration.distributed_optimizer, data=configuration.replicas,
            expert_data=configuration.expert_replicas,
        )  # fmt: skip


def software(args: TrainConfig) -> RunSoftware:
    """The software that trains; `args` must be resolved for their platform."""
    setting, state = activation_setting(args), training_state(args)
    return RunSoftware(
        setting=setting,
        state=state,
        element_bytes=setting.element_bytes,
        gradient_bytes=state.gradient_bytes,
        transformer_impl=args.transformer_impl,
        flash_attention=not setting.saves_scores,
        fuses_softmax=args.masked_softmax_fusion and setting.element_bytes == _HALF,
        fuses_gradient_accumulation=args.gradient_accumulation_fusion,
        own_communicators=uses_nccl(args),
        overlaps_in_pieces=args.tp_comm_overlap,
        fp8=args.fp8 is not None,
    )


def configuration_of(args: TrainConfig, layers: Sequence[int] | None, **choices: Any) -> Configuration:
    """The run's degrees, batches and schedule as a configuration of a search. `choices`: further values.

    Ranks must have equal numbers of stages.
    """
    schedule = args.schedule
    values = {
        "tensor": args.tensor_model_parallel_size, "pipeline": schedule.num_ranks, "data": args.data_parallel_size,
        "virtual": schedule.num_stages // schedule.num_ranks, "micro_batch_size": args.micro_batch_size,
        "global_batch_size": args.global_batch_size, "schedule": args.pipeline_schedule,
        "sequence_parallel": args.sequence_parallel, "layers": layers and tuple(layers),
    }  # fmt: skip
    return Configuration(**values | choices)


def costs_by_arithmetic(args: TrainConfig, configuration: Configuration) -> Costs:
    """The costs of a configuration on GPUs of the kind --dry-run-gpu, as if all were in one node."""
    cluster = Cluster(gpu=args.dry_run_gpu, nodes=1, gpus_per_node=args.world_size)
    return FirstPrinciples(architecture(args), cluster, software(args)).costs(configuration, configuration.layers)


def hosting_of(args: TrainConfig) -> Hosting | None:
    """How the host keeps weights; None: the device keeps them."""
    residency = args.schedule.residency
    if residency is None:
        return None
    most = max(args.batch_sizes.all_num_microbatches())
    return Hosting(stages=residency.stages, stash=residency.stash, num_microbatches=most)


# --- the programs of a run, proved before it starts -------------------------------------------------------------------


def prove(args: TrainConfig) -> tuple[CheckReport, Demand]:
    """Build and prove the programs that the run would execute.

    Returns the report on its largest batches, and the largest demand of any batch.

    The runtime executes segments of a stream, whose programs are proved as they are built. Here the stream has every
    batch size of the run in turn, and the evaluation. The first and the largest size are also proved for any number of
    batches.

    Raises ProgramError, ValueError.
    """
    schedule = args.schedule
    sizes = list(dict.fromkeys(args.batch_sizes.all_num_microbatches()))
    stream = schedule.stream()
    for size in sizes:
        for _ in range((schedule.settling_batches or 0) + 1):
            stream.start_batch(size)
    stream.drain()
    if args.eval_iters:
        stream.evaluation(sizes[-1])
    proved = [_prove_periodic(schedule, size) for size in dict.fromkeys((sizes[0], max(sizes)))]
    demand = most(demand for _, demand in proved)
    return proved[-1][0], demand.in_one_buffer if args.pipeline_2bw_single_gradient_buffer else demand


def _prove_periodic(schedule: PipelineSchedule, num_microbatches: int) -> tuple[CheckReport, Demand]:
    periodic = schedule.build_periodic(num_microbatches)
    program = periodic.unroll(1)
    report = check_periodic(periodic, **schedule.bounds(program.batches))
    return report, demand_of(program, report)
