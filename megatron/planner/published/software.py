"""The training software of a published run, with the defaults of that software."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from megatron.documents.faults import shown
from megatron.pipeline.schedules import PRESETS
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.devices import DEVICES
from megatron.planner.job.refusals import refuse_recipe
from megatron.planner.job.sharding import DEEPSPEED
from megatron.planner.job.software import (
    BIGSCIENCE,
    FLEX,
    MEGATRON_2020,
    MEGATRON_2021,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    MEGATRON_V3,
    PIPEDREAM_2BW,
    TORCHTITAN,
    TORCHTITAN_2025,
    Software,
)
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.published.settings import SettingsRecord

_MT_NLG = replace(MEGATRON_DEEPSPEED, gradient_bytes=4)  # Smith et al. 2022, in bfloat16
_NAMED = {  # what a framework, a software or a source names, in small letters
    r"torchtitan.*\b20(2[5-9]|[3-9]\d)": TORCHTITAN_2025,
    r"torchtitan": TORCHTITAN,
    r"bigscience": BIGSCIENCE,
    r"megatron-deepspeed|vtrain": MEGATRON_DEEPSPEED,
    r"mt-nlg|smith et al": _MT_NLG,
    r"pipedream-2bw": PIPEDREAM_2BW,
    r"megatron-lm v3|korthikanti|bpipe": MEGATRON_V3,
    r"narayanan": MEGATRON_2021,
    r"megatron-lm 2020": MEGATRON_2020,
    r"megatron[-.]core": MEGATRON_CORE,
}
_TECHNIQUES: tuple[tuple[str, Callable[[SettingsRecord, bool], object], str], ...] = (
    # what a framework's or a software's text names, in small letters; whether the entry gives it; what to give
    (r"fsdp|hsdp|fully.sharded|zero.?[23]", lambda config, _: config.fsdp or config.zero > 1,
     "give config.fsdp as true or a number of replicas, or config.zero as 0 to 3"),
    (r"fp4|float4|int8|quanti[sz]ed", lambda config, _: False, "give a run in bf16, fp16, fp32 or fp8"),
    (r"fp8|float8", lambda config, _: config.is_fp8, "give config.precision fp8, or a run in 16 bits"),
    (r"\bmoe\b|mixtral|mixture.of.experts", lambda _, has_experts: has_experts,
     "give model.num_experts and model.moe_router_topk, and config.ep"),
    (r"context.parallel|ring.attention|ulysses", lambda config, _: "cp" in config.model_fields_set,
     "give config.cp, and config.cp_comm_type where it is not a ring"),
    (r"offload|zero.infinity", lambda config, _: False, "give a run without, or schedule l2l"),
    (r"userbuffer", lambda config, _: config.tp_comm_overlap is not None,
     "give config.tp_comm_overlap as true or false"),
    (r"cuda.?graph", lambda config, _: config.cuda_graph_scope, "give config.cuda_graph_scope, or a run without"),
    (r"\bq?lora\b", lambda config, _: False, "give a run that trains all weights"),
)  # fmt: skip


def software_of(
    config: SettingsRecord, named: tuple[str | None, ...], gpu: str, configuration: Configuration, *,
    has_experts: bool, assume: Callable[[str], None],
) -> tuple[Software, Configuration]:  # fmt: skip
    """The software of a run, and the configuration of the run with the defaults of the software.

    Args:
        named: texts; the first one that names a software counts, and the last one is the source.
        assume: is called with the words for a value that is filled in.

    Raises:
        ValueError: the software, the GPU or the run does not have a setting.
    """
    _refuse_techniques(config, named[:-1], has_experts=has_experts)
    base = _named(named, gpu, assume)
    is_torchtitan, is_core = base in (TORCHTITAN, TORCHTITAN_2025), base is MEGATRON_CORE
    if is_torchtitan:
        configuration = _as_torchtitan(configuration, config, assume)
    config.refuse_idle(configuration, has_experts=has_experts)
    software, said = base, _said(config)
    if is_core:  # its flags leave overlaps off, and NVIDIA's published command lines switch both on
        has_kernels = gpu in DEVICES and DEVICES[gpu].has_bfloat16  # of flash attention
        software = replace(software, overlaps_gradients=True, overlaps_weights=True, flash_attention=has_kernels)
    elif not is_torchtitan and configuration.sharding is not None:
        software = replace(software, sharding=DEEPSPEED)
    if config.precision == "fp32":
        if config.flash_attention:
            raise ValueError(
                "config.flash_attention is True in fp32, and its kernels take 16-bit numbers only; leave it out"
            )
        software = replace(software, element_bytes=4, gradient_bytes=4, fuses_softmax=False, flash_attention=False)
    elif config.precision == "bf16":  # Megatron-LM and DeepSpeed add its gradients up in FP32
        software = replace(software, gradient_bytes=4)
    if config.is_fp8:
        refuse_recipe(config.fp8_recipe, gpu)
        if not (is_core or is_torchtitan):
            raise ValueError(
                "config.precision is 'fp8', and the software of this run multiplies in 16 bits; give bf16, or "
                "Megatron-Core as config.framework"
            )
        software = replace(software, fp8=True)
    software = replace(software, **said)
    if "compile" in config.techniques:
        if not is_torchtitan:
            raise ValueError(
                f"config.technique is {shown(config.technique)}, and such software has fused kernels without it; leave "
                "compile out, or name torchtitan in config.framework"
            )
        software = replace(software, fuses_elementwise=True, fuses_loss=software.compiles_loss)
    if is_core:
        for text in _defaults_of_core(software, configuration, gpu, said):
            assume(text)
    return software, configuration


def _refuse_techniques(config: SettingsRecord, texts: tuple[str | None, ...], *, has_experts: bool) -> None:
    """Raise ValueError if a text names a technique that the entry does not give, and that would not be priced."""
    for text in filter(None, texts):
        for name, is_given, remedy in _TECHNIQUES:
            if re.search(name, text.lower()) and not is_given(config, has_experts):
                raise ValueError(
                    f"the run's software is {shown(text)}, and the entry leaves that technique out; {remedy}"
                )


def _named(texts: tuple[str | None, ...], gpu: str, assume: Callable[[str], None]) -> Software:
    for text in filter(None, texts):
        found = next((software for name, software in _NAMED.items() if re.search(name, text.lower())), None)
        if found is MEGATRON_DEEPSPEED and "bigscience" in (texts[-1] or "").lower():
            return BIGSCIENCE
        if found is not None:
            return found
    if gpu in DEVICES and DEVICES[gpu].peak_teraflops_fp8:  # they came after Megatron-LM v3
        assume("the software of megatron-core")
        return MEGATRON_CORE
    assume("the software of Megatron-LM v3")
    return MEGATRON_V3


def _as_torchtitan(
    configuration: Configuration, config: SettingsRecord, assume: Callable[[str], None]
) -> Configuration:
    """The configuration with sequences split over tensor ranks, and selective recomputation unless given."""
    if configuration.tensor > 1 and not configuration.sequence_parallel:
        assume("sequence parallelism, as torchtitan has it beside tensor parallelism")
        configuration = replace(configuration, sequence_parallel=True)
    if config.recompute is None:
        assume("selective recomputation in its place, as torchtitan has by default")
        configuration = replace(configuration, recompute=RecomputeScope.ATTENTION)
    return configuration


def _said(config: SettingsRecord) -> dict[str, bool | int | str]:
    """The fields of the software that the entry gives."""
    said = {
        "dispatcher": FLEX if config.moe_flex_dispatcher_backend else None,
        "overlaps_experts": config.overlap_moe_expert_parallel_comm,
        "cuda_graphs": True if config.cuda_graph_scope else None,
        "fp8_weights": True if config.fp8_param_gather else None,
        "flash_attention": config.flash_attention,
        "overlaps_gradients": config.overlap_grad_reduce,
        "overlaps_weights": config.overlap_param_gather,
        "overlaps_in_pieces": config.overlaps_in_pieces,
        "gradient_bytes": 2 if config.grad_reduce_in_bf16 else None,
        "gathers_keys": True if config.cp_comm_type == "all_gather" else None,
    }
    return {name: value for name, value in said.items() if value is not None}


def _defaults_of_core(software: Software, configuration: Configuration, gpu: str, said: dict) -> Iterator[str]:
    """The priced defaults of Megatron-Core that the entry does not give, in words."""
    shares = configuration.sharding is None and configuration.replicas > 1 and not configuration.is_hosted
    overlaps = shares and PRESETS[configuration.schedule].policy.drains
    gathers = configuration.distributed_optimizer and not configuration.predicts
    if overlaps and software.overlaps_gradients and "overlaps_gradients" not in said:
        yield "reductions over replicas beside the last backward, as Megatron-Core's runs"
    if overlaps and gathers and software.overlaps_weights and "overlaps_weights" not in said:
        yield "gathers over replicas beside the first forward, as Megatron-Core's runs"
    if software.flash_attention and "flash_attention" not in said:
        yield f"flash attention, as Megatron-Core has on {gpu}"
