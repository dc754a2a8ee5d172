"""The results for each possible loss of a job, as a table.

Replicas differ only in the numbers of their microbatches. So the loss of a rank stands for the loss of the same
pipeline rank of any replica, and the loss of two ranks for the loss of these two of any replica, or of any two
replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.survivors import ReplicaRank, Survivors, without

COLUMNS = ("lost", "batch", "slower", "bound", "slower at least", "held before", "held after")


@dataclass(frozen=True)
class RankLoss:
    """Lost ranks, with the job without them, or with the reason why it cannot go on."""

    lost: tuple[ReplicaRank, ...]
    survivors: Survivors | None
    refusal: str | None = None

    def row(self) -> tuple[str, ...]:
        """Return the texts of `COLUMNS`. The held microbatches are listed by pipeline rank."""
        lost, found = " ".join(map(str, self.lost)), self.survivors
        if found is None:
            return lost, "ends", *[""] * (len(COLUMNS) - 2)
        return (
            lost,
            f"{found.seconds:.4g}",
            f"{found.slowdown - 1:.1%}",
            f"{found.bound:.4g}",
            f"{found.least_slowdown - 1:.1%}",
            " ".join(map(str, found.held_undisturbed)),
            " ".join(map(str, found.held)),
        )

    def to_dict(self) -> dict:
        """Return the loss for JSON."""
        lost = [str(each) for each in self.lost]
        if self.survivors is None:
            return {"lost": lost, "refusal": self.refusal}
        found = self.survivors
        return {
            "lost": lost,
            "seconds": found.seconds,
            "undisturbed": found.undisturbed,
            "bound": found.bound,
            "slowdown": found.slowdown,
            "held_undisturbed": list(found.held_undisturbed),
            "held": list(found.held),
            "sha256": found.schedule.sha256,
        }


def single_losses(num_ranks: int) -> list[tuple[ReplicaRank, ...]]:
    """Return the distinct losses of one rank: one for each pipeline rank."""
    return [(ReplicaRank(0, rank),) for rank in range(num_ranks)]


def double_losses(num_ranks: int) -> list[tuple[ReplicaRank, ...]]:
    """Return the distinct losses of two ranks: first of one replica, then of two replicas."""
    of_one = [(ReplicaRank(0, one), ReplicaRank(0, other)) for one, other in combinations(range(num_ranks), 2)]
    pairs = combinations_with_replacement(range(num_ranks), 2)
    return of_one + [(ReplicaRank(0, one), ReplicaRank(1, other)) for one, other in pairs]


def losses_of(
    schedule: PipelineSchedule,
    num_microbatches: int,
    *,
    num_replicas: int,
    lost: Iterable[Sequence[ReplicaRank]],
    costs: Costs | None = None,
    most_held: int | None = None,
) -> list[RankLoss]:
    """Return the result for each of the losses `lost`. The other arguments are those of `without`.

    If the job cannot go on after a loss, its result has the reason.

    Raises:
        ValueError: the job cannot go on after any of the losses; the reason is that of the first loss.
    """
    found, first = [], None
    for each in lost:
        try:
            left = without(
                schedule, num_microbatches, num_replicas=num_replicas, lost=each, costs=costs, most_held=most_held
            )
            found.append(RankLoss(tuple(each), left))
        except ValueError as error:
            first = first or error
            found.append(RankLoss(tuple(each), None, str(error)))
    if first is not None and all(each.survivors is None for each in found):
        raise first
    return found
