"""Published measurements as questions to the planner: a model, a cluster, a configuration and what was measured.

A file holds `{"entries": [...]}` or a list of entries, each with an id and the parts model, hardware, config and
measured. Papers leave things out, so hardly a field is always there. What follows from another field, or is the same in
all of a paper's runs, is filled in (model_names.py, hardware.py, settings.py, software_names.py, each with its source)
and said; where more is missing, the entry cannot be predicted, and says why. So do entries with a key that is not
known (entry_keys.py), or that stands for something without a price (not_modelled.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from megatron.documents.faults import Boolean, Name, place, refuse_unknown_keys, sentence, shown
from megatron.documents.reading import read_document
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.refusals import refuse_recipe, refuse_shares
from megatron.planner.job.software import Software
from megatron.planner.memory.architecture import Architecture
from megatron.planner.published.entry_keys import REMARKS, keys_of, refuse_unknown, unknown_measurements
from megatron.planner.published.hardware import HardwareRecord
from megatron.planner.published.measured_times import TIMES, MeasuredRun, is_measured
from megatron.planner.published.model_names import ModelRecord
from megatron.planner.published.not_modelled import without_what_is_off
from megatron.planner.published.same_names import in_our_keys
from megatron.planner.published.settings import SettingsRecord
from megatron.planner.published.software_defaults import with_defaults
from megatron.planner.published.software_names import (
    SIXTEEN_BITS_ONLY,
    in_bfloat16,
    named_software,
    say_defaults,
    sharded_software,
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A measured run that the planner can be asked for.

    Attributes:
        seconds: of an iteration, where it was measured; from the MFU or a rate where that is what was published.
        published_mfu: whether it is.
        forward, backward: seconds of one microbatch at a stage between the first and the last, where measured.
        sequences_per_second: where that was published.
        chosen: whether the paper's own planner chose it, where the paper says so.
        source: where it was published.
        model_name: as published.
        note: what the file says about it.
        assumed: what was filled in, in words.
        unread: what was measured and not read, in words: with its reason.
        peak_gib: the most memory of a GPU, where that was published.
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
    """An entry that says too little, or something that the planner does not model."""

    id: str
    reason: str


class _EntryRecord(BaseModel):
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
        configuration = self.config.configuration(self.hardware, assumed.append)
        configuration = replace(configuration, layers=self.config.layers_of_stages(model.num_layers))
        cluster = self.hardware.cluster(configuration.num_gpus, assumed.append)
        texts = (self.config.framework, self.hardware.software, self.source)
        software = named_software(texts, cluster.gpu, assumed.append)
        is_core = software.overlaps_gradients  # with Megatron-Core's defaults, which no other has
        configuration = with_defaults(
            configuration, software, says_recompute=self.config.recompute is not None, assume=assumed.append
        )
        self.config.refuse_idle(configuration, has_experts=model.experts is not None)
        if configuration.sharding is not None:
            software = sharded_software(software)
        software = self._compiled(self._precise(software, cluster.gpu))
        software = self._with_softmax(software, model, configuration)
        if is_core:
            assumed.extend(say_defaults(software, configuration, cluster.gpu, self._said))
        refuse_shares(model, configuration, software)
        run = MeasuredRun(model, configuration, cluster.device.peak(software.element_bytes))
        given = {key: value for key, value in self.measured.items() if key in TIMES}
        measured = {key: value for key, value in given.items() if is_measured(value)}
        seconds, published_mfu = run.seconds(measured, assumed.append)
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
            unread=(
                *(
                    f"measured.{key} is {shown(value)}, no number above 0"
                    for key, value in given.items()
                    if value != 0 and key not in measured
                ),
                *(f"measured.{key} is not known" for key in unknown_measurements(self.measured)),
                *filter(None, (run.unread(measured),)),
            ),
            peak_gib=_peak_gib(self.measured),
        )

    def _precise(self, software: Software, gpu: str) -> Software:
        """In the run's precision, and with the attention and the overlaps that it says."""
        if self.config.precision == "fp32":
            if self.config.flash_attention:
                raise ValueError(
                    "config.flash_attention is True in fp32, and its kernels take 16-bit numbers only; leave it out"
                )
            software = replace(software, element_bytes=4, gradient_bytes=4, fuses_softmax=False, flash_attention=False)
        if self.config.is_fp8:
            refuse_recipe(self.config.fp8_recipe, gpu)
            if software in SIXTEEN_BITS_ONLY:
                raise ValueError(
                    "config.precision is 'fp8', and the software of this run multiplies in 16 bits; give bf16, or "
                    "Megatron-Core as config.framework"
                )
            software = replace(software, fp8=True)
        if self.config.precision == "bf16":
            software = in_bfloat16(software)
        return replace(software, **self._said) if self._said else software

    @property
    def _said(self) -> dict[str, bool | int]:
        """Fields of the software that the entry says."""
        said = {
            "dispatcher": self.config.dispatcher,
            "overlaps_experts": self.config.overlap_moe_expert_parallel_comm,
            "cuda_graphs": self.config.records_layers or None,
            "fp8_weights": True if self.config.is_fp8 and self.config.fp8_param_gather else None,
            "flash_attention": self.config.flash_attention,
            "overlaps_gradients": self.config.overlap_grad_reduce,
            "overlaps_weights": self.config.overlap_param_gather,
            "overlaps_in_pieces": self.config.overlaps_in_pieces,
            "gradient_bytes": 2 if self.config.grad_reduce_in_bf16 else 4 if self.config.bf16_optimizer else None,
            "sums_beside_gradients": self.config.bf16_optimizer,
            "blocks_launches": self.config.cuda_launch_blocking,
            "gathers_keys": True if self.config.cp_comm_type == "all_gather" else None,
        }
        return {name: value for name, value in said.items() if value is not None}

    def _compiled(self, software: Software) -> Software:
        """With kernels that torch.compile fused, where it did."""
        if not self.config.is_compiled:
            return software
        if software.fuses_elementwise:
            raise ValueError(
                f"config.technique is {shown(self.config.technique)}, and such software has fused kernels without it; "
                "leave compile out, or name torchtitan in config.framework"
            )
        return replace(software, fuses_elementwise=True, fuses_loss=software.compiles_loss)

    def _with_softmax(self, software: Software, model: Architecture, configuration: Configuration) -> Software:
        """Whether it had the fused softmax, as the entry says; that it could not have, is refused."""
        available = self.fused_softmax_kernel_available
        heads = configuration.micro_batch_size * model.num_attention_heads // configuration.tensor
        if available and software.fuses_softmax and not software.flash_attention and heads % 4:
            raise ValueError(
                f"fused_softmax_kernel_available is True, and a microbatch has {heads} heads on a rank, of which the "
                "kernel takes multiples of 4; correct it, or leave it out"
            )
        return software if available is not False else replace(software, fuses_softmax=False)


