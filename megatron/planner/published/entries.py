"""Published measurements as questions to the planner: a model, a cluster, a configuration and the measured values.

A file holds `{"entries": [...]}` or a list of entries, each with an id and the parts model, hardware, config and
measured (docs/planner.md). Papers leave things out, so almost every field is optional. A value that follows from
another field, or is the same in all runs of a paper, is filled in and reported. If more is missing, or a key is not
known, the entry is `Unpredictable`, with the reason.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.documents.faults import Boolean, Name, refuse_unknown_keys, sentence, shown
from megatron.documents.files import read_document
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.refusals import refuse_shares
from megatron.planner.job.software import Software
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.published.entry_parts import HardwareRecord, ModelRecord
from megatron.planner.published.settings import SettingsRecord, software_of

REMARKS = frozenset({"note", "comment", "about", "confidence", "provenance"})
"""The keys of remarks for the reader, allowed in any part."""
_PARTS = {"model": ModelRecord, "hardware": HardwareRecord, "config": SettingsRecord}
_TIMES = (
    "iteration_s", "iteration_ms", "mfu", "model_tflops_per_gpu", "tflops_per_gpu_incl_recompute", "tflops_per_gpu",
    "tokens_per_s_per_gpu", "forward_ms", "backward_ms", "throughput",
)  # fmt: skip
_MEASURED = REMARKS.union(_TIMES, (  # the others give no time: they are for the reader, and for facts about memory
    "unit", "chosen_by_planner", "feasible", "feasible_without_bpipe", "hfu", "mfu_from_time", "pct_peak",
    "aggregate_pflops", "memory_GiB", "peak_memory_GiB", "transfer_ms", "days_for_300B_tokens",
))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A measured run that the planner can predict. A number that was not published is None.

    Attributes:
        seconds: seconds of an iteration, measured, or computed from the published MFU or rate.
        published_mfu: whether `seconds` are from the MFU.
        forward, backward: seconds of one microbatch at a stage between the first and the last.
        sequences_per_second: the published throughput.
        chosen: whether the planner of the paper chose the run; None: the paper does not say.
        source: where the run was published.
        model_name: the published name of the model.
        note: the remark of the file on the run.
        assumed: the values that were filled in, in words.
        unread: the measured values that are not read, in words, with the reason.
        peak_gib: the most memory of a GPU.
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
    peak_gib: float | None = None


@dataclass(frozen=True)
class Unpredictable:
    """An entry that cannot be predicted: it says too little, or has something that the planner does not model."""

    id: str
    reason: str


class _EntryRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: Name
    source: Name = ""
    model: ModelRecord = ModelRecord()
    hardware: HardwareRecord = HardwareRecord()
    config: SettingsRecord = SettingsRecord()
    measured: Annotated[Mapping[object, object], Field(default_factory=dict)]
    note: Name = ""
    fused_softmax_kernel_available: Boolean | None = None

    def entry(self) -> Entry:
        assumed: list[str] = []
        model = self.model.architecture(self.config.t, assumed.append)
        configuration = self.config.configuration(self.hardware.gpus, model.num_layers, assumed.append)
        cluster = self.hardware.cluster(configuration.num_gpus, assumed.append)
        named = (self.config.framework, self.hardware.software, self.source)
        software, configuration = software_of(
            self.config, named, cluster.gpu, configuration, has_experts=model.experts is not None, assume=assumed.append
        )
        software = self._with_softmax(software, model, configuration)
        refuse_shares(model, configuration, software)
        run = _MeasuredRun(self.measured, model, configuration, cluster.device.peak(software.element_bytes))
        seconds, is_of_mfu = run.seconds(assumed.append)
        return Entry(
            id=self.id,
            model=model,
            cluster=cluster,
            configuration=configuration,
            software=software,
            seconds=seconds,
            published_mfu=is_of_mfu,
            forward=run.milliseconds("forward_ms"),
            backward=run.milliseconds("backward_ms"),
            sequences_per_second=run.numbers.get("throughput"),
            chosen=self.measured.get("chosen_by_planner"),
            source=self.source,
            model_name=self.model.name,
            note=self.note,
            assumed=tuple(assumed),
            unread=tuple(run.unread()),
            peak_gib=run.numbers.get("peak_memory_GiB", run.numbers.get("memory_GiB")),
        )

    def _with_softmax(self, software: Software, model: Architecture, configuration: Configuration) -> Software:
        """The software with or without the fused softmax, as the entry says. Raises ValueError for a softmax that the
        kernel cannot compute."""
        available = self.fused_softmax_kernel_available
        heads = configuration.micro_batch_size * model.num_attention_heads // configuration.tensor
        if available and software.fuses_softmax and not software.flash_attention and heads % 4:
            raise ValueError(
                f"fused_softmax_kernel_available is True, and a microbatch has {heads} heads on a rank, of which the "
                "kernel takes multiples of 4; correct it, or leave it out"
            )
        return software if available is not False else replace(software, fuses_softmax=False)


class _MeasuredRun:
    """The measured values of a run, and its seconds of an iteration. `peak`: operations per second of a GPU."""

    def __init__(
        self, measured: Mapping[object, object], model: Architecture, configuration: Configuration, peak: float
    ) -> None:
        self._measured, self._model, self._configuration, self._peak = measured, model, configuration, peak
        self.numbers = {
            key: value for key, value in measured.items() if type(value) in (int, float) and 0 < value < math.inf
        }
        batch = configuration.global_batch_size
        self._operations = model.operations(batch)
        self._rates = {"model_tflops_per_gpu": self._operations}
        if configuration.recompute is RecomputeScope.NONE:  # else `tflops_per_gpu` is ambiguous
            self._rates |= dict.fromkeys(("tflops_per_gpu_incl_recompute", "tflops_per_gpu"), self._operations)
        elif configuration.recompute is RecomputeScope.LAYER:  # Narayanan et al. 2021 count one more forward
            again = model.forward_operations(model.num_layers, batch)
            self._rates["tflops_per_gpu_incl_recompute"] = self._operations + again

    def milliseconds(self, name: str) -> float | None:
        """A measured value in seconds; None: it was not measured."""
        return self.numbers[name] / 1e3 if name in self.numbers else None

    def seconds(self, assume: Callable[[str], None]) -> tuple[float | None, bool]:
        """The seconds of an iteration, and whether they are from an MFU.

        Args:
            assume: is called with the words for a converted value.

        Raises:
            ValueError: a rate is above the peak, or a time is given twice.
        """
        found, gpus = self.numbers, self._configuration.num_gpus
        if "iteration_s" in found and "iteration_ms" in found:
            raise ValueError("measured.iteration_s and measured.iteration_ms say the same; give one of them")
        if "iteration_s" in found or "iteration_ms" in found:
            return found.get("iteration_s") or self.milliseconds("iteration_ms"), False
        if "mfu" in found:
            if found["mfu"] > 1:
                raise ValueError(f"measured.mfu is {found['mfu']}; give a part of 1")
            return self._operations / (found["mfu"] * self._peak * gpus), True
        for name, operations in self._rates.items():
            if name in found:
                if 1e12 * found[name] > self._peak:
                    raise ValueError(f"measured.{name} is {found[name]}, above the GPU's peak of "
                                     f"{self._peak / 1e12:g}; give TFLOP/s of one GPU")  # fmt: skip
                seconds = operations / (1e12 * found[name] * gpus)
                assume(f"{seconds:.4g} s an iteration, of {found[name]:g} TFLOP/s a GPU")
                return seconds, False
        if "tokens_per_s_per_gpu" in found:
            tokens = self._configuration.global_batch_size * self._model.sequence_length
            seconds = tokens / (found["tokens_per_s_per_gpu"] * gpus)
            assume(f"{seconds:.4g} s an iteration, of {found['tokens_per_s_per_gpu']:g} tokens/s a GPU")
            return seconds, False
        return None, False

    def unread(self) -> Iterator[str]:
        """Yield in words the measured values that say too little or are not known. A time of 0 is skipped, since some
        tables print 0 for no run."""
        for key, value in self._measured.items():
            if key in _TIMES and key not in self.numbers and value != 0:
                yield f"measured.{key} is {shown(value)}, no number above 0"
        for key in self._measured:
            if key not in _MEASURED:
                yield f"measured.{key} is not known"
        read = {"iteration_s", "iteration_ms", "mfu", *self._rates}
        if "tflops_per_gpu" in self.numbers and not read & set(self.numbers):
            yield (
                f"measured.tflops_per_gpu is {self.numbers['tflops_per_gpu']}, which does not say whether what is "
                "recomputed counts; give model_tflops_per_gpu or tflops_per_gpu_incl_recompute"
            )


def load_entries(
    path: str | Path, *, filled: Callable[[object], object] = lambda entry: entry
) -> list[Entry | Unpredictable]:
    """The entries of a file, in its order. `filled`: returns an entry with the parts that it leaves out.

    Raises ValueError if the file has another form, a key beside the entries that is no remark, or an id twice.
    """
    document = read_document(path)
    entries = document.get("entries") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise ValueError(f"{path} has no list of entries; give measurements in the form of docs/planner.md")
    if isinstance(document, dict):
        try:
            refuse_unknown_keys(document, {"entries", *REMARKS})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    found = [read_entry(filled(entry), f"entry {number}") for number, entry in enumerate(entries, start=1)]
    names: set[str] = set()
    for each in found:
        if each.id in names:
            raise ValueError(f"{path} has two entries with the id {shown(each.id)}; give each its own")
        names.add(each.id)
    return found


def read_entry(entry: object, name: str = "?") -> Entry | Unpredictable:
    """Return one entry, or the reason why it cannot be predicted. A null counts as not given.

    `name`: the id of an entry that has none.
    """
    if not isinstance(entry, Mapping):
        return Unpredictable(name, f"an entry is {shown(entry)}; give an object")
    given = {"id": name, **_without_remarks(entry)}
    if isinstance(entry.get("note"), str | int):
        given["note"] = entry["note"]
    if type(given["id"]) in (str, int):
        name = str(given["id"])
    try:
        return _EntryRecord.model_validate(given).entry()
    except ValidationError as error:
        faults = error.errors(include_url=False)
        fault = next((each for each in faults if each["type"] == "extra_forbidden"), faults[0])
        record = _PARTS[fault["loc"][0]] if len(fault["loc"]) > 1 and fault["loc"][0] in _PARTS else _EntryRecord
        return Unpredictable(name, sentence(fault, record.model_fields))
    except ValueError as error:
        return Unpredictable(name, str(error))


def _without_remarks(value: object) -> object:
    """A mapping without remarks and without nulls, at any depth."""
    if not isinstance(value, Mapping):
        return value
    return {key: _without_remarks(each) for key, each in value.items() if each is not None and key not in REMARKS}
