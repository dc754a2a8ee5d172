"""Stages that are copies of a stage of the model: the ranks over which their reductions go.

In a program of all replicas each microbatch goes through one copy of each stage of the model. Stages do not know that
they are copies: they name each other by the stages of the model, and `exchange` finds the copy that has a microbatch.
Copies share the microbatches of a batch. So their gradients are parts of one mean, and updates sum them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.program.copies import ranks_of_copies
from megatron.pipeline.schedules import PipelineSchedule


@dataclass(frozen=True)
class CopyRanks:
    """The global ranks over which the reductions of a rank go in a program with copies.

    Attributes:
        copies: the ranks with copies of this rank's stages, ascending in the pipeline, with this rank. REDUCE_GRAD sums
            their gradients. The first of them counts for all where something must be counted once.
        tied: the ranks with copies of the stages that share an embedding, in the order of the pipeline; empty if this
            rank is none of them, or has both stages.
        job: all ranks of the job that are left, for the norm, the losses and the stop requests.
    """

    copies: tuple[int, ...]
    tied: tuple[int, ...]
    job: tuple[int, ...]

    @classmethod
    def of(
        cls, schedule: PipelineSchedule, *, rank: int, ranks: Sequence[int], job: Sequence[int] | None = None
    ) -> CopyRanks:
        """Return those of a rank.

        Args:
            schedule: a schedule with copies.
            rank: the global rank.
            ranks: global ranks of the pipeline in pipeline order.
            job: all ranks of the job that are left, where tensor ranks have pipelines of their own; None: `ranks`.

        Raises:
            ValueError: the stages of a rank have copies on different ranks.
        """
        copies = ranks_of_copies(schedule.copies, schedule.rank_of_stage, list(ranks).index(rank))
        tied = sorted({*schedule.tied_ranks}) if schedule.tied_embeddings else []
        between = tuple(ranks[each] for each in tied) if tied != list(copies) else ()
        return cls(
            copies=tuple(ranks[each] for each in copies),
            tied=between if rank in between else (),
            job=tuple(ranks if job is None else job),
        )

    def is_first(self, rank: int) -> bool:
        """Whether a rank is the first with a copy of its stages."""
        return self.copies[0] == rank
