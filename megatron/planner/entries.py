"""Published measurements as questions to the planner: a model, a cluster, a configuration and what was measured.

A file holds `{"entries": [...]}` or a list of entries, each with an id and the parts model, hardware, config and
measured. Papers leave things out, so hardly a field is always there. What follows from another field, or is the same in
all of a paper's runs, is filled in (`_KNOWN_MODELS`, `_NETWORKS`, `_SOFTWARE`, each with its source); where more is
missing, the entry cannot be predicted, and says why.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.placement.bandwidth import RecomputeScope
from megatron.placement.files import read_document
from megatron.planner.architecture import Architecture
from megatron.planner.cluster import Cluster
from megatron.planner.configuration import Configuration
from megatron.planner.devices import DEVICES
from megatron.planner.software import (
    MEGATRON_2020,
    MEGATRON_2021,
    MEGATRON_DEEPSPEED,
    MEGATRON_V3,
    PIPEDREAM_2BW,
    Software,
)

GPUS_PER_NODE = 8


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


@dataclass(frozen=True)
class Unpredictable:
    """An entry that says too little, or something that the planner does not model."""

    id: str
    reason: str


class _Record(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class _Model(_Record):
    name: str | None = None
    params_B: float | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    seq: int | None = None
    vocab: int | None = None


class _Hardware(_Record):
    gpu: str | None = None
    desc: str | None = None
    mem_GB: float | None = None
    gpus: int | str | None = None
    gpus_per_node: int = GPUS_PER_NODE
    internode: str | None = None
    interconnect: str | None = None
    system: str | None = None
    software: str | None = None


class _Settings(_Record):
    t: int = 1
    p: int = 1
    d: int | None = None
    v: int = 1
    micro_batch: int | str | None = None
    global_batch: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    sequence_parallel: bool = False
    zero1: bool = False
    zero: int = 0
    framework: str | None = None


class _Raw(_Record):
    id: str = "?"
    source: str = ""
    model: _Model = _Model()
    hardware: _Hardware = _Hardware()
    config: _Settings = _Settings()
    measured: Mapping[str, object] = Field(default_factory=dict)
    note: str | None = None


_KNOWN_MODELS = {  # shapes that papers name only: BERT-large (Devlin et al. 2018), its vocabulary padded to 128
    "BERT-24": {"hidden": 1024, "heads": 16, "vocab": 30522},
}
_NETWORKS = {  # GB/s of a node, where a paper names the machine
    "Selene": 200.0,  # DGX A100: 8 x HDR InfiniBand
    "DGX-A100": 200.0,
    "DGX-2": 100.0,  # 8 x EDR InfiniBand
    "p3.16xlarge": 3.125,  # 25 Gb/s Ethernet
}
_SOFTWARE = (  # what a field or the source names
    ("Megatron-DeepSpeed", MEGATRON_DEEPSPEED),
    ("PipeDream-2BW", PIPEDREAM_2BW),
    ("Megatron-LM v3", MEGATRON_V3),
    ("Korthikanti", MEGATRON_V3),
    ("Narayanan", MEGATRON_2021),
    ("Megatron-LM 2020", MEGATRON_2020),
)
_SCHEDULES = {"1f1b": "flush"}
_FAMILY = re.compile(r"(A100|H100|H200|V100|2080 ?Ti|1080 ?Ti)", re.IGNORECASE)
_MEMORY = re.compile(r"(\d+) ?GB")
_RATE = re.compile(r"(\d+) ?Gb/s( per GPU)?")
_PADDING = 128


def load_entries(path: str | Path) -> list[Entry | Unpredictable]:
    """The entries of a file, in its order. Raises ValueError where it is none of this form."""
    document = read_document(path)
    entries = document.get("entries") if isinstance(document, dict) else document
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path} has no list of entries; give measurements in the form of docs/planner.md")
    return [read_entry(entry) for entry in entries]


def read_entry(entry: Mapping[str, object]) -> Entry | Unpredictable:
    """One entry, or why it cannot be predicted."""
    name = str(entry.get("id", "?"))
    try:
        return _Reader(_Raw.model_validate(entry)).entry()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return Unpredictable(name, f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}")
    except ValueError as error:
        return Unpredictable(name, str(error))


class _Reader:
    def __init__(self, raw: _Raw) -> None:
        self.raw = raw
        self.assumed: list[str] = []

    def entry(self) -> Entry:
        self._refuse_what_is_not_modelled()
        settings = self.raw.config
        model, software = self._model(settings.t), self._software()
        configuration = self._configuration()
        cluster = self._cluster(configuration.num_gpus)
        measured = {key: value for key, value in self.raw.measured.items() if isinstance(value, (int, float))}
        seconds, published_mfu = self._seconds(measured, model, configuration, cluster)
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
            model_name=self.raw.model.name or "",
            note=self.raw.note or "",
            assumed=tuple(self.assumed),
        )

    def _refuse_what_is_not_modelled(self) -> None:
        settings = self.raw.config
        extra = settings.model_extra or {}
        if "fsdp" in extra or settings.zero == 3:
            raise ValueError("weights are split over replicas (fully sharded, ZeRO-3), which is not modelled")
        if extra.get("cp", 1) != 1:
            raise ValueError("sequences are split over context parallel ranks, which is not modelled")

    def _model(self, tensor: int) -> Architecture:
        given = self.raw.model
        known = _KNOWN_MODELS.get((given.name or "").rstrip("?"), {})
        sizes = {}
        for field in ("layers", "hidden", "heads", "seq", "vocab"):
            value = getattr(given, field)
            if value is None and field in known:
                value = known[field]
                self.assumed.append(f"{field} {value}")
            if value is None and field == "vocab":
                value = 51200
                self.assumed.append(f"vocabulary {value}")
            sizes[field] = _required(value, f"model.{field}")
        h, multiple = sizes["hidden"], _PADDING * tensor
        if h % sizes["heads"]:
            raise ValueError(f"hidden size {h} does not divide into {sizes['heads']} heads")
        return Architecture(
            num_layers=sizes["layers"],
            hidden_size=h,
            ffn_hidden_size=given.ffn or 4 * h,
            num_attention_heads=sizes["heads"],
            num_query_groups=given.kv_heads or sizes["heads"],
            kv_channels=h // sizes["heads"],
            sequence_length=sizes["seq"],
            vocabulary_size=-(-sizes["vocab"] // multiple) * multiple,
            num_positions=sizes["seq"],
            masked_head="bert" in (given.name or "").lower(),
            binary_head="bert" in (given.name or "").lower(),
        )

    def _configuration(self) -> Configuration:
        settings = self.raw.config
        micro_batch = _required(settings.micro_batch, "config.micro_batch")
        if not isinstance(micro_batch, int):
            raise ValueError(f"config.micro_batch is {micro_batch!r}, no number of sequences")
        schedule = _SCHEDULES.get(settings.schedule or "1f1b", settings.schedule)
        data = self._data()
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
            rank_mapping="pair-adjacent" if schedule == "bpipe" else "standard",
        )

    def _data(self) -> int:
        settings, gpus = self.raw.config, self.raw.hardware.gpus
        if settings.d is not None:
            return settings.d
        count = _required(gpus if isinstance(gpus, int) else None, "config.d")
        if count % (settings.t * settings.p):
            raise ValueError(f"{count} GPUs do not divide by t={settings.t} and p={settings.p}")
        return count // (settings.t * settings.p)

    def _recompute(self) -> RecomputeScope:
        text = self.raw.config.recompute or "none"
        scope = text.split(" ")[0]
        if scope not in {each.value for each in RecomputeScope}:
            raise ValueError(f"config.recompute {text!r} is no scope that is modelled (none, attention, layer)")
        return RecomputeScope(scope)

    def _software(self) -> Software:
        raw = self.raw
        text = " | ".join(filter(None, (raw.config.framework, raw.hardware.software, raw.source)))
        for name, software in _SOFTWARE:
            if name in text:
                return software
        self.assumed.append("the software of Megatron-LM v3")
        return MEGATRON_V3

    def _cluster(self, num_gpus: int) -> Cluster:
        hardware = self.raw.hardware
        per_node = min(hardware.gpus_per_node, num_gpus)
        if num_gpus % per_node:
            raise ValueError(f"{num_gpus} GPUs do not fill nodes of {per_node}")
        nodes = num_gpus // per_node
        name = self._device(hardware)
        return Cluster(
            gpu=name, nodes=nodes, gpus_per_node=per_node,
            bandwidth={"between_nodes": self._network(hardware, per_node) if nodes > 1 else None},
        )  # fmt: skip

    def _device(self, hardware: _Hardware) -> str:
        text = hardware.gpu or hardware.desc or ""
        family = _FAMILY.search(text)
        if family is None:
            raise ValueError(f"hardware.gpu {text!r} is no GPU that is known ({', '.join(DEVICES)})")
        compact = family[1].replace(" ", "").upper()
        names = [name for name in DEVICES if compact in name.upper()]
        memory = _MEMORY.search(text)
        size = hardware.mem_GB or (float(memory[1]) if memory else None)
        if size is None:
            if len(names) > 1:
                self.assumed.append(f"GPU {names[0]}")
            return names[0]
        return min(names, key=lambda name: abs(DEVICES[name].memory_gib - size))

    def _network(self, hardware: _Hardware, per_node: int) -> float:
        text = " | ".join(filter(None, (hardware.internode, hardware.interconnect, hardware.system, hardware.gpu)))
        rates = [float(rate) * (per_node if per_gpu else 1) for rate, per_gpu in _RATE.findall(text)]
        if rates:
            return max(rates) / 8
        for name, rate in _NETWORKS.items():
            if name in text:
                return rate
        raise ValueError("there are several nodes, and the bandwidth between them is not given (hardware.internode)")

    def _seconds(
        self, measured: Mapping[str, float], model: Architecture, configuration: Configuration, cluster: Cluster
    ) -> tuple[float | None, bool]:
        """Of an iteration, and whether they follow from an MFU."""
        if "iteration_s" in measured:
            return measured["iteration_s"], False
        if "iteration_ms" in measured:
            return measured["iteration_ms"] / 1e3, False
        if "mfu" in measured:
            peak = configuration.num_gpus * cluster.device.peak_teraflops * 1e12
            return model.operations(configuration.global_batch_size) / (measured["mfu"] * peak), True
        return None, False


def _required(value: object, field: str) -> object:
    if value is None:
        raise ValueError(f"{field} is not given")
    return value


def _milliseconds(measured: Mapping[str, float], name: str) -> float | None:
    return measured[name] / 1e3 if name in measured else None
