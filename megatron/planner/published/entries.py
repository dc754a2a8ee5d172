"""Published measurements as questions to the planner: a model, a cluster, a configuration and what was measured.

A file holds `{"entries": [...]}` or a list of entries, each with an id and the parts model, hardware, config and
measured. Papers leave things out, so hardly a field is always there. What follows from another field, or is the same in
all of a paper's runs, is filled in (model_names.py, hardware.py, settings.py, software_names.py, each with its source)
and said; where more is missing, the entry cannot be predicted, and says why.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from megatron.documents.reading import read_document
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.software import Software
from megatron.planner.memory.architecture import Architecture
from megatron.planner.published.hardware import HardwareRecord
from megatron.planner.published.model_names import ModelRecord
from megatron.planner.published.settings import SettingsRecord
from megatron.planner.published.software_names import named_software

_MEASURED = ("iteration_s", "iteration_ms", "mfu", "forward_ms", "backward_ms", "throughput")
_Text = Annotated[str, BeforeValidator(str)]


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


class _EntryRecord(BaseModel):
    id: _Text
    source: _Text = ""
    model: ModelRecord = ModelRecord()
    hardware: HardwareRecord = HardwareRecord()
    config: SettingsRecord = SettingsRecord()
    measured: Mapping[str, object] = Field(default_factory=dict)
    note: _Text = ""

    def entry(self) -> Entry:
        assumed: list[str] = []
        model = self.model.architecture(self.config.t, assumed.append)
        configuration = self.config.configuration(self.hardware, assumed.append)
        cluster = self.hardware.cluster(configuration.num_gpus, assumed.append)
        texts = (self.config.framework, self.hardware.software, self.source)
        software = self._precise(named_software(texts, cluster.gpu, assumed.append))
        given = {key: value for key, value in self.measured.items() if key in _MEASURED}
        measured = {key: value for key, value in given.items() if _is_measured(value)}
        peak = configuration.num_gpus * cluster.device.peak(software.element_bytes)
        seconds, published_mfu = _seconds(measured, model.operations(configuration.global_batch_size), peak)
        return Entry(
            id=self.id,
            model=model,
            cluster=cluster,
            configuration=configuration,
            software=software,
            seconds=seconds,
            published_mfu=published_mfu,
            forward=_milliseconds(measured, "forward_ms"),
            backward=_milliseconds(measured, "backward_ms"),
            sequences_per_second=measured.get("throughput"),
            chosen=self.measured.get("chosen_by_planner"),
            source=self.source,
            model_name=self.model.name,
            note=self.note,
            assumed=tuple(assumed),
            unread=tuple(
                f"measured.{key} is {value!r:.40}" for key, value in given.items() if value != 0 and key not in measured
            ),
        )

    def _precise(self, software: Software) -> Software:
        """In the run's precision, and with the attention that it says."""
        flash = self.config.flash_attention
        if self.config.precision == "fp32":
            software = replace(software, element_bytes=4, gradient_bytes=4, fuses_softmax=False, flash_attention=False)
        return software if flash is None else replace(software, flash_attention=flash)


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
        return _EntryRecord.model_validate(given).entry()
    except ValidationError as error:
        return Unpredictable(name, _reason(error))
    except ValueError as error:
        return Unpredictable(name, str(error))


def _without_nulls(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_nulls(each) for key, each in value.items() if each is not None}


def _reason(error: ValidationError) -> str:
    """What is not modelled, where that is among the faults; else the first field that cannot be read."""
    faults = error.errors(include_url=False)
    refused = next((fault["ctx"]["error"] for fault in faults if fault["type"] == "value_error"), None)
    if refused is not None:
        return str(refused)
    where, said = ".".join(map(str, faults[0]["loc"])), faults[0]["msg"].lower().partition(" or instance")[0]
    return f"{where} is {faults[0]['input']!r:.40}: {said}"


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
