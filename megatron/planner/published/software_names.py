"""Which training software a published run had."""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace

from megatron.pipeline.schedules import PRESETS
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.devices import DEVICES
from megatron.planner.job.sharding import DEEPSPEED
from megatron.planner.job.software import (
    BIGSCIENCE,
    MEGATRON_2020,
    MEGATRON_2021,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    MEGATRON_V3,
    PIPEDREAM_2BW,
    TORCHTITAN,
    Software,
)
from megatron.planner.published.software_defaults import of_its_year


def in_bfloat16(software: Software) -> Software:
    """The same in bfloat16, which Megatron-LM and DeepSpeed train with gradients that are added up in FP32."""
    return replace(software, gradient_bytes=4) if software.gradient_bytes < _FP32 else software


_FP32 = 4
_NAMES = {  # what a field or the source names
    "torchtitan": TORCHTITAN,
    "megatron-deepspeed": MEGATRON_DEEPSPEED,
    "vtrain": MEGATRON_DEEPSPEED,
    "mt-nlg": in_bfloat16(MEGATRON_DEEPSPEED),  # Smith et al. 2022
    "smith et al": in_bfloat16(MEGATRON_DEEPSPEED),
    "pipedream-2bw": PIPEDREAM_2BW,
    "megatron-lm v3": MEGATRON_V3,
    "korthikanti": MEGATRON_V3,
    "bpipe": MEGATRON_V3,
    "narayanan": MEGATRON_2021,
    "megatron-lm 2020": MEGATRON_2020,
    "megatron-core": MEGATRON_CORE,
    "megatron.core": MEGATRON_CORE,
}

_AS_RUN_BY = {"bigscience": {MEGATRON_DEEPSPEED: BIGSCIENCE}}
"""Whose jobs ran a software otherwise than others', by what the source names."""

SIXTEEN_BITS_ONLY = (MEGATRON_V3, MEGATRON_2021, MEGATRON_2020, MEGATRON_DEEPSPEED, BIGSCIENCE, PIPEDREAM_2BW)
"""Software from before GPUs multiplied in FP8."""


def named_software(texts: Iterable[str | None], gpu: str, assume: Callable[[str], None]) -> Software:
    """What the first text names that names any; else what runs on such a GPU. `assume` is told what is filled in."""
    given = [text for text in texts if text]
    for text in given:
        for name, software in _NAMES.items():
            if name in text.lower():
                return _as_run(_with_defaults(of_its_year(software, text), gpu), given)
    if gpu in DEVICES and DEVICES[gpu].peak_teraflops_fp8:  # they came after Megatron-LM v3
        assume("the software of megatron-core")
        return _with_defaults(MEGATRON_CORE, gpu)
    assume("the software of Megatron-LM v3")
    return MEGATRON_V3


def _as_run(software: Software, texts: Iterable[str]) -> Software:
    """The same as those ran it whom a text names."""
    changes = (each for name, each in _AS_RUN_BY.items() if any(name in text.lower() for text in texts))
    return next((each[software] for each in changes if software in each), software)


def sharded_software(software: Software) -> Software:
    """The same where it splits weights over replicas: what is older than Megatron-Core does it with DeepSpeed."""
    is_older = replace(software, gradient_bytes=2) in SIXTEEN_BITS_ONLY  # or the same in bfloat16
    return replace(software, sharding=DEEPSPEED) if is_older else software


def say_defaults(software: Software, configuration: Configuration, gpu: str, given: Container[str]) -> Iterator[str]:
    """What of Megatron-Core's defaults is priced, in words.

    Args:
        software: of the run, with all that it says; it began as `named_software` of Megatron-Core.
        given: fields of `software` that the run says itself.
    """
    shares = configuration.sharding is None and configuration.replicas > 1 and not configuration.is_hosted
    overlaps = shares and PRESETS[configuration.schedule].policy.drains
    gathers = configuration.distributed_optimizer and not configuration.predicts
    if overlaps and software.overlaps_gradients and "overlaps_gradients" not in given:
        yield "reductions over replicas beside the last backward, as Megatron-Core's runs"
    if overlaps and gathers and software.overlaps_weights and "overlaps_weights" not in given:
        yield "gathers over replicas beside the first forward, as Megatron-Core's runs"
    if software.flash_attention and "flash_attention" not in given:
        yield f"flash attention, as Megatron-Core has on {gpu}"


def _with_defaults(software: Software, gpu: str) -> Software:
    """What runs of Megatron-Core have unless told otherwise.

    Its layers are Transformer Engine's, and their attention is flash attention where its kernels run: on GPUs with
    units for bfloat16, which came with them. Its flags leave overlaps with replicas off, and NVIDIA's published command
    lines switch both on (--overlap-grad-reduce, --overlap-param-gather). `say_defaults` says what of it is priced.
    """
    if software is not MEGATRON_CORE:
        return software
    software = replace(software, overlaps_gradients=True, overlaps_weights=True)
    if gpu not in DEVICES or not DEVICES[gpu].has_bfloat16:
        return software
    return replace(software, flash_attention=True)
