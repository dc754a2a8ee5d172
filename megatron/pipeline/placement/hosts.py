"""From the processes of a job to slots.

A launcher numbers the processes as it likes (the physical rank). A slot is a place: a host and a LOCAL_RANK on it.
Hosts are taken in the order of the topology, or without one in the order of their lowest physical rank; the slots of a
host, in the order of LOCAL_RANK. Where a launcher sets no LOCAL_RANK, a host's processes are counted by physical rank.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.placement.mapping import Mapping
from megatron.pipeline.placement.topology import Topology

HOST_NAME = "PIPELINE_HOST_NAME"
"""Environment variable that names the host where host names do not tell nodes apart, as in some containers."""


@dataclass(frozen=True)
class Process:
    """Where a process runs. `local_rank` is None where the launcher sets none."""

    host: str
    local_rank: int | None


def this_process() -> Process:
    """Host and LOCAL_RANK of this process."""
    local_rank = os.environ.get("LOCAL_RANK")
    return Process(os.environ.get(HOST_NAME) or socket.gethostname(), int(local_rank) if local_rank else None)


@dataclass(frozen=True)
class JobSlots:
    """The slots that a job fills: physical rank by slot, and the names and numbers of slots of its nodes, in order."""

    process_of_slot: tuple[int, ...]
    nodes: tuple[tuple[str, int], ...]

    @property
    def node_sizes(self) -> list[int]:
        return [count for _, count in self.nodes]

    def logical_ranks(self, mapping: Mapping) -> tuple[int, ...]:
        """Logical rank by physical rank."""
        ranks = [0] * len(mapping)
        for slot, process in enumerate(self.process_of_slot):
            ranks[process] = mapping[slot]
        return tuple(ranks)


def find_slots(processes: Sequence[Process], topology: Topology | None = None) -> JobSlots:
    """The slots of these processes, which are given by physical rank.

    Raises:
        ValueError: two processes claim one slot, or the topology does not have a process's place.
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
