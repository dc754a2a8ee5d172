"""The programs of a job that goes on without ranks that it lost, each proved, with its time and a lower bound."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from megatron.documents import counted
from megatron.pipeline.check import ProgramError
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule
from megatron.pipeline.schedules.program_schedule import ProgramSchedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.survivors.order import Ordered, Work, bound, busiest, drained_orders, limits, steady_orders
from megatron.pipeline.survivors.sharing import ReplicaRank, Sharing

__all__ = ["ReplicaRank", "Survivors", "without"]


@dataclass(frozen=True)
class Survivors:
    """A job without its lost ranks.

    Attributes:
        schedule: the program of all ranks that are left, proved for any number of batches. Its ranks are `ranks`, and
            its microbatches are those of all replicas, in the order of the data.
        ranks: the ranks that are left.
        lost: the lost ranks.
        seconds: the simulated time of a batch: drained or, if the weights need no drain, in the steady state.
        undisturbed: the same of a replica while no rank is lost.
        bound: a time of a batch that no order of these computations undercuts.
    """

    schedule: ProgramSchedule
    ranks: tuple[ReplicaRank, ...]
    lost: tuple[ReplicaRank, ...]
    seconds: float
    undisturbed: float
    bound: float

    @property
    def slowdown(self) -> float:
        """The time of a batch over that of the undisturbed job."""
        return self.seconds / self.undisturbed


def without(
    schedule: PipelineSchedule,
    num_microbatches: int,
    *,
    num_replicas: int,
    lost: Iterable[ReplicaRank],
    costs: Costs | None = None,
    most_held: int | None = None,
) -> Survivors:
    """Return the program of the ranks that are left.

    Args:
        schedule: the schedule of each replica while no rank is lost.
        num_microbatches: the number of microbatches of a replica in each batch.
        num_replicas: the data parallel degree.
        lost: the lost ranks.
        costs: the costs of the model's stages and edges; default: a forward takes 1 and a backward 2.
        most_held: the number of microbatches whose activations a rank may hold, over its stages; None: as many as the
            fullest rank holds while no rank is lost.

    Raises:
        ValueError: a stage has no rank left, or the schedule cannot go on without a rank (see `Sharing`), or the ranks
            that are left would have to hold more.
    """
    costs = costs or Costs()
    sharing = Sharing(schedule, num_microbatches, num_replicas, frozenset(lost))
    found = _drained if schedule.weights.drains else _steady
    program, seconds, least = found(sharing, costs, most_held)
    limit = max(schedule.max_saved_on_rank(_settled(schedule, num_microbatches))) if most_held is None else most_held
    if (needed := max(program.max_saved_on_rank(program.program.batches))) > limit:
        raise ValueError(
            f"{program.name} holds {needed} microbatches on a rank, and may hold {limit}; give its ranks room for "
            f"{needed}, or let the job end with a lost rank"
        )
    undisturbed = _seconds(schedule, costs, num_microbatches)
    return Survivors(program, sharing.ranks, tuple(sorted(sharing.lost)), seconds, undisturbed, least)


def _drained(sharing: Sharing, costs: Costs, most_held: int | None) -> tuple[ProgramSchedule, float, float]:
    """Return the fastest program that drains after each batch, the time of a batch, and the bound on it."""
    orders = drained_orders(sharing, costs, most_held)
    allowed = max(map(max, limits(sharing, most_held, (0,))))
    fitting = [each for each in orders if max(each.held) <= allowed] or sorted(orders, key=lambda each: max(each.held))
    program = _program(sharing, fitting[0])
    return program, _seconds(program, sharing.costs(costs)), bound(Work(sharing, costs))


def _steady(sharing: Sharing, costs: Costs, most_held: int | None) -> tuple[ProgramSchedule, float, float]:
    """Return the fastest program that goes on without a drain, the steady time of a batch, and the bound on it.

    An order may not repeat, or begin a batch before the step that it needs. So the fastest order that can be proved is
    taken, and one that repeats with every batch before others.
    """
    allowed = max(map(max, limits(sharing, most_held, (0,))))
    num_batches = sharing.schedule.num_fill + _REPEATED
    orders = steady_orders(sharing, costs, most_held, num_batches)
    orders.sort(key=lambda each: (max(each.held) > allowed, each.seconds, max(each.held)))
    for period in (1, None):
        for ordered in orders:
            with suppress(ProgramError):
                program = _program(sharing, ordered, num_batches, period)
                if not program.drains_between_periods:
                    return program, _seconds(program, sharing.costs(costs)), busiest(sharing, costs)
    raise AssertionError("the merged rows repeat")


def _program(sharing: Sharing, ordered: Ordered, num_batches: int = 1, period: int | None = None) -> ProgramSchedule:
    weights = sharing.schedule.name_of_weights
    name = f"{weights} without {counted(len(sharing.lost), 'rank')} ({' '.join(map(str, sorted(sharing.lost)))})"
    return ProgramSchedule.of(Program.of(sharing.extent_of(num_batches), ordered.rows), name=name, period=period)


_REPEATED = 4
"""Batches behind the fill in rows that are to repeat: two that are alike, and the last, which drains."""


def _settled(schedule: PipelineSchedule, num_microbatches: int) -> tuple[int, ...]:
    """Return batches enough that the last ones are alike."""
    return (num_microbatches,) * (1 if schedule.weights.drains else schedule.settling_batches + 4)


def _seconds(schedule: PipelineSchedule, costs: Costs, num_microbatches: int | None = None) -> float:
    """Simulate a batch: drained, or in the steady state."""
    size = schedule.num_microbatches if num_microbatches is None else num_microbatches
    timeline = simulate(schedule.build(_settled(schedule, size)), costs)
    return timeline.makespan if schedule.weights.drains else timeline.steady_time_per_batch()
