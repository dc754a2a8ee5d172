"""Where a rank stands in a job of one or more pipelines, and the groups that it is in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """Global ranks. `pipeline`: of this rank's pipeline, in its order. `replicas`: those that have this rank's stages,
    itself among them, by replica. `job`: of all pipelines. `own`: this one.
    """

    pipeline: tuple[int, ...]
    replicas: tuple[int, ...]
    job: tuple[int, ...]
    own: int

    @property
    def rank(self) -> int:
        """In the pipeline."""
        return self.pipeline.index(self.own)

    @property
    def replica(self) -> int:
        return self.replicas.index(self.own)

    @property
    def is_whole_world(self) -> bool:
        return not dist.is_initialized() or len(self.job) == dist.get_world_size()


def find_ranks(group: Any, data_parallel_group: Any, replicas: int) -> Ranks:
    """Where this rank stands; collective where groups of replicas are given.

    Raises:
        ValueError: groups without a process group, or that do not go together.
    """
    if replicas < 1:
        raise ValueError(f"a job cannot have {replicas} replicas; give 1 and more")
    if not dist.is_initialized():
        if group is not None or data_parallel_group is not None or replicas > 1:
            raise ValueError("there are several ranks, and no process group; call torch.distributed.init_process_group")
        return Ranks((0,), (0,), (0,), 0)
    own = dist.get_rank()
    if data_parallel_group is not None:
        return _beside_replicas(own, group, dist.get_process_group_ranks(data_parallel_group), replicas)
    if group is not None:
        if replicas > 1:
            raise ValueError(
                f"group says which ranks are one pipeline, and replicas={replicas} how often there is one among all "
                "ranks; give data_parallel_group in its place"
            )
        pipeline = tuple(dist.get_process_group_ranks(group))
        return Ranks(pipeline, (own,), pipeline, own)
    world = dist.get_world_size()
    if world % replicas:
        raise ValueError(f"{world} ranks cannot be {replicas} equal pipelines; make replicas a divisor of {world}")
    size = world // replicas
    first = own // size * size
    return Ranks(tuple(range(first, first + size)), tuple(range(own % size, world, size)), tuple(range(world)), own)


def _beside_replicas(own: int, group: Any, peers: Sequence[int], replicas: int) -> Ranks:
    """A pipeline is `group`, or else the ranks of one place in each group of replicas."""
    if replicas not in (1, len(peers)):
        raise ValueError(
            f"replicas is {replicas}, and data_parallel_group has {len(peers)} ranks; leave one of them out"
        )
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, list(peers), group=group)
    columns = list(dict.fromkeys(map(tuple, found)))
    if group is not None:
        pipeline = tuple(dist.get_process_group_ranks(group))
    else:
        columns.sort()
        if len({len(column) for column in columns}) > 1:
            raise ValueError(
                f"the groups of replicas {columns} have different sizes; give each pipeline one rank of each"
            )
        pipeline = tuple(column[peers.index(own)] for column in columns)
    job = tuple(sorted(rank for column in columns for rank in column))
    if len(job) != len(set(job)) or len(job) != len(pipeline) * len(peers):
        raise ValueError(
            f"pipeline {list(pipeline)} does not have one rank of each of the groups of replicas {columns}; give "
            "groups that form a grid"
        )
    return Ranks(pipeline, tuple(peers), job, own)


class Groups:
    """The pipeline's own groups, so that nobody else's traffic meets theirs. Collective over the job.

    `reductions`: all ranks of the job, for the chain. `replicas`: this rank's, for the chain. Both are None for a
    single rank. `job`, `pipeline`: gloo groups for the thread that computes; None without torch.distributed.
    """

    def __init__(self, ranks: Ranks, timeout: timedelta) -> None:
        self._made: list[Any] = []
        self._timeout = timeout
        self.reductions = self.of(ranks.job)
        self.replicas = self.of(ranks.replicas)
        self.job = self._group(ranks.job, "gloo")
        self.pipeline = self.job if len(ranks.replicas) == 1 else self._group(ranks.pipeline, "gloo")

    def of(self, ranks: Sequence[int]) -> Any:
        """Another one, for the chain; collective over these ranks. None for a single rank."""
        return self._group(ranks, None) if len(ranks) > 1 else None

    def _group(self, ranks: Sequence[int], backend: str | None) -> Any:
        if not dist.is_initialized():
            return None
        group = dist.new_group(list(ranks), timeout=self._timeout, backend=backend, use_local_synchronization=True)
        self._made.append(group)
        return group

    def close(self) -> None:
        while self._made:
            dist.destroy_process_group(self._made.pop())
