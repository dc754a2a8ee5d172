"""The process groups of a job whose ranks may be lost: formed for the ranks of an epoch, and given up with it.

Problem: a group that has lost a rank is broken, and threads of this process may wait in it. megatron.core makes only
the groups of a whole grid of ranks.

Solution: when a rank is lost, the connections of this process are broken and its groups are left behind. The ranks of
the next epoch form a new default group in their own part of the job's store, and megatron.core gets the groups of the
ranks that are left by their names.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta

import torch.distributed as dist

from megatron.backend.gloo import connecting_within, forget_devices
from megatron.pipeline.runtime.contract.meetings import forget_names
from megatron.pipeline.runtime.copied_stages import CopyRanks
from megatron.pipeline.runtime.failure.connections import (
    break_connections,
    interrupt_waits,
    leave_behind,
    open_connections,
)
from megatron.pipeline.runtime.failure.epochs import Epoch
from megatron.pipeline.runtime.failure.failure_board import silenced
from megatron.pipeline.runtime.stages.megatron.groups import (
    forget_groups,
    groups_of_layers,
    name_groups_of_survivors,
    rebind,
)
from megatron.pipeline.survivors import Survivors
from megatron.trainer.arguments.flags.config import TrainConfig, expert_tensor_size, ranks_of_place
from megatron.trainer.start_up.initialize import make_groups
from megatron.trainer.start_up.run import Run

_CONNECTING = 5.0
"""Seconds to connect, in addition to `--failure-timeout`; a rank that does not connect in this time is lost."""


class EpochGroups:
    """The groups of this process. Create it when the membership has opened its connections, and nothing else has.

    Args:
        args: the configuration with which the run began.

    Attributes:
        copies: the ranks over which the reductions of this rank go; None if all ranks are present.
    """

    def __init__(self, args: TrainConfig) -> None:
        self._args = args
        self._timeout = timedelta(minutes=args.distributed_timeout_minutes)
        self.copies: CopyRanks | None = None
        self._of_layers: dict[str, dist.ProcessGroup] | None = None  # the groups that the run's layers use
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
        connecting = timedelta(seconds=self._args.failure_timeout + _CONNECTING + searched)
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
                self._args.distributed_backend, store=store, timeout=self._timeout, rank=epoch.ranks.index(rank),
                world_size=len(epoch.ranks),
            )  # fmt: skip

    def name(self, args: TrainConfig, survivors: Survivors | None) -> None:
        """Give megatron.core its groups. Collective over the ranks of the process group.

        `survivors`: the program of these ranks; None if all ranks are present.
        """
        self.copies = None
        if survivors is None:
            forget_groups()
            make_groups(args)
            return
        own, ranks, size = dist.get_rank(), range(dist.get_world_size()), ranks_of_place(args)
        place = own // size
        tensor, sharing, cut = (
            args.tensor_model_parallel_size,
            args.expert_model_parallel_size,
            expert_tensor_size(args),
        )
        tensor_row, expert_row = (
            ranks[place * size + own % step : (place + 1) * size : step] for step in (tensor, cut * sharing)
        )
        copies = self.copies = CopyRanks.of(
            survivors.schedule, rank=own, ranks=ranks[own % size :: size], job=ranks, sharing=tensor_row,
            experts=expert_row if sharing > 1 else (),
        )  # fmt: skip
        name_groups_of_survivors(
            [ranks[each * size : (each + 1) * size] for each in sorted({each // size for each in copies.copies})],
            tensor_size=tensor, context_size=args.context_parallel_size, expert_tensor_size=cut,
            expert_size=sharing, pipeline_rank=survivors.ranks[place].rank,
            num_pipeline_ranks=args.pipeline_model_parallel_size,
        )  # fmt: skip

    def note_layers(self) -> None:
        """Note that the layers of the run were built with the present groups, and use these."""
        self._of_layers = groups_of_layers()

    def rebind(self, run: Run) -> None:
        """Let the layers and the optimizer of the run, which keep the groups of before, use the present groups."""
        rebind(run.chunks, run.optimizer, self._of_layers)
        self._of_layers = groups_of_layers()

    def leave_behind(self) -> None:
        """Give up all groups. Not collective."""
        if dist.is_initialized():
            leave_behind(self._timeout)
            dist.destroy_process_group()
        forget_devices()
