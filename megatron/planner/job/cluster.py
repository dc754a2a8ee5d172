"""The cluster that a search plans for.

A cluster file is YAML or JSON. It names the processor and describes a topology (docs/placement.md), in a short form if
all nodes are alike.

    gpu: A100-80            # a name in `DEVICES`, a label that means such a GPU, or `cpu`; or the name of another GPU,
                            # which needs all fields in `_DESCRIPTION`
    nodes: 6                # or a list of {name, gpus}, as in a topology
    gpus_per_node: 8        # optional: number of GPUs linked with one another; default 8, for GB200 the 72 of a rack
    gpus_per_host: 8        # optional: number of these GPUs on one host; default all, for GB200 the 4 of a tray
    bandwidth:              # GB/s (10^9 bytes) in one direction
      within_node: 300      # of one GPU to the others of its node; default: from the GPU's data sheet
      between_nodes: 100    # of one node to the network, shared equally by its GPUs
    memory_gib: 79.25       # optional: memory of a GPU; for `cpu`, memory that a process may use
    peak_teraflops: 312     # optional: peak in the dtype of training's matrix products; for `cpu`, of one process
    memory_bandwidth: 2039  # optional: GB/s of the GPU's memory; for `cpu`, of one process
    host_memory_gib: 1900   # optional: main memory of a host that training may use; needed for weights on the host
    host_bandwidth: 25      # optional: GB/s between one GPU and its host's memory; default: the GPU's PCIe
    host_optimizer_ns: 1.5  # optional: nanoseconds per parameter of the host's optimizer, in one process while all run
    price_per_gpu_hour: 2.5 # optional: price of a GPU hour, including the GPU's share of the node and the network
    currency: USD           # optional: currency of the price, a code of three letters
"""

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from megatron.documents.faults import Positive, nearest, place, shown
from megatron.documents.files import read_document
from megatron.pipeline.placement.topology import Bandwidth, Node, Topology
from megatron.planner.job.devices import DEVICES, Device, described, devices_like, edition_of, is_edition, known_device

CLUSTERS = Path(__file__).parent / "clusters"
"""The folder of the cluster files that come with the package, each NAME.yaml."""
_DESCRIPTION = ("memory_gib", "peak_teraflops", "memory_bandwidth")
"""The fields that a file must give for an unknown GPU, besides the bandwidth within a node."""
MOST = 65_536
"""The most nodes, and the most GPUs of a node."""
MOST_PRICE = 1_000_000
"""The highest price of a GPU hour, in any currency. With far higher prices the cost of a training would overflow."""

_CPU = Device(  # a core of a laptop
    memory_gib=2.0, peak_teraflops=0.05, peak_teraflops_fp32=0.05, memory_bandwidth=10, link_bandwidth=2,
    host_bandwidth=5,  # a copy reads and writes
)  # fmt: skip
HOST_MEMORY_BANDWIDTH = 200.0
"""GB/s that the optimizers of all processes of a host together reach, unless the file gives host_optimizer_ns. The peak
of two sockets with six DDR4-2933 channels each is 281 GB/s."""


def _usual_gpus_per_node(given: dict) -> int:
    return DEVICES.get(given.get("gpu"), _CPU).gpus_per_node


def _code(currency: str) -> str:
    """Return the currency code. Raises ValueError unless it has three capital letters."""
    if not re.fullmatch("[A-Z]{3}", currency):
        raise ValueError(f"currency {shown(currency)} is not a code of three capital letters; write, for example, USD")
    return currency


