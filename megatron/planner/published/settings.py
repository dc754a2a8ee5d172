"""The part `config` of an entry: how the run was parallelized, and what its software did."""

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from megatron.documents.faults import Boolean, Number, shown
from megatron.pipeline.program.lane_order import DEFERRED, DEVICE
from megatron.pipeline.schedules import PRESETS
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.refusals import FP8_RECIPES
from megatron.planner.job.sharding import Sharding
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.published.entry_model import Count

_PAPERS_WORDS = {"1f1b": "flush", "selective": "attention"}
_TECHNIQUES = frozenset({"eager", "compile", "fp8", "asynctp"})  # torchtitan's, joined by +
_AS_THEY_ARE = (  # what a configuration calls alike
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
        if not _TECHNIQUES.issuperset(words):
            raise ValueError(
                f"config.technique is {shown(self.technique)}, which is no technique that is known; give "
                f"{', '.join(sorted(_TECHNIQUES))}, joined by +, and name the schedule in config.schedule"
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
        """The configuration of a model of so many layers.

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
        """Raise ValueError for a setting that would change nothing, since the run lacks what it is about."""
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
        if not configuration.distributed_optimizer and configuration.sharding is None:  # as Megatron-LM refuses it
            yield "fp8_param_gather", "a whole optimizer on each replica (no zero1, no fsdp)"
        if not has_experts:
            yield from (
                (name, "no experts") for name in ("moe_flex_dispatcher_backend", "overlap_moe_expert_parallel_comm")
            )
