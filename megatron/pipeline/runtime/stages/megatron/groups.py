"""Process groups for the reduction chain alone.

Problem: the chain runs on a thread of its own beside forwards and backwards that use megatron.core's groups (tensor
parallelism). Two threads on one group would let its collectives interleave differently on different ranks.

Solution: duplicates of the groups, used by the chain only, built directly on the job's store under names that all
members agree on. Every rank makes them in the same order (data, tensor, embedding, world) and only members take part,
so start-up neither deadlocks nor grows with the number of groups.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from megatron import backend
from megatron.backend.streams import shut_down, streams_of
from megatron.core import parallel_state
from megatron.pipeline.communicators import COMMUNICATOR_CTAS

DEFAULT_TIMEOUT = timedelta(minutes=10)
_num_created: Counter[tuple] = Counter()  # per name and ranks: part of the names, so that a later group is another


class ChainGroup:
    """One group of the chain; its collectives block until they are done (NCCL: make the current stream wait)."""

    def __init__(self, name: str, ranks: list[int], *, backend_name: str, timeout: timedelta) -> None:
        key = (name, *ranks)
        _num_created[key] += 1
        prefix = f"reduction_chain/{name}/{'-'.join(map(str, ranks))}/{_num_created[key]}"
        store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self.rank = ranks.index(dist.get_rank())
        self.size = len(ranks)
        self.uses_nccl = backend_name == "nccl"
        if self.uses_nccl:
            self.process_group = streams_of(backend.device()).communicator(
                store,
                self.rank,
                self.size,
                max_ctas=COMMUNICATOR_CTAS["chain"],
                timeout=2 * timeout,  # the wait for the chain times out first, and names the reduction
            )
        else:
            self.process_group = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)

    def all_reduce(self, tensor: Tensor, operation: dist.ReduceOp = dist.ReduceOp.SUM) -> None:
        """Reduce `tensor` in place over the group."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        with _Staged(tensor, self.uses_nccl) as staged:
            self.process_group.allreduce([staged], options).wait()

    def reduce_scatter(self, tensor: Tensor) -> None:
        """Sum a flat `tensor` over the group; afterwards only this rank's equal share of it is valid."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.SUM
        with _Staged(tensor, self.uses_nccl) as staged:
            share = staged.chunk(self.size)[self.rank]
            self.process_group._reduce_scatter_base(share, staged, options).wait()

    def close(self) -> None:
        """End the group when all its work is done. Collective over its members."""
        if self.uses_nccl:
            shut_down(self.process_group)
        self.process_group = None  # gloo's sockets and threads end with the last reference


class _Staged:
    """A tensor in memory on which its group works: for gloo that of the host."""

    def __init__(self, tensor: Tensor, uses_nccl: bool) -> None:
        self._tensor = tensor
        self._staged = tensor if uses_nccl or not tensor.is_cuda else tensor.cpu()

    def __enter__(self) -> Tensor:
        return self._staged

    def __exit__(self, *exception) -> None:
        if self._staged is not self._tensor:
            self._tensor.copy_(self._staged)


@dataclass
class ChainGroups:
    """The chain's own groups; None where the group has one member (or this rank is none)."""

    data: ChainGroup | None
    tensor: ChainGroup | None
    embedding: ChainGroup | None
    world: ChainGroup | None

    @classmethod
    def create(cls, *, timeout: timedelta = DEFAULT_TIMEOUT) -> "ChainGroups":
        """Duplicate megatron.core's current groups. Collective: every rank of the job calls it once."""
        backend_name = "nccl" if uses_nccl() else "gloo"

        def duplicate(name: str, ranks: list[int]) -> ChainGroup | None:
            if len(ranks) < 2 or dist.get_rank() not in ranks:
                return None
            return ChainGroup(name, ranks, backend_name=backend_name, timeout=timeout)

        return cls(
            data=duplicate("data", _ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))),
            tensor=duplicate("tensor", _ranks(parallel_state.get_tensor_model_parallel_group())),
            embedding=duplicate("embedding", _ranks(parallel_state.get_embedding_group(check_initialized=False))),
            world=duplicate("world", list(range(dist.get_world_size()))),
        )

    def close(self) -> None:
        """End all groups while drained. Collective over all ranks."""
        for group in (self.data, self.tensor, self.embedding, self.world):
            if group is not None:
                group.close()


def uses_nccl() -> bool:
    """Whether the job's collectives go over NCCL."""
    return "nccl" in dist.get_backend() and backend.is_cuda()


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)
