"""Published measurements as questions to the planner: a model, a cluster, a configuration and what was measured.

A file holds `{"entries": [...]}` or a list of entries, each with an id and the parts model, hardware, config and
measured. Papers leave things out, so hardly a field is always there. What follows from another field, or is the same in
all of a paper's runs, is filled in (model_names.py, hardware.py, `_SOFTWARE`, each with its source) and said;
where more is missing, the entry cannot be predicted, and says why.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megatron.documents.reading import read_document
from megatron.pipeline.program.lane_order import DEFERRED, DEVICE
from megatron.pipeline.schedules import PRESETS
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.software import (
    MEGATRON_2020,
    MEGATRON_2021,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    MEGATRON_V3,
    PIPEDREAM_2BW,
    Software,
)
from megatron.planner.memory.activations import RecomputeScope
from megatron.planner.memory.architecture import Architecture
from megatron.planner.published.hardware import device_of, node_bandwidth, usual_gpus_per_node
from megatron.planner.published.model_names import Count, ModelRecord


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A measured run that the planner can be asked for.

    Attributes:
        seconds: of an iteration, where it was measured; from the MFU where that is what was published.
        published_mfu: whether it is.
        forward, backward: seconds of one microbatch at a stage between the first and the last, where measured.
        sequences_per_second: where that was published.
        chosen: whether the paper's own planner chose it, where the paper says so.
        source: where it was published.
        model_name: as published.
        note: what the file says about it.
        assumed: what was filled in, in words.
        unread: what was measured and is no number, in words.
    """

    id: str
    model: Architecture
    cluster: Cluster
    configuration: Configuration
    software: Software
    seconds: float | None = None
    published_mfu: bool = False
    forward: float | None = None
    backward: float | None = None
    sequences_per_second: float | None = None
    chosen: bool | None = None
    source: str = ""
    model_name: str = ""
    note: str = ""
    assumed: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unpredictable:
    """An entry that says too little, or something that the planner does not model."""

    id: str
    reason: str


