"""The groups of an epoch in a run over megatron.core, which has groups of its own, and layers that keep these.

Problem: megatron.core makes only the groups of a whole grid of ranks. Its layers keep the groups with which they were
built.

Solution: megatron.core gets the groups of the ranks that are left by their names, and layers are given others.
"""

from __future__ import annotations

import torch.distributed as dist

from megatron.pipeline.runtime.copied_stages import CopyRanks
from megatron.pipeline.runtime.stages.megatron.groups import (
    forget_groups,
    groups_of_layers,
    name_groups_of_survivors,
    rebind,
)
from megatron.pipeline.survivors import Survivors
from megatron.trainer.arguments.flags.config import TrainConfig, expert_tensor_size, ranks_of_place
from megatron.trainer.run.epoch_groups import EpochGroups
from megatron.trainer.start_up.initialize import make_groups
from megatron.trainer.start_up.run import Run


class CoreGroups(EpochGroups):
    """The groups of this process.

    Args:
        args: the configuration with which the run began.

    Attributes:
        copies: the ranks over which the reductions of this rank go; None if all ranks are present.
    """

    def __init__(self, args: TrainConfig) -> None:
        super().__init__(args)
        self.copies: CopyRanks | None = None
        self._of_layers: dict[str, dist.ProcessGroup] | None = None  # the groups that the run's layers use

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
