"""The part `config` of an entry: how the run was parallelized."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from megatron.documents.faults import Boolean, Number, shown
from megatron.pipeline.program.lane_order import DEFERRED, DEVICE
from megatron.pipeline.schedules import PRESETS, Schedule
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.refusals import FP8_RECIPES
from megatron.planner.job.software import FLEX
from megatron.planner.memory.activations import RecomputeScope
from megatron.planner.published.hardware import HardwareRecord
from megatron.planner.published.model_names import Count
from megatron.planner.published.sharded_settings import sharding_of, true_or_replicas

_WORDS = {  # Megatron-LM's, the papers' and torch's, in ours
    "full": "layer", "selective": "attention", "1f1b": "flush", "pipedream-flush": "flush", "pipedream-2bw": "2bw",
    "interleaved 1f1b": "interleaved", "interleaved-1f1b": "interleaved", "1f1b-interleaved": "interleaved",
    "float8": "fp8", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32",
}  # fmt: skip
_WHOLE_GRAPHS = ("full", "full_iteration")  # of --cuda-graph-scope
_PARTS_OF_GRAPHS = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
_IN_BFLOAT16 = (None, "bf16", "fp8")  # precisions with gradients in it
_AS_THEY_ARE = (  # what a configuration calls alike
    "provisional", "provisional_microbatches", "provisional_reduce", "resident_stages", "host_update", "stash",
    "gathers_fetch",
)  # fmt: skip
_COMPILED, _FP8, _ASYNC_TP = "compile", "fp8", "asynctp"
_SAYS_NOTHING = frozenset({"", "eager", _COMPILED, _FP8, _ASYNC_TP})  # techniques that are no schedule
_NO_MICROBATCH = "config.micro_batch is not given; give its sequences"


def _in_our_words(text: object) -> str:
    """The text in small letters, without a remark behind it, in brackets or after a comma."""
    if not isinstance(text, str):
        return text
    plain = text.partition("(")[0].partition(",")[0].strip().lower()
    return _WORDS.get(plain, plain)


def _known_recipe(value: object) -> object:
    """Transformer Engine's recipe for scales. Raises pydantic's error."""
    if value not in (None, *FP8_RECIPES):
        raise PydanticCustomError(
            "value_error_recipe",
            "products in FP8 are modelled with a scale for each tensor, and no other way but mxfp8's",
        )
    return value


def _known_scopes(value: object) -> object:
    """Megatron's words for what CUDA graphs are of, separated by commas. Raises pydantic's error."""
    words = value.split(",") if isinstance(value, str) else ()
    if any(word.strip() not in (*_WHOLE_GRAPHS, *_PARTS_OF_GRAPHS) for word in words):
        known = ", ".join((*_WHOLE_GRAPHS, *_PARTS_OF_GRAPHS))
        raise PydanticCustomError("value_error_scope", "graphs are of {known}", {"known": known})
    return value


class SettingsRecord(BaseModel):
    """The part `config` of an entry."""

    model_config = ConfigDict(frozen=True)

    zero: Annotated[int, Number, Field(ge=0, le=3)] = Field(
        default=0, validation_alias=AliasChoices("zero", "zero_stage", "zero_optimization_stage")
    )
    technique: Annotated[str | None, BeforeValidator(_in_our_words)] = None
    precision: Annotated[Literal["bf16", "fp16", "fp32", "fp8"] | None, BeforeValidator(_in_our_words)] = Field(
        default=None, validation_alias=AliasChoices("precision", "dtype")
    )
    t: Count = 1
    p: Count = 1
    d: Count | None = None
    v: Count = 1
    micro_batch: Annotated[int, Number] | None = None
    global_batch: Count | None = None
    recompute: Annotated[RecomputeScope | None, BeforeValidator(_in_our_words)] = None
    schedule: Annotated[str | None, BeforeValidator(_in_our_words)] = None
    sequence_parallel: Boolean = False
    zero1: Boolean = False
    provisional: str = "off"
    provisional_microbatches: Count | None = None
    provisional_reduce: Boolean = False
    resident_stages: Count = 2
    host_update: str = DEFERRED
    stash: str = DEVICE
    gathers_fetch: Boolean = False
    framework: str | None = None
    flash_attention: Boolean | None = None
    overlap_grad_reduce: Boolean | None = None
    overlap_param_gather: Boolean | None = None
    tp_comm_overlap: Boolean | None = None
    grad_reduce_in_bf16: Boolean = False
    bf16_optimizer: Boolean | None = None
    cuda_launch_blocking: Boolean | None = None
    cp: Count = Field(default=1, validation_alias=AliasChoices("cp", "context_parallel", "context_parallel_size"))
    cp_comm_type: Literal["p2p", "all_gather"] | None = None
    ep: Count = Field(
        default=1,
        validation_alias=AliasChoices("ep", "expert_parallel", "expert_parallel_size", "expert_model_parallel_size"),
    )
    etp: Count | None = Field(default=None, validation_alias=AliasChoices("etp", "expert_tensor_parallel_size"))
    fsdp: Annotated[bool | int | None, BeforeValidator(true_or_replicas)] = Field(
        default=None, validation_alias=AliasChoices("fsdp", "data_parallel_shard_degree")
    )
    reshard_after_forward: Boolean | None = None
    account_for_embedding_in_pipeline_split: Boolean = False
    account_for_loss_in_pipeline_split: Boolean = False
    fp8_recipe: Annotated[str | None, BeforeValidator(_known_recipe)] = None
    fp8_param_gather: Boolean | None = None
    moe_token_dispatcher_type: Literal["alltoall", "flex"] | None = None
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] | None = None
    overlap_moe_expert_parallel_comm: Boolean | None = None
    cuda_graph_scope: Annotated[str | None, BeforeValidator(_known_scopes)] = None

    @property
    def is_compiled(self) -> bool:
        """By torch.compile."""
        return _COMPILED in self._techniques

    @property
    def is_fp8(self) -> bool:
        """Linears multiply in FP8, as the precision or a technique says."""
        return self.precision == _FP8 or _FP8 in self._techniques

    @property
    def overlaps_in_pieces(self) -> bool | None:
        """Whether tensor ranks send while they multiply, as Megatron's flag or torchtitan's asynchronous tensor
        parallelism; None: it is not said."""
        return True if _ASYNC_TP in self._techniques else self.tp_comm_overlap

    @property
    def _techniques(self) -> list[str]:
        return (self.technique or "").split("+")

    @property
    def dispatcher(self) -> str | None:
        """How copies of tokens get to experts; None: it is not said."""
        return FLEX if self.moe_flex_dispatcher_backend else self.moe_token_dispatcher_type

    @property
    def records_layers(self) -> bool:
        """CUDA graphs of whole layers, or iterations; those of parts leave most kernels to the host: not counted."""
        return self.cuda_graph_scope in _WHOLE_GRAPHS

    def refuse_idle(self, configuration: Configuration, *, has_experts: bool) -> None:
        """Raises ValueError for a setting of something that the run has not, which would change nothing.

        Megatron-LM takes weights in FP8 alone only where the optimizer is split.
        """
        if self.moe_token_dispatcher_type not in (None, self.dispatcher):
            raise ValueError(
                f"config.moe_token_dispatcher_type is {shown(self.moe_token_dispatcher_type)}, which has no "
                "moe_flex_dispatcher_backend; leave one out"
            )
        splits_optimizer = configuration.distributed_optimizer or configuration.sharding is not None
        is_whole = configuration.tensor > 1 and not configuration.sequence_parallel
        if self.tp_comm_overlap is False and self.overlaps_in_pieces:
            raise ValueError("config.tp_comm_overlap is False, and config.technique has asyncTP; correct one of them")
        if self.overlaps_in_pieces and is_whole:
            name = "tp_comm_overlap" if self.tp_comm_overlap else "technique"
            raise ValueError(
                f"config.{name} asks for products in pieces, and tensor ranks have whole sequences; give "
                "config.sequence_parallel as true, or leave it out"
            )
        for name, reads, what in (
            ("grad_reduce_in_bf16", self.precision in _IN_BFLOAT16, f"precision {self.precision}"),
            ("fp8_recipe", self.is_fp8, "another precision than fp8"),
            ("fp8_param_gather", self.is_fp8, "another precision than fp8"),
            ("fp8_param_gather", splits_optimizer, "a whole optimizer on each replica (no zero1, no fsdp)"),
            ("moe_flex_dispatcher_backend", has_experts, "no experts"),
            ("moe_token_dispatcher_type", has_experts or self.dispatcher != FLEX, "no experts"),
            ("overlap_moe_expert_parallel_comm", has_experts, "no experts"),
        ):
            if getattr(self, name) and not reads:
                raise ValueError(f"config.{name} is {shown(getattr(self, name))} with {what}; leave it out")

    def layers_of_stages(self, num_layers: int) -> tuple[int, ...] | None:
        """How many layers each stage has, where embedding and loss count as one; None: equally many. Raises ValueError
        where these do not divide."""
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

    def configuration(self, hardware: HardwareRecord, assume: Callable[[str], None]) -> Configuration:
        """The configuration. `assume` is told what is filled in. Raises ValueError where too little is said."""
        data = self._data(hardware.gpus, assume)
        schedule = self._schedule(assume)
        if self.recompute is None:
            assume("recompute none")
        moves = schedule in PRESETS and PRESETS[schedule].balance
        micro_batch, batch = self._batch(data, assume)
        sharding = sharding_of(fsdp=self.fsdp, zero=self.zero, reshards=self.reshard_after_forward, data=data)
        configuration = Configuration(
            tensor=self.t,
            pipeline=self.p,
            data=data,
            virtual=self.v,
            micro_batch_size=1 if micro_batch is None else micro_batch,
            global_batch_size=batch,
            recompute=self.recompute or RecomputeScope.NONE,
            schedule=schedule,
            sequence_parallel=self.sequence_parallel and self.t > 1,
            distributed_optimizer=self.zero1 or self.zero == 1,
            rank_mapping="pair-adjacent" if moves else "standard",
            context=self.cp,
            expert=self.ep,
            expert_tensor=self.etp,
            sharding=sharding,
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
        )
        return configuration if micro_batch is not None else _with_only_microbatch(configuration, assume)

    def _batch(self, data: int, assume: Callable[[str], None]) -> tuple[int | None, int]:
        """Sequences of a microbatch, if that is said, and of a batch."""
        if self.global_batch is not None:
            return self.micro_batch, self.global_batch
        if self.micro_batch is None:
            raise ValueError(_NO_MICROBATCH)
        batch = self.p * self.micro_batch * data  # the smallest that 2bw takes
        assume(f"global batch {batch}, as many microbatches as stages")
        return self.micro_batch, batch

    def _schedule(self, assume: Callable[[str], None]) -> str:
        """The schedule in our words. Several stages on a rank make 1F1B interleaved."""
        said = self.schedule
        words = [word for word in self._techniques if word not in _SAYS_NOTHING]
        technique = "+".join(words)
        if technique not in ("", said):
            if said is not None or technique not in PRESETS:
                raise ValueError(
                    f"config.technique is {shown(technique)}, which is no technique that is known; leave it out, "
                    "and name the schedule in config.schedule"
                )
            said = technique
        if said is None and self.p > 1:
            assume("schedule 1f1b")
        schedule = said or "flush"
        if schedule == "interleaved" and "v" not in self.model_fields_set:
            raise ValueError("config.v is not given, and the schedule is interleaved; give the stages on each rank")
        return "interleaved" if schedule == "flush" and self.v > 1 else schedule

    def _data(self, gpus: int | str | None, assume: Callable[[str], None]) -> int:
        group, count = self.t * self.p * self.cp, gpus if isinstance(gpus, int) else None
        degrees = f"t={self.t} and p={self.p}" if self.cp == 1 else f"t={self.t}, p={self.p} and cp={self.cp}"
        if self.d is None:
            if count is None and type(self.fsdp) is int and self.fsdp > 1:
                assume(f"{self.fsdp} replicas, as many as shards")
                return self.fsdp
            if count is None:
                raise ValueError("config.d is not given; give it, or hardware.gpus")
            if count < 1 or count % group:
                raise ValueError(f"{count} GPUs do not divide by {degrees}; correct one of them")
            return count // group
        taken = group * self.d
        if count is not None and count != taken:
            missing = [name for name in ("t", "p") if name not in self.model_fields_set]
            if missing or count < taken:
                raise ValueError(
                    f"{degrees.replace(' and', ',')} and d={self.d} take {taken} GPUs, and hardware.gpus is "
                    f"{count}; {'give config.' + missing[0] if missing else 'correct one of them'}"
                )
            assume(f"{taken} of the {count} GPUs")
        return self.d


def _with_only_microbatch(configuration: Configuration, assume: Callable[[str], None]) -> Configuration:
    """The configuration with the one microbatch that its batch and its schedule leave. Raises ValueError where they
    leave several, or none."""
    share, rest = divmod(configuration.global_batch_size, configuration.data)
    schedule = configuration.pipeline_schedule(tied_embeddings=False)
    sizes = [size for size in range(1, share + 1) if not rest and share % size == 0 and _takes(schedule, share // size)]
    if len(sizes) != 1:
        raise ValueError(_NO_MICROBATCH)
    assume(f"microbatch {sizes[0]}, the only one of a batch of {share} a replica under {configuration.schedule}")
    return replace(configuration, micro_batch_size=sizes[0])


def _takes(schedule: Schedule, num_microbatches: int) -> bool:
    try:
        schedule.validate(num_microbatches)
    except ValueError:
        return False
    return True