class _Record(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Text = Annotated[str, BeforeValidator(str)]


class _Hardware(_Record):
    gpu: str | None = None
    desc: str | None = None
    mem_GB: _Positive | None = None
    peak_tflops: _Positive | None = None
    gpus: int | str | None = None
    gpus_per_node: Count | None = None
    internode: str | None = None
    interconnect: str | None = None
    system: str | None = None
    software: str | None = None


class _Settings(_Record):
    t: Count = 1
    p: Count = 1
    d: Count | None = None
    v: Count = 1
    micro_batch: int | str | None = None
    global_batch: Count | None = None
    recompute: str | None = None
    schedule: str | None = None
    sequence_parallel: bool = False
    zero1: bool = False
    zero: int = 0
    provisional: str = "off"
    provisional_microbatches: Count | None = None
    provisional_reduce: bool = False
    resident_stages: Count = 2
    host_update: str = DEFERRED
    stash: str = DEVICE
    gathers_fetch: bool = False
    framework: str | None = None
    flash_attention: bool | None = None


class _Raw(_Record):
    id: _Text
    source: _Text = ""
    model: ModelRecord = ModelRecord()
    hardware: _Hardware = _Hardware()
    config: _Settings = _Settings()
    measured: Mapping[str, object] = Field(default_factory=dict)
    note: _Text = ""


_SOFTWARE = (  # what a field or the source names
    ("megatron-deepspeed", MEGATRON_DEEPSPEED),
    ("vtrain", MEGATRON_DEEPSPEED),
    ("pipedream-2bw", PIPEDREAM_2BW),
    ("megatron-lm v3", MEGATRON_V3),
    ("korthikanti", MEGATRON_V3),
    ("bpipe", MEGATRON_V3),
    ("narayanan", MEGATRON_2021),
    ("megatron-lm 2020", MEGATRON_2020),
    ("megatron-core", MEGATRON_CORE),
    ("megatron.core", MEGATRON_CORE),
)
_SCHEDULES = {
    "1f1b": "flush", "pipedream-flush": "flush", "pipedream-2bw": "2bw", "interleaved 1f1b": "interleaved",
    "interleaved-1f1b": "interleaved", "1f1b-interleaved": "interleaved",
}  # fmt: skip
_SCOPES = {"full": "layer", "selective": "attention"}  # Megatron-LM's words
_NOT_MODELLED = (  # in what an entry says of its technique or precision
    ("fp8", "products in FP8"),
    ("tf32", "products in TF32"),
    ("int8", "products in INT8"),
    ("compile", "compiled models"),
    ("asynctp", "tensor-parallel collectives in pieces"),
)
_MEASURED = ("iteration_s", "iteration_ms", "mfu", "forward_ms", "backward_ms", "throughput")
_FP32 = ("fp32", "float32")
_GPUS_PER_NODE = 8


def load_entries(path: str | Path) -> list[Entry | Unpredictable]:
    """The entries of a file, in its order. Raises ValueError where it is none of this form."""
    document = read_document(path)
    entries = document.get("entries") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise ValueError(f"{path} has no list of entries; give measurements in the form of docs/planner.md")
    return [read_entry(entry, f"entry {number}") for number, entry in enumerate(entries, start=1)]


def read_entry(entry: object, name: str = "?") -> Entry | Unpredictable:
    """One entry, or why it cannot be predicted. What is null counts as not given. `name`: for one without an id."""
    if not isinstance(entry, Mapping):
        return Unpredictable(name, f"an entry is {entry!r:.40}; give an object")
    given = {"id": name, **_without_nulls(entry)}
    name = str(given["id"])
    try:
        return _Reader(_Raw.model_validate(given)).entry()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = first["msg"].lower().partition(" or instance")[0]
        return Unpredictable(name, f"{where} is {first['input']!r:.40}: {reason}")
    except ValueError as error:
        return Unpredictable(name, str(error))


def _without_nulls(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_nulls(each) for key, each in value.items() if each is not None}


class _Reader:
    def __init__(self, raw: _Raw) -> None:
        self.raw = raw
        self.assumed: list[str] = []

    def entry(self) -> Entry:
        self._refuse_what_is_not_modelled()
        model = self.raw.model.architecture(self.raw.config.t, self.assumed.append)
        configuration = self._configuration()
        cluster = self._cluster(configuration)
        software = self._software(cluster)
        given = {key: value for key, value in self.raw.measured.items() if key in _MEASURED}
        measured = {key: value for key, value in given.items() if _is_measured(value)}
        peak = configuration.num_gpus * cluster.device.peak(software.element_bytes)
        seconds, published_mfu = _seconds(measured, model.operations(configuration.global_batch_size), peak)
        return Entry(
            id=self.raw.id,
            model=model,
            cluster=cluster,
            configuration=configuration,
            software=software,
            seconds=seconds,
            published_mfu=published_mfu,
            forward=_milliseconds(measured, "forward_ms"),
            backward=_milliseconds(measured, "backward_ms"),
            sequences_per_second=measured.get("throughput"),
            chosen=self.raw.measured.get("chosen_by_planner"),
            source=self.raw.source,
            model_name=self.raw.model.name,
            note=self.raw.note,
            assumed=tuple(self.assumed),
            unread=tuple(
                f"measured.{key} is {value!r:.40}" for key, value in given.items() if value != 0 and key not in measured
            ),
        )

    def _refuse_what_is_not_modelled(self) -> None:
        settings = self.raw.config
        extra = settings.model_extra or {}
        if extra.get("fsdp", 1) != 1 or settings.zero == 3:
            raise ValueError("weights are split over replicas (fully sharded, ZeRO-3), which is not modelled")
        if settings.zero not in (0, 1):
            raise ValueError(f"config.zero is {settings.zero}, which is not modelled (0 and 1 are)")
        if extra.get("cp", 1) != 1:
            raise ValueError("sequences are split over context parallel ranks, which is not modelled")
        if extra.get("ep", 1) != 1 or any("expert" in key for key in self.raw.model.model_extra or {}):
            raise ValueError("layers have experts, which are not modelled")
        named = f"{extra.get('technique', '')} {self._precision()}".lower()
        for word, what in _NOT_MODELLED:
            if word in named:
                raise ValueError(f"config says {word}, and {what} are not modelled")

    def _configuration(self) -> Configuration:
        settings = self.raw.config
        micro_batch, data = self._micro_batch(), self._data()
        schedule = self._schedule()
        moves = schedule in PRESETS and PRESETS[schedule].balance
        batch = settings.global_batch
        if batch is None:
            batch = settings.p * micro_batch * data  # the smallest that 2bw takes
            self.assumed.append(f"global batch {batch}, as many microbatches as stages")
        return Configuration(
            tensor=settings.t,
            pipeline=settings.p,
            data=data,
            virtual=settings.v,
            micro_batch_size=micro_batch,
            global_batch_size=batch,
            recompute=self._recompute(),
            schedule=schedule,
            sequence_parallel=settings.sequence_parallel and settings.t > 1,
            distributed_optimizer=settings.zero1 or settings.zero == 1,
            rank_mapping="pair-adjacent" if moves else "standard",
            provisional=settings.provisional,
            provisional_microbatches=settings.provisional_microbatches,
            provisional_reduce=settings.provisional_reduce,
            resident_stages=settings.resident_stages,
            host_update=settings.host_update,
            stash=settings.stash,
            gathers_fetch=settings.gathers_fetch,
        )

    def _micro_batch(self) -> int:
        size = self.raw.config.micro_batch
        if size is None:
            raise ValueError("config.micro_batch is not given")
        if isinstance(size, str) and not size.strip().isdigit():
            raise ValueError(f"config.micro_batch is {size!r}, no number of sequences")
        return int(size)

    def _schedule(self) -> str:
        """The schedule in our words. Several stages on a rank make 1F1B interleaved."""
        settings = self.raw.config
        if settings.schedule is None and settings.p > 1:
            self.assumed.append("schedule 1f1b")
        given = (settings.schedule or "1f1b").strip().lower()
        schedule = _SCHEDULES.get(given, given)
        if schedule == "interleaved" and "v" not in settings.model_fields_set:
            raise ValueError("config.v is not given, and the schedule is interleaved")
        return "interleaved" if schedule == "flush" and settings.v > 1 else schedule

    def _data(self) -> int:
        settings, gpus = self.raw.config, self.raw.hardware.gpus
        group, count = settings.t * settings.p, gpus if isinstance(gpus, int) else None
        if settings.d is None:
            if count is None:
                raise ValueError("config.d is not given")
            if count < 1 or count % group:
                raise ValueError(f"{count} GPUs do not divide by t={settings.t} and p={settings.p}")
            return count // group
        taken = group * settings.d
        if count is not None and count != taken:
            missing = [name for name in ("t", "p") if name not in settings.model_fields_set]
            if missing or count < taken:
                raise ValueError(
                    f"t={settings.t}, p={settings.p} and d={settings.d} take {taken} GPUs, and hardware.gpus is "
                    f"{count}; {'give config.' + missing[0] if missing else 'correct one of them'}"
                )
            self.assumed.append(f"{taken} of the {count} GPUs")
        return settings.d

    def _recompute(self) -> RecomputeScope:
        if self.raw.config.recompute is None:
            self.assumed.append("recompute none")
        text = (self.raw.config.recompute or "none").strip().lower()
        scope = _SCOPES.get(text, text.split(" ")[0])
        if scope not in {each.value for each in RecomputeScope}:
            raise ValueError(f"config.recompute {text!r} is no scope that is modelled (none, attention, layer)")
        return RecomputeScope(scope)

    def _software(self, cluster: Cluster) -> Software:
        software, flash = self._named_software(), self.raw.config.flash_attention
        if software is None:
            # Megatron-LM v3 was before Hopper; what runs there has flash attention.
            is_newer = cluster.gpu in ("H100", "H200")
            software = replace(MEGATRON_CORE, flash_attention=True) if is_newer else MEGATRON_V3
            name = "megatron-core with flash attention" if is_newer else "Megatron-LM v3"
            self.assumed.append(f"the software of {name}")
        precision = self._precision()
        if any(name in precision for name in _FP32) and "16" not in precision:  # sums of 16-bit products are in FP32
            software = replace(software, element_bytes=4, gradient_bytes=4, fuses_softmax=False)
        return software if flash is None else replace(software, flash_attention=flash)

    def _precision(self) -> str:
        extra = self.raw.config.model_extra or {}
        return " ".join(str(extra.get(key, "")) for key in ("precision", "dtype")).lower()

    def _named_software(self) -> Software | None:
        raw = self.raw
        for text in (raw.config.framework, raw.hardware.software, raw.source):
            for name, software in _SOFTWARE:
                if name in (text or "").lower():
                    return software
        return None

    def _cluster(self, configuration: Configuration) -> Cluster:
        hardware, num_gpus = self.raw.hardware, configuration.num_gpus
        texts = (hardware.system, hardware.gpu, hardware.desc)
        usual = usual_gpus_per_node(texts, _GPUS_PER_NODE)
        if hardware.gpus_per_node is None and num_gpus > usual:
            self.assumed.append(f"nodes of {usual} GPUs")
        per_node = min(hardware.gpus_per_node or usual, num_gpus)
        if num_gpus % per_node:
            raise ValueError(f"{num_gpus} GPUs do not fill nodes of {per_node}")
        nodes = num_gpus // per_node
        name, memory, is_guess = device_of(hardware.gpu or hardware.desc or "", hardware.mem_GB)
        if is_guess:
            self.assumed.append(f"GPU {name}")
        network = (hardware.internode, hardware.interconnect, hardware.system, hardware.gpu)
        return Cluster(
            gpu=name, nodes=nodes, gpus_per_node=per_node, memory_gib=memory, peak_teraflops=hardware.peak_tflops,
            bandwidth={"between_nodes": node_bandwidth(network, per_node) if nodes > 1 else None},
        )  # fmt: skip


def _seconds(measured: Mapping[str, float], operations: float, peak: float) -> tuple[float | None, bool]:
    """The time of an iteration, and whether it follows from an MFU. `peak`: operations per second of all GPUs."""
    if "iteration_s" in measured:
        return measured["iteration_s"], False
    if "iteration_ms" in measured:
        return measured["iteration_ms"] / 1e3, False
    if "mfu" in measured:
        if measured["mfu"] > 1:
            raise ValueError(f"measured.mfu is {measured['mfu']}; give a part of 1")
        return operations / (measured["mfu"] * peak), True
    return None, False


def _is_measured(value: object) -> bool:
    """Whether it was measured; for a run that failed some tables have 0."""
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _milliseconds(measured: Mapping[str, float], name: str) -> float | None:
    return measured[name] / 1e3 if name in measured else None
