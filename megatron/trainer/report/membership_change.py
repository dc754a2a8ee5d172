"""A change of the ranks with which a run continues, in the forms of the log, `--metrics-file` and TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.documents import counted

if TYPE_CHECKING:
    from megatron.pipeline.survivors import Survivors

_MOST_NAMED = 8  # ranks that a title names


@dataclass(frozen=True, kw_only=True)
class MembershipChange:
    """A change by which a run has lost ranks, or lost ranks have returned.

    Attributes:
        iteration: the last iteration that is done; the run continues from there.
        lost: rank -> reason, for the ranks lost in this change, by their numbers in the whole job.
        joined: the ranks whose processes are new.
        ranks: all ranks with which the run continues.
        world_size: the number of ranks of the whole job.
        ranks_of_place: the number of consecutive `ranks` that share a place in the program.
        seconds: the duration of the recovery.
        survivors: the program of `ranks`; None: each replica has its own program again, as in a job without lost ranks.
        was_made_before: whether this program was made before the run began.
    """

    iteration: int
    lost: Mapping[int, str]
    joined: Sequence[int] = ()
    ranks: Sequence[int]
    world_size: int
    ranks_of_place: int = 1
    seconds: float
    survivors: Survivors | None = field(repr=False)
    was_made_before: bool = False

    @property
    def pipeline_ranks(self) -> tuple[int, ...] | None:
        """The pipeline rank of each of `ranks`; None: as in a job without lost ranks."""
        if self.survivors is None:
            return None
        return tuple(each.rank for each in self.survivors.ranks for _ in range(self.ranks_of_place))

    @property
    def places(self) -> list[tuple[int, str]]:
        """The first rank of each place, with its replica and pipeline rank, such as 1.2; [] without lost ranks."""
        if self.survivors is None:
            return []
        return list(zip(self.ranks[:: self.ranks_of_place], map(str, self.survivors.ranks), strict=True))

    def describe(self) -> str:
        """The log line about the change."""
        changes = [f"lost rank {rank} ({why})" for rank, why in sorted(self.lost.items())]
        changes += [f"rank {rank} is back" for rank in sorted(self.joined)]
        return (
            f"{', '.join(changes) or 'no rank is lost or back'}: {counted(len(self.ranks), 'rank')} of "
            f"{self.world_size} go on from iteration {self.iteration} after {self.seconds:.1f} s; {self._speed()}"
        )

    def _speed(self) -> str:
        if self.survivors is None:
            return "a batch takes as long as before any loss"
        return (
            f"a batch takes {self.survivors.slowdown:.2f} times as long as with all ranks, as simulated (at least "
            f"{self.survivors.least_slowdown:.2f}); program {self.survivors.schedule.short_hash}, made "
            f"{'before the run began' if self.was_made_before else 'now'}"
        )

    def title(self) -> str:
        """The end of a picture's title; empty for a job that has all its ranks."""
        if self.survivors is None:
            return ""
        absent = sorted({*range(self.world_size)}.difference(self.ranks))
        return (
            f"{counted(len(self.ranks), 'rank')} of {self.world_size}\n"
            f"{f'without {_named(absent)}; ' if absent else ''}last change after iteration {self.iteration}, "
            f"in {self.seconds:.1f} s"
        )

    def numbers(self) -> dict[str, float]:
        """The numbers for TensorBoard and Weights & Biases, by name in the metrics file."""
        whole = self.survivors is None
        return {
            "ranks": len(self.ranks),
            "recovery_seconds": self.seconds,
            "slowdown": 1.0 if whole else self.survivors.slowdown,
            "least_slowdown": 1.0 if whole else self.survivors.least_slowdown,
        }

    def record(self) -> dict[str, object]:
        """The object for the metrics file."""
        return {
            "iteration": self.iteration,
            "lost_ranks": {str(rank): why for rank, why in sorted(self.lost.items())},
            "joined_ranks": sorted(self.joined),
            **self.numbers(),
            **({} if self.survivors is None else {"program": self.survivors.schedule.short_hash}),
        }


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) > _MOST_NAMED:
        return f"{len(ranks)} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
