"""The place of a rank in a job of one or more pipelines, its groups, and the counts of losses that ranks exchange.

**Counts (`LossCounts`).** Problem: if losses are sums, a step divides by the count of its batch. Only the last stage
knows the count, and under `ftpipe` and `pipedream` the other stages step without taking part in a reduction.

Solution: the last stage's rank writes the count of each microbatch into the store at the microbatch's forward. A stage
steps after the backwards of the batch, which run after these forwards, so the stage finds all counts in the store.

**The end of a script.** A pipeline's thread that wakes up while the interpreter shuts down would abort the process, so
pipelines are closed before (`close_at_exit`).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, distributed_c10d, is_initialized

from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.runtime.contract.meetings import fresh_name
from megatron.pipeline.runtime.contract.stage import Microbatch
from megatron.pipeline.runtime.failure.agreement import gathered
from megatron.pipeline.runtime.stages.module.stage import Loss, by_microbatches, sum_and_count
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate


@dataclass(frozen=True)
class Ranks:
    """The global ranks of a job. `pipelines`: by replica, the ranks in pipeline order. `own`: this rank."""

    pipelines: tuple[tuple[int, ...], ...]
    own: int

    @property
    def replica(self) -> int:
        return next(index for index, pipeline in enumerate(self.pipelines) if self.own in pipeline)

    @property
    def pipeline(self) -> tuple[int, ...]:
        """The ranks of this rank's pipeline."""
        return self.pipelines[self.replica]

    @property
    def rank(self) -> int:
        """This rank's place in its pipeline."""
        return self.pipeline.index(self.own)

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks with the same stages."""
        return tuple(zip(*self.pipelines, strict=True))

    @property
    def job(self) -> tuple[int, ...]:
        """The ranks of all pipelines, ascending."""
        return tuple(sorted(rank for pipeline in self.pipelines for rank in pipeline))

    @property
    def is_whole_world(self) -> bool:
        return not dist.is_initialized() or len(self.job) == dist.get_world_size()


def find_ranks(group: Any, data_parallel_group: Any, replicas: int) -> Ranks:
    """The ranks of the job, with the place of this rank.

    Collective if `data_parallel_group` is given: every rank of the job must call it.

    Raises:
        ValueError: torch.distributed is not initialized although groups are given, or the groups contradict each other.
    """
    if replicas < 1:
        raise ValueError(f"a job cannot have {replicas} replicas; give 1 and more")
    if not dist.is_initialized():
        if group is not None or data_parallel_group is not None or replicas > 1:
            raise ValueError("there are several ranks, and no process group; call torch.distributed.init_process_group")
        return Ranks(((0,),), 0)
    own = dist.get_rank()
    if data_parallel_group is not None:
        return _beside_replicas(own, group, dist.get_process_group_ranks(data_parallel_group), replicas)
    if group is not None:
        if replicas > 1:
            raise ValueError(
                f"group names the ranks of one pipeline, and replicas={replicas} splits all ranks into {replicas} "
                "pipelines; give data_parallel_group in place of replicas"
            )
        return Ranks((tuple(dist.get_process_group_ranks(group)),), own)
    return consecutive_ranks(own, dist.get_world_size(), replicas)


def consecutive_ranks(own: int, world: int, replicas: int) -> Ranks:
    """The ranks of a job whose pipelines have consecutive ranks. Raises ValueError for unequal pipelines."""
    if world % replicas:
        raise ValueError(f"{world} ranks cannot be {replicas} equal pipelines; make replicas a divisor of {world}")
    size = world // replicas
    return Ranks(tuple(tuple(range(first, first + size)) for first in range(0, world, size)), own)


def _beside_replicas(own: int, group: Any, peers: Sequence[int], replicas: int) -> Ranks:
    """The ranks of a job whose ranks give their groups of replicas, `peers`.

    This rank's pipeline is `group`; without `group`, pipeline i consists of the i-th rank of each group of replicas.
    """
    if replicas not in (1, len(peers)):
        raise ValueError(
            f"replicas is {replicas}, and data_parallel_group has {len(peers)} ranks; leave one of them out"
        )
    found = gathered(list(peers), group)
    columns = list(dict.fromkeys(map(tuple, found)))
    if group is None:
        columns.sort()
    ranks = [rank for column in columns for rank in column]
    is_grid = len({len(column) for column in columns}) == 1 and len(set(ranks)) == len(ranks)
    if not is_grid or (group is not None and len(columns) != len(found)):
        raise ValueError(
            f"the groups of replicas {columns} form no grid; let each pipeline have one rank of each, and all as many"
        )
    return Ranks(tuple(zip(*columns, strict=True)), own)


class Groups:
    """The process groups of a pipeline, which carry no other traffic.

    Collective: every rank of the job must make them.

    Attributes:
        reductions: all ranks of the job, for the chain; None for a single rank.
        replicas: the ranks with the same stages as this rank, for the chain; None for a single rank.
        job: a gloo group of the job for the computing thread; None without torch.distributed.
        pipeline: a gloo group of this rank's pipeline for the computing thread; None without torch.distributed.
    """

    def __init__(self, ranks: Ranks, timeout: timedelta) -> None:
        self._ranks, self._timeout = ranks, timeout
        self._made: list[Any] = []
        self.reductions = self.of([ranks.job])
        self.replicas = self.of(ranks.columns)
        self.job = self._group([ranks.job], "gloo")
        self.pipeline = self.job if len(ranks.pipelines) == 1 else self._group(ranks.pipelines, "gloo")

    def of(self, sets: Sequence[Sequence[int]]) -> Any:
        """A process group for the chain, with the ranks of the set in `sets` that contains this rank.

        None if no set contains this rank, or if all sets have a single rank. Collective: every rank of the job must
        call it.
        """
        return self._group(sets, None) if max(map(len, sets)) > 1 else None

    def _group(self, sets: Sequence[Sequence[int]], backend: str | None) -> Any:
        if not dist.is_initialized():
            return None
        found = None
        for ranks in sets:
            is_member, whole = self._ranks.own in ranks, self._ranks.is_whole_world
            if not (is_member or whole):
                continue
            group = dist.new_group(
                list(ranks), timeout=self._timeout, backend=backend, use_local_synchronization=not whole
            )
            if is_member:
                found = group
            # Under local synchronization a name follows from the ranks and must not recur, so such a group stays.
            if is_member and whole:
                self._made.append(group)
        return found

    def close(self) -> None:
        while self._made:
            dist.destroy_process_group(self._made.pop())


class LossCounts:
    """The counts of losses, which ranks exchange through the store.

    A call with a batch and n returns the count of the batch's first n microbatches, as the mean over the replicas. If
    losses are means, or a norm is computed before each step, no count is written, and a microbatch counts as 1.
    """

    def __init__(self, ranks: Ranks) -> None:
        store = distributed_c10d._get_default_store() if is_initialized() else HashStore()
        self._store, self._ranks = PrefixStore(fresh_name("loss counts", ranks.job), store), ranks
        self._read: dict[tuple[int, int], float] = {}  # by batch and position, over all replicas
        self._written: dict[int, list[str]] = {}  # batch -> keys
        self._are_said = False

    def expect(self, counts: Sequence[float | None], weights: WeightPolicy, updates: Iterable[ModuleUpdate]) -> None:
        """Set the expected count of a microbatch, before the first batch, on all ranks.

        Args:
            counts: by rank, the count of its pipeline's first loss; None if losses are means.
            weights: the policy, which decides whether counts are written.
            updates: the updates that have not stepped, whose predictions divide by the expected count.

        Raises ValueError if some losses are means and others sums.
        """
        if None not in counts:
            self._are_said = weights.updates_alone
            for update in updates:
                update.mean_count = sum(counts) / len(counts) or None
        elif any(count is not None for count in counts):
            raise ValueError("the loss returns means in some replicas and (sum, count) in others; give all the same")

    def say(self, microbatch: Microbatch, loss: Loss) -> None:
        """Write the count of a microbatch into the store. The rank of the last stage calls it after the forward."""
        if self._are_said:
            _, count = sum_and_count(loss)
            key = self._key(microbatch.batch, microbatch.position, self._ranks.replica)
            self._store.set(key, repr(float(count)))
            self._written.setdefault(microbatch.batch, []).append(key)

    def __call__(self, batch: int, num_microbatches: int) -> float:
        if not self._are_said:
            return by_microbatches(batch, num_microbatches)
        replicas = range(len(self._ranks.pipelines))
        for position in range(num_microbatches):
            if (batch, position) not in self._read:
                found = self._store.multi_get([self._key(batch, position, replica) for replica in replicas])
                self._read[batch, position] = sum(map(float, found))
        return sum(self._read[batch, position] for position in range(num_microbatches)) / len(replicas)

    def forget(self, batch: int) -> None:
        """Remove the counts of a batch after all ranks have stepped with the batch's gradients."""
        for key in self._written.pop(batch, ()):
            self._store.delete_key(key)
        for each in [each for each in self._read if each[0] <= batch]:
            del self._read[each]

    @staticmethod
    def _key(batch: int, position: int, replica: int) -> str:
        return f"{batch}/{position}/{replica}"


_running: dict[Any, bool] = {}  # Pipeline -> whether closing it needs the process group


def close_at_exit(pipeline: Any, *, needs_group: bool) -> None:
    """Close `pipeline` when the script ends. `needs_group`: whether closing it needs the process group."""
    _running[pipeline] = needs_group


def leave_at_exit(pipeline: Any) -> None:
    """Do not close `pipeline` when the script ends: it is closed already, or its failure ends the process."""
    _running.pop(pipeline, None)


@atexit.register
def _close_all() -> None:
    """Close all pipelines, unless the script ends by an uncaught exception, after which other ranks may not close.

    After an exception the threads of a failed pipeline would abort the process, so the process ends at once.
    """
    if getattr(sys, "last_value", None) is not None:
        if any(each.has_failed for each in _running):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
    else:
        for pipeline in [each for each, needs_group in _running.items() if dist.is_initialized() or not needs_group]:
            with suppress(Exception):
                pipeline.close()
