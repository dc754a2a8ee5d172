"""The machine of a job: its nodes and their GPUs, the bandwidth at each level, and the slots of the job's processes.

A topology file is YAML or JSON:

    nodes:
      - {name: host0, gpus: 8}
      - {name: host1, gpus: 8}
    bandwidth:               # GB/s (10^9 bytes) in one direction
      within_node: 300       # of one GPU, to the others of its node
      between_nodes: 100     # of one node to the network, shared by its GPUs
    teraflops_per_gpu: 180   # optional: sustained speed of a GPU in a forward, to estimate a forward's time

Slots are counted in the order of the file: the GPUs of the first node, then those of the second, and so on.

A launcher numbers processes in any order (physical ranks). A slot is a host and a LOCAL_RANK on that host. Hosts are
ordered as in the topology, or without a topology by their lowest physical rank; the slots of a host are ordered by
LOCAL_RANK. If the launcher sets no LOCAL_RANK, the processes of a host are ordered by physical rank.
"""

import os
import socket
from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.documents.faults import Positive
from megatron.documents.files import read_document
from megatron.pipeline.placement.mapping import Mapping

_GIGA = 1e9
_MOST_GPUS = 65_536  # of a node; a greater number is a typing error that would fill the memory


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Node(_Record):
    """A host with its name and its number of GPUs, or of processes on a CPU."""

    name: Annotated[str, Field(min_length=1)]
    gpus: Annotated[int, Field(ge=1, le=_MOST_GPUS)]


class Bandwidth(_Record):
    """Bandwidths in GB/s in one direction: of a GPU inside its node, and of a node to the network."""

    within_node: Positive
    between_nodes: Positive


class Topology(_Record):
    """Nodes in slot order, and bandwidths. `teraflops_per_gpu` is the speed that a GPU sustains in a forward, in 10^12
    operations per second."""

    nodes: Annotated[tuple[Node, ...], Field(min_length=1, strict=False)]
    bandwidth: Bandwidth
    teraflops_per_gpu: Positive | None = None

    @property
    def num_slots(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @cached_property
    def node_of_slot(self) -> tuple[int, ...]:
        """The index of each slot's node."""
        return tuple(index for index, node in enumerate(self.nodes) for _ in range(node.gpus))

    def first_slot(self, node: int) -> int:
        return sum(each.gpus for each in self.nodes[:node])

    def seconds_within_node(self, num_bytes: float) -> float:
        """Seconds for one GPU to send `num_bytes` to another GPU of its node."""
        return num_bytes / (self.bandwidth.within_node * _GIGA)

    def seconds_between_nodes(self, num_bytes: float) -> float:
        """Seconds for one node to send `num_bytes` to other nodes."""
        return num_bytes / (self.bandwidth.between_nodes * _GIGA)

    def network_share(self, node: int) -> float:
        """GB/s of a GPU of this node to the network while all GPUs of the node use it (BPipe, appendix B)."""
        return self.bandwidth.between_nodes / self.nodes[node].gpus

    def restricted(self, num_processes: Dictionary[str, int]) -> "Topology":
        """The part of the topology that a job uses, in the same order.

        Args:
            num_processes: number of processes by name of the node.

        Raises:
            ValueError: a host is not in the topology, or has more processes than GPUs.
        """
        known = {node.name: node for node in self.nodes}
        for name, count in num_processes.items():
            if name not in known:
                raise ValueError(
                    f"host {name} of the job is not among the topology's nodes ({_shown(list(known))}); write the "
                    "nodes' names as their host names"
                )
            if count > known[name].gpus:
                raise ValueError(
                    f"host {name} runs {count} processes, but the topology gives it {known[name].gpus} GPUs; correct "
                    "the topology or start fewer"
                )
        nodes = tuple(Node(name=n.name, gpus=num_processes[n.name]) for n in self.nodes if n.name in num_processes)
        return Topology(nodes=nodes, bandwidth=self.bandwidth, teraflops_per_gpu=self.teraflops_per_gpu)


def load_topology(path: str | Path) -> Topology:
    """Read a topology file. Raises ValueError with the file, the field and the reason if the file is invalid."""
    try:
        topology = Topology.model_validate(read_document(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"{path}: {field}: {_reason(first)}; see docs/placement.md for the form of a topology"
        ) from error
    names = [node.name for node in topology.nodes]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{path}: two nodes are called {name}; give each its host name")
    return topology


def _reason(error: dict) -> str:
    text = error["msg"][0].lower() + error["msg"][1:]
    if error["type"] in ("missing", "extra_forbidden"):
        return text
    return f"{text}, not {error['input']!r:.60}"


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + ", ..." * (len(names) > 8)


HOST_NAME = "PIPELINE_HOST_NAME"
"""The environment variable that names the host if host names do not distinguish nodes, as in some containers."""


@dataclass(frozen=True)
class Process:
    """The host and LOCAL_RANK of a process. `local_rank` is None if the launcher sets no LOCAL_RANK."""

    host: str
    local_rank: int | None


def this_process() -> Process:
    """The host and LOCAL_RANK of this process."""
    local_rank = os.environ.get("LOCAL_RANK")
    return Process(os.environ.get(HOST_NAME) or socket.gethostname(), int(local_rank) if local_rank else None)


@dataclass(frozen=True)
class JobSlots:
    """The slots of a job.

    Attributes:
        process_of_slot: physical rank by slot.
        nodes: the name and the number of slots of each node, in slot order.
    """

    process_of_slot: tuple[int, ...]
    nodes: tuple[tuple[str, int], ...]

    @property
    def node_sizes(self) -> list[int]:
        return [count for _, count in self.nodes]

    def logical_ranks(self, mapping: Mapping) -> tuple[int, ...]:
        """The logical rank of each physical rank under a mapping."""
        ranks = [0] * len(mapping)
        for slot, process in enumerate(self.process_of_slot):
            ranks[process] = mapping[slot]
        return tuple(ranks)


def find_slots(processes: Sequence[Process], topology: Topology | None = None) -> JobSlots:
    """The slots of `processes`, which are ordered by physical rank.

    Raises:
        ValueError: two processes claim one slot, or the topology has no slot for a process.
    """
    by_host: dict[str, list[int]] = {}
    for rank, process in enumerate(processes):
        by_host.setdefault(process.host, []).append(rank)
    for host, ranks in by_host.items():
        local = [processes[rank].local_rank for rank in ranks]
        if local == [None] * len(local):
            continue
        if None in local or len(set(local)) < len(local):
            shown = ", ".join("none" if each is None else str(each) for each in local[:8])
            raise ValueError(
                f"the {len(ranks)} processes on host {host} have LOCAL_RANK {shown}; give each its own (under Slurm: "
                f"LOCAL_RANK=$SLURM_LOCALID), or tell hosts of one name apart by {HOST_NAME}"
            )
        ranks.sort(key=lambda rank: processes[rank].local_rank)
    order = list(by_host)
    if topology is not None:
        order = [node.name for node in topology.restricted({host: len(ranks) for host, ranks in by_host.items()}).nodes]
    return JobSlots(
        process_of_slot=tuple(rank for host in order for rank in by_host[host]),
        nodes=tuple((host, len(by_host[host])) for host in order),
    )