class _Links(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    within_node: Positive | None = None
    between_nodes: Positive | None = None


def _processor(label: str) -> str:
    """Return the label's name in `DEVICES`, or `cpu`, or the label of an unknown GPU. Raises ValueError if invalid."""
    name = label if label == "cpu" else known_device(label)
    if name is None and not re.fullmatch(r"[\w .,()/+-]{1,60}", label):
        raise ValueError(_no_gpu(label, [*_DESCRIPTION], "a name of letters and digits, "))
    return name or label


class Cluster(BaseModel):
    """A cluster with the fields of a cluster file (see the module). Raises pydantic's ValidationError, a ValueError."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    gpu: Annotated[str, AfterValidator(_processor)]
    nodes: Annotated[int, Field(ge=1, le=MOST)] | Annotated[tuple[Node, ...], Field(min_length=1, strict=False)]
    gpus_per_node: Annotated[int, Field(ge=1, le=MOST, default_factory=_usual_gpus_per_node)]
    bandwidth: _Links = _Links()
    memory_gib: Positive | None = None
    peak_teraflops: Positive | None = None
    memory_bandwidth: Positive | None = None
    host_memory_gib: Positive | None = None
    host_bandwidth: Positive | None = None
    host_optimizer_ns: Positive | None = None
    gpus_per_host: Annotated[int, Field(ge=1, le=MOST)] | None = None
    price_per_gpu_hour: Annotated[float, Field(gt=0, le=MOST_PRICE, allow_inf_nan=False)] | None = None
    currency: Annotated[str, AfterValidator(_code)] = "USD"

    def model_post_init(self, _context: object) -> None:
        if not self.is_known and (missing := self._undescribed):
            raise ValueError(_no_gpu(self.gpu, missing))
        for node in self.topology.nodes if self.gpus_per_host else ():
            if node.gpus % self.gpus_per_host:
                raise ValueError(
                    f"gpus_per_host {self.gpus_per_host} does not divide the {node.gpus} GPUs of a node; give another"
                )
        if len(self.topology.nodes) > 1 and self.bandwidth.between_nodes is None:
            raise ValueError("there are several nodes; give bandwidth.between_nodes, GB/s of one node to the network")
        names = [node.name for node in self.topology.nodes]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two nodes are called {twice}; give each its host name")

    @property
    def is_cpu(self) -> bool:
        return self.gpu == "cpu"

    @cached_property
    def device(self) -> Device:
        """The processor, with the values of the file in place of the data sheet's."""
        known, eighth = self._known, self._known.peak_teraflops_fp8
        if eighth and self.peak_teraflops:  # all peaks of a GPU scale with its clock and number of multiprocessors
            eighth *= self.peak_teraflops / known.peak_teraflops
        return replace(
            known,
            memory_gib=self.memory_gib or known.memory_gib,
            peak_teraflops_fp8=eighth,
            peak_teraflops=self.peak_teraflops or known.peak_teraflops,
            peak_teraflops_fp32=self.peak_teraflops or known.peak_teraflops_fp32,
            memory_bandwidth=self.memory_bandwidth or known.memory_bandwidth,
            link_bandwidth=self.bandwidth.within_node or known.link_bandwidth,
            host_bandwidth=self.host_bandwidth or known.host_bandwidth,
        )

    @property
    def is_known(self) -> bool:
        """Whether the processor is in `DEVICES` or a CPU."""
        return self.is_cpu or self.gpu in DEVICES

    @property
    def _known(self) -> Device:
        if self.is_cpu:
            return _CPU
        if self.gpu in DEVICES:
            return DEVICES[self.gpu]
        fastest = self.bandwidth.within_node or self.bandwidth.between_nodes  # the latter if each node has one GPU
        rates = {name: getattr(self, name) for name in _DESCRIPTION}
        return described(**rates, link_bandwidth=fastest or self.memory_bandwidth)

    @property
    def _undescribed(self) -> list[str]:
        """The required fields of an unknown GPU that the file lacks."""
        missing = [name for name in _DESCRIPTION if getattr(self, name) is None]
        most = self.gpus_per_node if isinstance(self.nodes, int) else max(node.gpus for node in self.nodes)
        if most > 1 and self.bandwidth.within_node is None:
            missing.append("bandwidth.within_node")
        if self.host_memory_gib is not None and self.host_bandwidth is None:
            missing.append("host_bandwidth")
        return missing

    @cached_property
    def gpus_of_hosts(self) -> tuple[int, ...]:
        """The number of GPUs of each host, in slot order. A node has one or more hosts."""
        found: list[int] = []
        for node in self.topology.nodes:
            most = self.gpus_per_host or self._known.gpus_per_host or node.gpus
            full, rest = divmod(node.gpus, most)
            found += [most] * full + [rest] * (rest > 0)
        return tuple(found)

    @cached_property
    def host_of_slot(self) -> tuple[int, ...]:
        """The index of each slot's host."""
        return tuple(host for host, count in enumerate(self.gpus_of_hosts) for _ in range(count))

    def optimizer_ns(self, state_bytes: int) -> float:
        """Return the nanoseconds of the host's optimizer for a parameter.

        `state_bytes`: the bytes that the optimizer reads and writes for it.
        """
        if self.host_optimizer_ns:
            return self.host_optimizer_ns
        together = max(self.gpus_of_hosts)
        return state_bytes / (self.device.memory_bandwidth if self.is_cpu else HOST_MEMORY_BANDWIDTH / together)

    @cached_property
    def topology(self) -> Topology:
        """The nodes and links of the cluster."""
        nodes = self.nodes
        if isinstance(nodes, int):
            nodes = tuple(Node(name=f"node{index}", gpus=self.gpus_per_node) for index in range(nodes))
        within = self.bandwidth.within_node or self.device.link_bandwidth
        return Topology(
            nodes=nodes, bandwidth=Bandwidth(within_node=within, between_nodes=self.bandwidth.between_nodes or within)
        )

    def network_of(self, gpus: int) -> float | None:
        """Return GB/s to the network for `gpus` GPUs of one node; None if the bandwidth of a node is not known.

        Each GPU has an equal share of the node's bandwidth, as in a DGX, where each GPU has its own adapter. The result
        is at most the bandwidth of the whole node.
        """
        whole, of_node = self.bandwidth.between_nodes, max(node.gpus for node in self.topology.nodes)
        return None if whole is None else whole * min(gpus / of_node, 1)

    @property
    def num_gpus(self) -> int:
        return self.topology.num_slots


def load_cluster(path: str | Path) -> Cluster:
    """Load a cluster from its file. Raises ValueError that names the file and the field."""
    return make_cluster(read_document(path), str(path))


def make_cluster(document: object, source: str) -> Cluster:
    """Make a cluster from the content of its file. Raises ValueError that names `source` and the field."""
    try:
        return Cluster.model_validate(document)
    except ValidationError as error:
        raise ValueError(f"{source}: {_problem(error, document)}") from error


def _problem(error: ValidationError, document: object) -> str:
    """Describe the first fault of a cluster file in one sentence."""
    faults = error.errors(include_url=False)
    nodes = document.get("nodes") if isinstance(document, dict) else None
    wanted = _LIST if isinstance(nodes, (list, tuple)) else _NUMBER  # `nodes` may be either
    faults = [each for each in faults if each["loc"][:1] != ("nodes",) or each["loc"][1:2] in ((), (wanted,))]
    first = faults[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    parts = [part for part in first["loc"] if part not in (_NUMBER, _LIST)]
    known = {1: Cluster.model_fields, 2: _Links.model_fields}.get(len(parts), ())
    where = place(*parts) or "the file"
    if first["type"] == "missing":
        return f"{where} is missing; {_FORM}"
    if first["type"] == "model_type":
        return f"{where} is no mapping; {_FORM}"
    if first["type"] in ("too_short", "string_too_short"):
        return f"{where} is empty; {_FORM}"
    if first["type"] == "extra_forbidden":
        near = nearest(parts[-1], known)
        return f"{where} is not known; {_FORM}{f'; the nearest that is known is {near}' if near else ''}"
    return f"{where} {first['msg'].removeprefix('Input ')}, not {shown(first['input'])}; {_FORM}"


def _no_gpu(name: str, missing: list[str], more: str = "") -> str:
    """Return the error text for an unknown GPU.

    `missing`: the fields that would describe the GPU. `more`: text of a further requirement, listed before them.
    """
    edition, alike = edition_of(name), devices_like(name)
    if edition and alike and not is_edition(alike[0], edition):
        return (
            f"{shown(name)} is the {edition} edition, and the rates that are known are those of {alike[0]} (SXM); give "
            f"gpu {alike[0]} with memory_gib, peak_teraflops, memory_bandwidth and bandwidth.within_node of its data "
            "sheet"
        )
    near = nearest(name, DEVICES)
    hint = f"; the nearest that is known is {near}" if near else ""
    known = ", ".join(alike or (*DEVICES, "cpu"))
    return (
        f"{shown(name)} is no GPU that is known; choose from {known}{hint}, or describe it in full: give "
        f"{more}{', '.join(missing)} of its data sheet"
    )


_FORM = "see docs/grid_search.md for the form of a cluster"
_NUMBER, _LIST = "constrained-int", "tuple[Node, ...]"  # pydantic's names for the two types of `nodes`
