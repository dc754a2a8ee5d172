"""The process groups of a job whose ranks may be lost: formed for the ranks of an epoch, and given up with it.

Problem: a group that has lost a rank is broken, and threads of this process may wait in it.

Solution: when a rank is lost, the connections of this process are broken and its groups are left behind. The ranks of
the next epoch form a new default group in their own part of the job's store.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from megatron.backend.gloo import connecting_within, forget_devices
from megatron.pipeline.runtime.contract.meetings import forget_names
from megatron.pipeline.runtime.failure.connections import (
    break_connections,
    interrupt_waits,
    leave_behind,
    open_connections,
)
from megatron.pipeline.runtime.failure.epochs import Epoch
from megatron.pipeline.runtime.failure.failure_board import silenced

_CONNECTING = 5.0
"""Seconds to connect, in addition to `--failure-timeout`; a rank that does not connect in this time is lost."""


class GroupSettings(Protocol):
    """The flags of a run that its groups read."""

    failure_timeout: float
    distributed_backend: str
    distributed_timeout_minutes: int


class EpochGroups:
    """The groups of this process. Create it when the membership has opened its connections, and nothing else has."""

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings
        self._timeout = timedelta(minutes=settings.distributed_timeout_minutes)
        self._kept = open_connections()  # the store's connections, over which the ranks agree
        interrupt_waits()

    def break_waits(self) -> None:
        """End all waits of this process for other ranks with errors. May be called on any thread."""
        break_connections(kept=self._kept)

    def connecting(self, searched: float = 0.0, *, meeting: timedelta | None = None) -> AbstractContextManager[None]:
        """A context in which ranks that do not connect are lost.

        Args:
            searched: seconds that others may need in addition.
            meeting: how long the ranks of a group may take to come to it; None: as long as to connect.
        """
        connecting = timedelta(seconds=self._settings.failure_timeout + _CONNECTING + searched)
        return connecting_within(connecting, meeting=meeting)

    def form(self, epoch: Epoch, rank: int, store: dist.Store) -> None:
        """Form the process group of the epoch's ranks. Collective over these ranks.

        Args:
            rank: this process's rank, by its number when the job began.
            store: the epoch's part of the job's store.
        """
        forget_names()
        dist.distributed_c10d._world.group_count = 0  # after a failed attempt torch would continue its count of names
        store.set_timeout(self._timeout)
        with silenced():  # a loss meanwhile is reported in one sentence
            dist.init_process_group(
                self._settings.distributed_backend, store=store, timeout=self._timeout, rank=epoch.ranks.index(rank),
                world_size=len(epoch.ranks),
            )  # fmt: skip

    def leave_behind(self) -> None:
        """Give up all groups. Not collective."""
        if dist.is_initialized():
            leave_behind(self._timeout)
            dist.destroy_process_group()
        forget_devices()
