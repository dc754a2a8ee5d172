"""The ranks over which reductions go where stages are copies of a stage of the model.

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
        copies: the ranks with copies of this rank's stages, this rank included, ascending in the pipeline, and the
            ranks with which each of them shares a microbatch. REDUCE_GRAD sums their gradients. Quantities that must be
            counted once are counted by the first of these ranks.
        tied: the ranks with copies of the two stages that share an embedding, in the order of the pipeline, and the
            ranks with which each of them shares a microbatch; empty if this rank has neither stage, or both.
        job: all ranks of the job that are left, for the norm, the losses and the stop requests.
        sharing: how many ranks share each microbatch of the program. They have parts of a sequence (context
            parallelism), or sequences of their own (several replicas that share out experts).
        same_experts: the ranks with copies that have the experts of this rank; empty if no ranks share out experts.
    """

    copies: tuple[int, ...]
    tied: tuple[int, ...]
    job: tuple[int, ...]
    sharing: int = 1
    same_experts: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        schedule: PipelineSchedule,
        *,
        rank: int,
        ranks: Sequence[int],
        job: Sequence[int] | None = None,
        sharing: Sequence[int] = (),
        experts: Sequence[int] = (),
    ) -> CopyRanks:
        """Return the ranks over which the reductions of a rank go.

        Args:
            schedule: a schedule with copies.
            rank: the global rank.
            ranks: global ranks of the pipeline in pipeline order.
            job: all ranks of the job that are left, where tensor ranks have pipelines of their own; None: `ranks`.
            sharing: the ranks that share the microbatches of this rank, ascending, with this rank; empty: it shares
                none. At every rank of the pipeline, the ranks at the same distances share its microbatches.
            experts: the ranks that share the microbatches of this rank and have the same experts, in the same way;
                empty: no ranks share out experts.

        Raises:
            ValueError: the stages of a rank have copies on different ranks.
        """
        copies = ranks_of_copies(schedule.copies, schedule.rank_of_stage, list(ranks).index(rank))
        tied = sorted({*schedule.tied_ranks}) if schedule.tied_embeddings else []
        offsets = [each - rank for each in sharing or (rank,)]
        between = tuple(ranks[each] + offset for each in tied for offset in offsets) if tied != list(copies) else ()
        return cls(
            copies=tuple(ranks[each] + offset for each in copies for offset in offsets),
            tied=between if rank in between else (),
            job=tuple(ranks if job is None else job),
            sharing=len(offsets),
            same_experts=tuple(ranks[each] + other - rank for each in copies for other in experts),
        )

    def is_first(self, rank: int) -> bool:
        """Whether a rank is the first with a copy of its stages."""
        return rank == self.copies[0]
