"""The replicas of one part of the model that run on one node, and the memory that they share.

Problem: replicas hold the same weights, masters and moments. On the host, d replicas of a node would hold d copies of
what is large enough to have been moved there.

Solution: the ranks of a data-parallel group tell each other their hosts' names over the job's store; those of one host
map the same memory, which each of them can read whole, and of which each writes its share. It is an anonymous file
(``memfd``): the first replica makes it, the others open it through ``/proc``, and then it has no name and no
descriptor anywhere. So the kernel frees it with the last process, however that ends, nothing can be left in /dev/shm,
and the size of /dev/shm is no limit.

Where one has to wait for all, `barrier` does. A process that is gone breaks the connection at once; one that does not
come is waited for as long as for any transfer, and then named.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.backend.streams import streams_of

_num_made: Counter[tuple[int, ...]] = Counter()  # part of the names, so that later ones meet apart from these
_OF_THE_TIMEOUT = 0.8  # computations that wait for what stands behind a barrier give up later: it knows who is late
_STEP = 8  # int64s from one replica's counter to the next one's: a cache line


class NodeReplicas:
    """This replica and the other replicas on its host.

    `ranks`: the global ranks that hold the same part of the model, on any hosts; each of them makes this, in the same
    order as any others of these ranks. `host`: what to call this host; None: its host name. `device`: on CUDA, shared
    memory is pinned for it.

    Attributes:
        ranks: those on this host, ascending; `index`: of this one among them.
        group: that of these ranks, over gloo; None for a single one. timeout: how long a rank waits for the others.

    Raises:
        ValueError: processes that say they are on one host cannot map each other's memory.
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
        self._entered = self.buffer((len(self.ranks) * _STEP,), torch.int64)[::_STEP]  # by replica: its barriers

    @property
    def size(self) -> int:
        return len(self.ranks)

    def again(self) -> NodeReplicas:
        """The same replicas over another connection, for another thread. Collective."""
        return NodeReplicas(self.ranks, host=self.host, device=self._streams.device, timeout=self.timeout)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory, zeroed, which all replicas have mapped; of this process alone where there is one. Collective."""
        count = torch.Size(shape).numel()
        if self.size == 1 or not count:
            return self._streams.kept_host_buffer(shape, dtype)
        return self._streams.pin_mapping(self._map(count, dtype).view(shape))

    def barrier(self) -> None:
        """Wait until all replicas have come here; what they wrote before is seen behind it.

        Raises:
            RuntimeError: one is gone, or has not come in time; says which.
        """
        if self.group is not None:
            self.together(lambda: self.group.barrier().wait())

    def together(self, collective: Callable[[], object]) -> None:
        """Call `collective` on all replicas, in the same order as other collectives. Raises as `barrier`."""
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
        """Memory of the first replica, in all. Its descriptor is closed when all have mapped it."""
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
            problem = f"{num_bytes / 2**30:.3g} GiB cannot be mapped ({error})"
        self.group.broadcast([said], _root(0)).wait()
        try:
            if self.index > 0 and said[0] > 0:
                memory = _mapped(*said.tolist(), count, dtype)
        except (OSError, RuntimeError) as error:
            problem = f"the memory of rank {self.ranks[0]} cannot be opened ({error})"
        failed = torch.zeros(self.size, dtype=torch.int64)
        failed[self.index] = problem is not None
        self.group.allreduce([failed]).wait()  # the first replica's descriptor is not needed any more, either
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
    """The memory behind a process's descriptor; keeps no descriptor. OSError, RuntimeError: it cannot be had."""
    path = f"/proc/{process}/fd/{file}"
    if f"memfd:{_name(token)}" not in os.readlink(path):  # hosts that only have the same name
        raise OSError(f"{path} is another file")
    return torch.from_file(path, shared=True, size=count, dtype=dtype)


def _root(rank: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def _on_one_host(ranks: list[int], host: str, timeout: timedelta) -> list[int]:
    """Those of `ranks` that say they are on `host`."""
    if len(ranks) == 1:
        return ranks
    store = meeting_of("host", ranks)
    store.set(str(_rank()), host)
    keys = [str(rank) for rank in ranks]
    store.wait(keys, timeout)
    return [rank for rank, its in zip(ranks, store.multi_get(keys), strict=True) if its.decode() == host]


def meeting_of(what: str, ranks: Sequence[int]) -> dist.PrefixStore:
    """A fresh store for these ranks and this purpose; each rank has to call it equally often."""
    key = (what, *ranks)
    _num_made[key] += 1
    prefix = f"node_replicas/{what}/{'-'.join(map(str, ranks))}/{_num_made[key]}"
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
