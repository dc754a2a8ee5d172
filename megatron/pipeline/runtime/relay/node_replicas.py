"""The replicas of one part of the model that run on the same node, and their shared memory.

Problem: replicas have the same weights, masters and moments. With weights on the host, d replicas on a node would hold
d copies of them in host memory.

Solution: the ranks of a data-parallel group exchange the names of their hosts over the job's store. The replicas on one
host map the same memory. Each of them can read all of it and writes its share. The memory is an anonymous file
(``memfd``). The first replica makes it, the others open it through ``/proc``, and afterwards no name and no descriptor
of it is left. So the kernel frees the memory when the last process ends for any reason. Nothing stays in /dev/shm, and
the size of /dev/shm is no limit.

`barrier` waits for all replicas. If a process has ended, the connection breaks and the wait ends at once. If a process
does not join in time, the error names its rank.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.backend.streams import streams_of
from megatron.documents import GIB
from megatron.pipeline.runtime.contract.meetings import fresh_name

_OF_THE_TIMEOUT = 0.8  # the error of a barrier has the late rank, so it must come before errors of other waits
_STEP = 8  # int64s between the counters of two replicas: a cache line


class NodeReplicas:
    """This replica and the other replicas on its host. The constructor is collective over `ranks`.

    If some ranks make several objects, they must make them in the same order.

    Args:
        ranks: the global ranks that hold the same part of the model, on any host.
        host: the name of this host; None: its host name.
        device: on CUDA, shared memory is pinned for this device.
        timeout: how long a rank waits for the others.

    Attributes:
        ranks: the ranks on this host, ascending.
        index: the position of this rank in `ranks`.
        group: a gloo group of `ranks`; None for a single rank.
        host, timeout: as given.

    Raises:
        ValueError: processes with the same host name cannot map each other's memory.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        host: str | None = None,
        device: torch.device | str = "cpu",
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.host = host or socket.gethostname()
        self._streams = streams_of(torch.device(device))
        self.timeout = timeout
        self.ranks = _on_one_host(sorted(ranks), self.host, timeout)
        self.index = self.ranks.index(_rank())
        self.group = self._connect()
        self._entered = self.buffer((len(self.ranks) * _STEP,), torch.int64)[::_STEP]  # replica -> collectives entered

    @property
    def size(self) -> int:
        return len(self.ranks)

    def again(self) -> NodeReplicas:
        """The same replicas with another connection, for another thread. Collective."""
        return NodeReplicas(self.ranks, host=self.host, device=self._streams.device, timeout=self.timeout)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed host memory that all replicas have mapped; private memory for a single replica. Collective."""
        count = torch.Size(shape).numel()
        if self.size == 1 or not count:
            return self._streams.kept_host_buffer(shape, dtype)
        return self._streams.pin_mapping(self._map(count, dtype).view(shape))

    def barrier(self) -> None:
        """Wait until all replicas have entered the barrier. Afterwards each sees what the others wrote before it.

        Raises:
            RuntimeError: a replica has ended or has not joined in time. The message has its rank.
        """
        if self.group is not None:
            self.together(lambda: self.group.barrier().wait())

    def together(self, collective: Callable[[], object]) -> None:
        """Call `collective`, on all replicas in the same order as other collectives.

        Raises:
            RuntimeError: a replica has ended or has not joined in time. The message has its rank.
        """
        self._entered[self.index] += 1
        try:
            collective()
        except RuntimeError as error:
            mine, entered = self._entered[self.index].item(), self._entered.tolist()
            late = [str(rank) for rank, count in zip(self.ranks, entered, strict=True) if count < mine]
            names = f"rank{'s' * (len(late) > 1)} {', '.join(late)}" if late else "another replica"
            raise RuntimeError(f"{names} did not join the replicas on {self.host}: {error}") from error

    def _connect(self) -> dist.ProcessGroupGloo | None:
        if self.size == 1:
            return None
        store = meeting_of("group", self.ranks)
        return dist.ProcessGroupGloo(store, self.index, self.size, _OF_THE_TIMEOUT * self.timeout)

    def _map(self, count: int, dtype: torch.dtype) -> Tensor:
        """Map the same memory on all replicas. The first replica makes it and closes its descriptor afterwards.

        Raises:
            ValueError: a replica cannot map the memory; raised on all replicas.
        """
        said, file, problem, memory = torch.zeros(3, dtype=torch.int64), -1, None, None
        num_bytes = count * dtype.itemsize
        try:
            if self.index == 0:
                token = secrets.randbits(62)
                file = os.memfd_create(_name(token))
                os.ftruncate(file, num_bytes)
                memory = _mapped(os.getpid(), file, token, count, dtype)
                said = torch.tensor([os.getpid(), file, token])
        except (OSError, RuntimeError) as error:
            problem = f"{num_bytes / GIB:.3g} GiB cannot be mapped ({error})"
        self.group.broadcast([said], dist.BroadcastOptions()).wait()  # from the first
        try:
            if self.index > 0 and said[0] > 0:
                memory = _mapped(*said.tolist(), count, dtype)
        except (OSError, RuntimeError) as error:
            problem = f"the memory of rank {self.ranks[0]} cannot be opened ({error})"
        failed = torch.zeros(self.size, dtype=torch.int64)
        failed[self.index] = problem is not None
        self.group.allreduce([failed]).wait()  # now all have opened the first replica's descriptor
        if file >= 0:
            os.close(file)
        if failed.any():
            ranks = ", ".join(str(rank) for rank, each in zip(self.ranks, failed.tolist(), strict=True) if each)
            raise ValueError(
                f"replicas on {self.host} cannot share its memory: {problem or f'it failed on rank {ranks}'}; run them "
                "as one user in one container, or give each a host name of its own (PIPELINE_HOST_NAME in training), "
                "with which each keeps a copy"
            )
        return memory


def _name(token: int) -> str:
    return f"replicas-{token:x}"


def _mapped(process: int, file: int, token: int, count: int, dtype: torch.dtype) -> Tensor:
    """Map the memory behind the descriptor `file` of a process, without keeping a descriptor.

    Raises:
        OSError: the descriptor cannot be read or belongs to another file.
        RuntimeError: the memory cannot be mapped.
    """
    path = f"/proc/{process}/fd/{file}"
    if f"memfd:{_name(token)}" not in os.readlink(path):  # another host with the same name
        raise OSError(f"{path} is another file")
    return torch.from_file(path, shared=True, size=count, dtype=dtype)


def _on_one_host(ranks: list[int], host: str, timeout: timedelta) -> list[int]:
    """The ranks in `ranks` whose host has the name `host`, in the same order."""
    if len(ranks) == 1:
        return ranks
    store = meeting_of("host", ranks)
    store.set(str(_rank()), host)
    keys = [str(rank) for rank in ranks]
    store.wait(keys, timeout)
    return [rank for rank, its in zip(ranks, store.multi_get(keys), strict=True) if its.decode() == host]


def meeting_of(what: str, ranks: Sequence[int]) -> dist.PrefixStore:
    """A new store for these ranks and the purpose `what`. All ranks must call it the same number of times."""
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(fresh_name(f"node_replicas/{what}", ranks), store)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
