"""The part `config` of an entry: how a run was parallelized, and its training software with its defaults."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from megatron.documents.faults import Boolean, Number, shown
from megatron.pipeline.program.lane_order import DEFERRED, DEVICE
from megatron.pipeline.schedules import PRESETS
from megatron.planner.job.configuration import Configuration, Sharding
from megatron.planner.job.devices import DEVICES
from megatron.planner.job.refusals import FP8_RECIPES, refuse_recipe
from megatron.planner.job.software import (
    BIGSCIENCE,
    DEEPSPEED,
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
from megatron.planner.published.entry_parts import Count

_PAPERS_WORDS = {"1f1b": "flush", "selective": "attention"}
_WORDS_OF_TORCHTITAN = frozenset({"eager", "compile", "fp8", "asynctp"})  # torchtitan's, joined by +
_AS_THEY_ARE = (  # fields with the same names in `Configuration`
    "provisional", "provisional_microbatches", "provisional_reduce", "resident_stages", "host_update", "stash",
    "gathers_fetch",
)  # fmt: skip


def _in_our_words(text: object) -> object:
    """The name that this project uses: in small letters, without a remark in brackets."""
    if not isinstance(text, str):
        return text
    plain = text.partition("(")[0].strip().lower()
    return _PAPERS_WORDS.get(plain, plain)


def _true_or_replicas(value: object) -> object:
    if isinstance(value, bool) or (type(value) is int and value >= 1):
        return value
    raise PydanticCustomError("int_type", "true or a number of replicas is wanted")


class SettingsRecord(BaseModel):
    """The part `config` of an entry."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    t: Count = 1
    p: Count = 1
    d: Count | None = None
    v: Count = 1
    cp: Count = 1
    ep: Count = 1
    etp: Count | None = None
    micro_batch: Annotated[int, Number] | None = None
    global_batch: Count | None = None
    recompute: Annotated[RecomputeScope | None, BeforeValidator(_in_our_words)] = None
    schedule: Annotated[str | None, BeforeValidator(_in_our_words)] = None
    sequence_parallel: Boolean = False
    zero1: Boolean = False
    zero: Annotated[int, Number, Field(ge=0, le=3)] = 0
    fsdp: Annotated[bool | int | None, BeforeValidator(_true_or_replicas)] = None
    account_for_embedding_in_pipeline_split: Boolean = False
    account_for_loss_in_pipeline_split: Boolean = False
    provisional: str = "off"
    provisional_microbatches: Count | None = None
    provisional_reduce: Boolean = False
    resident_stages: Count = 2
    host_update: str = DEFERRED
    stash: str = DEVICE
    gathers_fetch: Boolean = False
    framework: str | None = None
    technique: str = ""
    precision: Literal["bf16", "fp16", "fp32", "fp8"] | None = None
    flash_attention: Boolean | None = None
    overlap_grad_reduce: Boolean | None = None
    overlap_param_gather: Boolean | None = None
    tp_comm_overlap: Boolean | None = None
    grad_reduce_in_bf16: Boolean = False
    cp_comm_type: Literal["p2p", "all_gather"] | None = None
    fp8_recipe: Literal[FP8_RECIPES] | None = None
    fp8_param_gather: Boolean = False
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] | None = None
    overlap_moe_expert_parallel_comm: Boolean | None = None
    cuda_graph_scope: Literal["full", "full_iteration"] | None = None

    @property
    def techniques(self) -> list[str]:
        """The techniques of torchtitan. Raises ValueError for another word."""
        words = [word.strip().lower() for word in self.technique.split("+") if word]
        if not _WORDS_OF_TORCHTITAN.issuperset(words):
            raise ValueError(
                f"config.technique is {shown(self.technique)}, which is no technique that is known; give "
                f"{', '.join(sorted(_WORDS_OF_TORCHTITAN))}, joined by +, and name the schedule in config.schedule"
            )
        return words

    @property
    def is_fp8(self) -> bool:
        """Whether linears multiply in FP8: the precision or a technique says so."""
        return self.precision == "fp8" or "fp8" in self.techniques

    @property
    def overlaps_in_pieces(self) -> bool | None:
        """Whether tensor ranks send while they multiply; None: not given."""
        return True if "asynctp" in self.techniques else self.tp_comm_overlap

    def configuration(self, gpus: int | None, num_layers: int, assume: Callable[[str], None]) -> Configuration:
        """The configuration of a model with `num_layers` layers.

        Args:
            gpus: the number of GPUs of the run; None: not given.
            assume: is called with the words for a value that is filled in.

        Raises:
            ValueError: a value is missing, or two values contradict each other.
        """
        data = self._data(gpus)
        schedule = self._schedule(assume)
        if self.recompute is None:
            assume("recompute none")
        if self.micro_batch is None:
            raise ValueError("config.micro_batch is not given; give its sequences")
        batch = self.global_batch
        if batch is None:
            batch = self.p * self.micro_batch * data  # the smallest that 2bw takes
            assume(f"global batch {batch}, as many microbatches as stages")
        return Configuration(
            tensor=self.t,
            pipeline=self.p,
            data=data,
            virtual=self.v,
            context=self.cp,
            expert=self.ep,
            expert_tensor=self.etp,
            micro_batch_size=self.micro_batch,
            global_batch_size=batch,
            recompute=self.recompute or RecomputeScope.NONE,
            schedule=schedule,
            sequence_parallel=self.sequence_parallel and self.t > 1,
            distributed_optimizer=self.zero1 or self.zero == 1,
            rank_mapping="pair-adjacent" if schedule in PRESETS and PRESETS[schedule].balance else "standard",
            sharding=self._sharding(data),
            layers=self._layers(num_layers),
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
        )

    def _data(self, gpus: int | None) -> int:
        group = self.t * self.p * self.cp
        degrees = f"t={self.t}, p={self.p} and cp={self.cp}" if self.cp > 1 else f"t={self.t} and p={self.p}"
        if self.d is None:
            if gpus is None:
                raise ValueError("config.d is not given; give it, or hardware.gpus")
            if gpus % group:
                raise ValueError(f"{gpus} GPUs do not divide by {degrees}; correct one of them")
            return gpus // group
        if gpus not in (None, group * self.d):
            raise ValueError(
                f"{degrees.replace(' and', ',')} and d={self.d} take {group * self.d} GPUs, and hardware.gpus is "
                f"{gpus}; correct one of them"
            )
        return self.d

    def _schedule(self, assume: Callable[[str], None]) -> str:
        """The name of the preset. 1F1B with several stages on a rank is interleaved."""
        if self.schedule is None and self.p > 1:
            assume("schedule 1f1b")
        schedule = self.schedule or "flush"
        if schedule == "interleaved" and "v" not in self.model_fields_set:
            raise ValueError("config.v is not given, and the schedule is interleaved; give the stages on each rank")
        return "interleaved" if schedule == "flush" and self.v > 1 else schedule

    def _sharding(self, data: int) -> Sharding | None:
        """The split of weights over replicas, in the words of torchtitan (`fsdp`: true, or the number of shards) or of
        DeepSpeed (`zero`: the stage); None: weights are whole."""
        is_on = self.fsdp is True or (self.fsdp or 0) > 1
        if not is_on and self.zero < 2:
            return None
        shards = self.fsdp if is_on and self.fsdp is not True else data
        return Sharding(stage=2 if self.zero == 2 else 3, shards=shards)

    def _layers(self, num_layers: int) -> tuple[int, ...] | None:
        """The number of layers of each stage, if embedding and loss count as a layer; None: equal numbers."""
        ends = self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
        if not any(ends):
            return None
        stages = self.p * self.v
        count, rest = divmod(num_layers + sum(ends), stages)
        if rest or stages < 2:
            raise ValueError(
                f"{num_layers} layers and {sum(ends)} for embedding and loss do not divide into {stages} stages; "
                "correct config.p, config.v or config.account_for_embedding_in_pipeline_split"
            )
        return (count - ends[0], *[count] * (stages - 2), count - ends[1])

    def refuse_idle(self, configuration: Configuration, *, has_experts: bool) -> None:
        """Raise ValueError for a setting without effect, since the run lacks the feature that it sets."""
        if self.tp_comm_overlap is False and self.overlaps_in_pieces:
            raise ValueError("config.tp_comm_overlap is False, and config.technique has asyncTP; correct one of them")
        for name, what in self._idle(configuration, has_experts):
            if getattr(self, name):
                raise ValueError(f"config.{name} is {shown(getattr(self, name))} with {what}; leave it out")

    def _idle(self, configuration: Configuration, has_experts: bool) -> Iterator[tuple[str, str]]:
        """Yield the names of settings without effect, each with the reason."""
        if configuration.tensor > 1 and not configuration.sequence_parallel and self.overlaps_in_pieces:
            yield "tp_comm_overlap" if self.tp_comm_overlap else "technique", "whole sequences on tensor ranks"
        if self.precision in ("fp16", "fp32"):
            yield "grad_reduce_in_bf16", f"precision {self.precision}"
        if not self.is_fp8:
            yield from ((name, "another precision than fp8") for name in ("fp8_recipe", "fp8_param_gather"))
        if not configuration.distributed_optimizer and configuration.sharding is None:  # Megatron-LM refuses it, too
            yield "fp8_param_gather", "a whole optimizer on each replica (no zero1, no fsdp)"
        if not has_experts:
            yield from (
                (name, "no experts") for name in ("moe_flex_dispatcher_backend", "overlap_moe_expert_parallel_comm")
            )


_MT_NLG = replace(MEGATRON_DEEPSPEED, gradient_bytes=4)  # Smith et al. 2022, in bfloat16
_NAMED = {  # pattern in the lower-case name of a framework, a software or a source -> software
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
    # pattern in the lower-case text of a framework or a software; whether the entry gives the technique; the remedy
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
    if overlaps and software.overlaps_gradients and "overlaps_gradients" not in said:
        yield "reductions over replicas beside the last backward, as Megatron-Core's runs"
    if overlaps and configuration.gathers_in_step and software.overlaps_weights and "overlaps_weights" not in said:
        yield "gathers over replicas beside the first forward, as Megatron-Core's runs"
    if software.flash_attention and "flash_attention" not in said:
        yield f"flash attention, as Megatron-Core has on {gpu}"
