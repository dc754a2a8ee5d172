"""Process groups for the reduction chain alone.

Problem: the chain runs on a thread of its own beside forwards and backwards that use megatron.core's groups (tensor
parallelism). Two threads on one group would let its collectives interleave differently on different ranks.

Solution: duplicates of the groups, used by the chain only. Every rank makes them in the same order; with local
synchronisation only members take part, so start-up cost does not grow with the world and no order can deadlock.
"""

from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import ProcessGroup


@dataclass
class ChainGroups:
    """The chain's own groups; None where the group has one member (or this rank is none)."""

    data: ProcessGroup | None
    tensor: ProcessGroup | None
    embedding: ProcessGroup | None
    world: ProcessGroup | None
    _all: list[ProcessGroup] = field(default_factory=list)

    @classmethod
    def create(cls, *, timeout: timedelta | None = None) -> "ChainGroups":
        """Duplicate megatron.core's current groups. Collective: every rank of the job calls it once."""
        created: list[ProcessGroup] = []

        def duplicate(ranks: list[int], name: str) -> ProcessGroup | None:
            if len(ranks) < 2 or dist.get_rank() not in ranks:
                return None
            created.append(
                dist.new_group(
                    ranks, timeout=timeout, use_local_synchronization=True, group_desc=f"reduction_chain_{name}"
                )
            )
            return created[-1]

        embedding = parallel_state.get_embedding_group(check_initialized=False)
        return cls(
            data=duplicate(_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True)), "data"),
            tensor=duplicate(_ranks(parallel_state.get_tensor_model_parallel_group()), "tensor"),
            embedding=duplicate(_ranks(embedding), "embedding"),
            world=duplicate(list(range(dist.get_world_size())), "world"),
            _all=created,
        )

    def destroy(self) -> None:
        """Release the groups (collective among their members)."""
        for group in self._all:
            dist.destroy_process_group(group)
        self._all.clear()


def _ranks(group: ProcessGroup | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)
