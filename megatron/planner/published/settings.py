"""The part `config` of an entry: how the run was parallelized, and what about it is not modelled."""

from collections.abc import Callable, Container
from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from megatron.pipeline.program.lane_order import DEFERRED, DEVICE
from megatron.pipeline.schedules import PRESETS
from megatron.planner.job.configuration import Configuration
from megatron.planner.memory.activations import RecomputeScope
from megatron.planner.published.hardware import HardwareRecord
from megatron.planner.published.model_names import EXPERTS, Count

_WORDS = {  # Megatron-LM's, the papers' and torch's, in ours
    "full": "layer", "selective": "attention", "1f1b": "flush", "pipedream-flush": "flush", "pipedream-2bw": "2bw",
    "interleaved 1f1b": "interleaved", "interleaved-1f1b": "interleaved", "1f1b-interleaved": "interleaved",
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32",
}  # fmt: skip
_TECHNIQUES = {
    "fp8": "products in FP8", "compile": "compiled models", "asynctp": "tensor-parallel collectives in pieces",
}  # fmt: skip
_SHARDED = "weights are split over replicas (fully sharded, ZeRO-3), which is not modelled"
_CONTEXT = "sequences are split over context parallel ranks, which is not modelled"
_AS_THEY_ARE = (  # what a configuration calls alike
    "provisional", "provisional_microbatches", "provisional_reduce", "resident_stages", "host_update", "stash",
    "gathers_fetch",
)  # fmt: skip


def _only(modelled: Container[int], refusal: str) -> AfterValidator:
    def check(value: int) -> int:
        if value not in modelled:
            raise ValueError(refusal.format(value))
        return value

    return AfterValidator(check)


def _in_our_words(text: object) -> str:
    """The text in small letters, without a remark behind it, in brackets or after a comma."""
    plain = str(text).partition("(")[0].partition(",")[0].strip().lower()
    return _WORDS.get(plain, plain)


def _check_technique(text: str) -> str:
    for word, what in _TECHNIQUES.items():
        if word in text.lower():
            raise ValueError(f"config says {word}, and {what} are not modelled")
    return text


class SettingsRecord(BaseModel):
    """The part `config` of an entry. A validator that raises says what is not modelled."""

    model_config = ConfigDict(frozen=True)

    fsdp: Annotated[int, _only((1,), _SHARDED)] = 1
    zero: Annotated[int, _only((0, 1, 3), "config.zero is {}, which is not modelled (0 and 1 are)"),
                    _only((0, 1), _SHARDED)] = 0  # fmt: skip
    cp: Annotated[int, _only((1,), _CONTEXT)] = 1
    ep: Annotated[int, _only((1,), EXPERTS)] = 1
    technique: Annotated[str, AfterValidator(_check_technique)] = ""
    precision: Annotated[Literal["bf16", "fp16", "fp32"] | None, BeforeValidator(_in_our_words)] = Field(
        default=None, validation_alias=AliasChoices("precision", "dtype")
    )
    t: Count = 1
    p: Count = 1
    d: Count | None = None
    v: Count = 1
    micro_batch: int | None = None
    global_batch: Count | None = None
    recompute: Annotated[RecomputeScope | None, BeforeValidator(_in_our_words)] = None
    schedule: Annotated[str | None, BeforeValidator(_in_our_words)] = None
    sequence_parallel: bool = False
    zero1: bool = False
    provisional: str = "off"
    provisional_microbatches: Count | None = None
    provisional_reduce: bool = False
    resident_stages: Count = 2
    host_update: str = DEFERRED
    stash: str = DEVICE
    gathers_fetch: bool = False
    framework: str | None = None
    flash_attention: bool | None = None

    def configuration(self, hardware: HardwareRecord, assume: Callable[[str], None]) -> Configuration:
        """The configuration. `assume` is told what is filled in. Raises ValueError where too little is said."""
        if self.micro_batch is None:
            raise ValueError("config.micro_batch is not given")
        data = self._data(hardware.gpus, assume)
        schedule = self._schedule(assume)
        batch = self.global_batch
        if batch is None:
            batch = self.p * self.micro_batch * data  # the smallest that 2bw takes
            assume(f"global batch {batch}, as many microbatches as stages")
        if self.recompute is None:
            assume("recompute none")
        moves = schedule in PRESETS and PRESETS[schedule].balance
        return Configuration(
            tensor=self.t,
            pipeline=self.p,
            data=data,
            virtual=self.v,
            micro_batch_size=self.micro_batch,
            global_batch_size=batch,
            recompute=self.recompute or RecomputeScope.NONE,
            schedule=schedule,
            sequence_parallel=self.sequence_parallel and self.t > 1,
            distributed_optimizer=self.zero1 or self.zero == 1,
            rank_mapping="pair-adjacent" if moves else "standard",
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
        )

    def _schedule(self, assume: Callable[[str], None]) -> str:
        """The schedule in our words. Several stages on a rank make 1F1B interleaved."""
        if self.schedule is None and self.p > 1:
            assume("schedule 1f1b")
        schedule = self.schedule or "flush"
        if schedule == "interleaved" and "v" not in self.model_fields_set:
            raise ValueError("config.v is not given, and the schedule is interleaved")
        return "interleaved" if schedule == "flush" and self.v > 1 else schedule

    def _data(self, gpus: int | str | None, assume: Callable[[str], None]) -> int:
        group, count = self.t * self.p, gpus if isinstance(gpus, int) else None
        if self.d is None:
            if count is None:
                raise ValueError("config.d is not given")
            if count < 1 or count % group:
                raise ValueError(f"{count} GPUs do not divide by t={self.t} and p={self.p}")
            return count // group
        taken = group * self.d
        if count is not None and count != taken:
            missing = [name for name in ("t", "p") if name not in self.model_fields_set]
            if missing or count < taken:
                raise ValueError(
                    f"t={self.t}, p={self.p} and d={self.d} take {taken} GPUs, and hardware.gpus is "
                    f"{count}; {'give config.' + missing[0] if missing else 'correct one of them'}"
                )
            assume(f"{taken} of the {count} GPUs")
        return self.d