_KEYS = keys_of(_EntryRecord)


def load_entries(
    path: str | Path, *, filled: Callable[[object], object] = lambda entry: entry
) -> list[Entry | Unpredictable]:
    """The entries of a file, in its order. `filled`: an entry with what it leaves out.

    Raises ValueError where it is none of this form, has a key beside them that is no remark, or two have one id.
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
    """One entry, or why it cannot be predicted. What is null counts as not given. `name`: for one without an id."""
    if not isinstance(entry, Mapping):
        return Unpredictable(name, f"an entry is {shown(entry)}; give an object")
    given = {"id": name, **_without_nulls(entry)}
    if type(given["id"]) in (str, int):
        name = str(given["id"])
    written: dict[tuple[str, str], str] = {}
    try:
        given, written = in_our_keys(given)
        given = without_what_is_off(given)
        refuse_unknown(given, _KEYS)
        return _EntryRecord.model_validate(given).entry()
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        part, *keys = fault["loc"]
        theirs = written.get((part, keys[0])) if keys else None
        return Unpredictable(name, sentence(fault, where=theirs and place(part, theirs, *keys[1:])))
    except ValueError as error:
        return Unpredictable(name, str(error))


def _without_nulls(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_nulls(each) for key, each in value.items() if each is not None}


def _peak_gib(measured: Mapping[object, object]) -> float | None:
    given = (measured.get(name) for name in ("peak_memory_GiB", "memory_GiB"))
    return next((float(value) for value in given if is_measured(value)), None)


def _milliseconds(measured: Mapping[str, float], name: str) -> float | None:
    return measured[name] / 1e3 if name in measured else None
