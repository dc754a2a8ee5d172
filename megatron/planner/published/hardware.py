"""The part `hardware` of an entry: which processor it is, how many share a node, and how fast a node's network is.

Papers name a processor by a label ("A100-SXM-80GB", "32x V100-16GB (4 servers)"), and a network by its rate ("25 Gb/s",
"4x200Gb/s HDR IB per node (800 Gb/s)", "400 Gb/s per GPU") or by the machine ("Selene (DGX A100, HDR IB)"). Rates of a
processor are those of the edition that its label names (PCIe, NVL), else of SXM. Of an edition that is not known (GH200
and others) the entry has to say all of them.
"""

import math
import re
from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from megatron.documents.faults import Number, shown
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.devices import DEVICES, device_of, domain_of, edition_of, is_edition
from megatron.planner.published.label_rates import clock_of, memory_bandwidth_of
from megatron.planner.published.model_names import Count

_Positive = Annotated[float, Number, Field(gt=0, allow_inf_nan=False)]


def _number_of_gpus(value: object) -> object:
    """Of several runs a text ("8 and 64"), which is as not given."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdecimal() and len(value) < 9 else None
    if type(value) is not int:
        raise PydanticCustomError("int_type", "a whole number is wanted")
    return value


_MACHINES = {  # what papers call them: GB/s of a node to the network, and GPUs on it; hyphens and case do not matter
    "selene": (200.0, 8),  # DGX A100: 8 x HDR InfiniBand
    "dgx a100": (200.0, 8),
    "dgx h100": (400.0, 8),  # 8 x NDR InfiniBand
    "dgx h200": (400.0, 8),
    "dgx b200": (400.0, 8),  # 8 x NDR InfiniBand
    "dgx gb200": (3600.0, 72),  # 72 x NDR InfiniBand
    "dgx 2": (100.0, 16),  # 8 x EDR InfiniBand
    "p3.16xlarge": (3.125, 8),  # 25 Gb/s Ethernet
    "p3dn.24xlarge": (12.5, 8),  # 100 Gb/s
    "p4d.24xlarge": (50.0, 8),  # 4 x 100 Gb/s
    "p4de.24xlarge": (50.0, 8),
    "p5.48xlarge": (400.0, 8),  # 32 x 100 Gb/s
    "nd a100 v4": (200.0, 8),  # Azure: 8 x HDR InfiniBand
    "nd h100 v5": (400.0, 8),  # Azure: 8 x NDR InfiniBand
}
_USUAL = 8
_UNITS = {"GB/s": 1.0, "Gb/s": 0.125, "Gbit/s": 0.125, "Gbps": 0.125, "GbE": 0.125, "Tbps": 125.0}  # in GB/s
_EDITION = ("mem_GB", "peak_tflops", "memory_bandwidth", "intranode")  # what differs between editions of a GPU


class HardwareRecord(BaseModel):
    """The part `hardware` of an entry."""

    model_config = ConfigDict(frozen=True)

    gpu: str | None = None
    desc: str | None = None
    mem_GB: _Positive | None = None
    peak_tflops: _Positive | None = None
    memory_bandwidth: _Positive | None = None
    gpus: Annotated[int | None, BeforeValidator(_number_of_gpus)] = None
    gpus_per_node: Count | None = None
    intranode: str | None = None
    internode: str | None = None
    interconnect: str | None = None
    system: str | None = None
    software: str | None = None

    def cluster(self, num_gpus: int, assume: Callable[[str], None]) -> Cluster:
        """So many of these GPUs. `assume` is told what is filled in. Raises ValueError for what is not known."""
        machine = self._machine()
        name, memory, is_guess = self._device()
        usual = machine[2] if machine else self._usual_gpus_per_node(name)
        if self.gpus_per_node is None and num_gpus > usual:
            assume(f"nodes of {usual} GPUs")
        per_node = min(self.gpus_per_node or usual, num_gpus)
        if num_gpus % per_node:
            raise ValueError(f"{num_gpus} GPUs do not fill nodes of {per_node}; give another hardware.gpus_per_node")
        nodes = num_gpus // per_node
        self._refuse_edition(name)
        if is_guess:
            assume(f"GPU {name}")
        peak, bandwidth = self._rates_of_label(name, assume)
        return Cluster(
            gpu=name, nodes=nodes, gpus_per_node=per_node, memory_gib=memory, peak_teraflops=peak,
            memory_bandwidth=bandwidth,
            bandwidth={
                "within_node": self._within_node(name),
                "between_nodes": self._between_nodes(per_node, machine, assume) if nodes > 1 else None,
            },
        )  # fmt: skip

    def _rates_of_label(self, name: str, assume: Callable[[str], None]) -> tuple[float | None, float | None]:
        """Peak and bandwidth of the memory: as given, or as the label says; None: those of the data sheet."""
        label = self.gpu or self.desc or ""
        peak, bandwidth = self.peak_tflops, self.memory_bandwidth
        clock = clock_of(label, name)
        if peak is None and clock is not None:
            peak = clock * DEVICES[name].peak_teraflops
            assume(f"{peak:.0f} TFLOP/s of 16 bits, at the clock that the limit of power leaves")
        if bandwidth is None:
            bandwidth = memory_bandwidth_of(label, name, self.mem_GB)
            if bandwidth is not None:
                assume(f"{bandwidth:.0f} GB/s of memory, as HBM2e of that size has")
        return peak, bandwidth

    def _machine(self) -> tuple[str, float, int] | None:
        said = (self.system, self.gpu, self.desc, self.internode, self.interconnect)
        text = " | ".join(filter(None, said)).lower().replace("-", " ").replace("_", " ")
        return next(((name, *machine) for name, machine in _MACHINES.items() if name in text), None)

    def _device(self) -> tuple[str, float | None, bool]:
        label = self.gpu or self.desc or ""
        edition = next(filter(None, map(edition_of, self._labels)), None)
        try:
            return device_of(label, self.mem_GB, edition)
        except ValueError as error:
            raise ValueError(f"hardware.gpu {error}") from error

    @property
    def _labels(self) -> list[str]:
        return [label for label in (self.gpu, self.desc) if label]

    def _usual_gpus_per_node(self, name: str) -> int:
        said = next(filter(None, map(domain_of, self._labels)), None)
        return said or (_USUAL if name == "cpu" else DEVICES[name].gpus_per_node)

    def _refuse_edition(self, name: str) -> None:
        """Raises ValueError where it is another edition than the one whose rates are known, and its own are missing."""
        labels = [label for label in self._labels if edition_of(label)]
        if not labels or name == "cpu" or is_edition(name, edition_of(labels[0])):
            return
        missing = [each for each in _EDITION if getattr(self, each) is None]
        if self.intranode is not None and rate_of_node(self.intranode, 1) is None:
            missing.append("a rate in intranode")
        if missing:
            raise ValueError(
                f"hardware.gpu {shown(labels[0])} is the {edition_of(labels[0])} edition, and the rates that are known "
                f"are those of {name} (SXM); give {', '.join(missing)} of its data sheet in hardware"
            )

    def _within_node(self, name: str) -> float | None:
        """GB/s of one GPU to the others of its node; None: its data sheet's."""
        if self.intranode is None:
            return None
        rate = rate_of_node(self.intranode, 1, what="within a node")
        has_nvlink = name != "cpu" and DEVICES[name].has_nvlink
        if rate is None and has_nvlink != bool(re.search("nvlink|nvswitch", self.intranode, re.IGNORECASE)):
            known = "NVLink" if has_nvlink else "no NVLink"
            raise ValueError(
                f"hardware.intranode is {shown(self.intranode)}, and what is known of {name} is with {known}; give the "
                "rate of one GPU in one direction, as 32 GB/s"
            )
        return rate

    def _between_nodes(
        self, per_node: int, machine: tuple[str, float, int] | None, assume: Callable[[str], None]
    ) -> float:
        """GB/s of a node: as the entry says, or as the machine that it names is known to have."""
        rates = [rate_of_node(text, per_node) for text in (self.internode, self.interconnect) if text]
        rate = next(filter(None, rates), None)
        if rate is not None:
            return rate
        if machine is None:
            raise ValueError(
                "there are several nodes, and the bandwidth between them is not given (hardware.internode); give it "
                "with its unit, as 100 GB/s, or the machine as hardware.system"
            )
        name, whole, of_node = machine
        network = whole * min(per_node / of_node, 1)
        part = f", {per_node} of whose {of_node} GPUs have" if network < whole else " has"
        assume(f"{network:g} GB/s between nodes, as {name}{part}")
        return network


def rate_of_node(text: str, gpus_per_node: int, *, what: str = "between nodes") -> float | None:
    """GB/s of a node, None where the text has no rate's unit. What stands in brackets is a remark.

    Raises ValueError where no number above 0 stands before the unit.
    """
    rate = " ".join(text.partition("(")[0].split())
    unit = next((unit for unit in _UNITS if unit in rate), None)
    if unit is None:
        return None
    number, _, behind = rate.partition(unit)
    count, _, each = number.rpartition("x")
    try:
        value = int(count or 1) * float(each) * _UNITS[unit]
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(
            f"the bandwidth {what} is {rate}; give a number above 0 and a unit, as 100 GB/s, or 400 Gb/s per GPU"
        )
    return value * (gpus_per_node if "per GPU" in behind else 1)
