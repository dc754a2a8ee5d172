"""Proved programs for a job that goes on without its lost ranks, each with its time and a lower bound on the time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from math import inf

from megatron.documents import counted
from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.completion import completed
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule
from megatron.pipeline.schedules.program_schedule import ProgramSchedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.survivors.bound import drained_bound, steady_bound
from megatron.pipeline.survivors.order import Ordered, Work, drained_orders, steady_orders
from megatron.pipeline.survivors.room import Room, rooms_of
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
        undisturbed: the same for a replica while no rank is lost.
        bound: a lower bound on the time of a batch, for any order of these computations within the memory limit.
        held: for each rank of the pipeline, the most microbatches that it holds, over its stages and in any replica.
        held_undisturbed: the same while no rank is lost.
    """

    schedule: ProgramSchedule
    ranks: tuple[ReplicaRank, ...]
    lost: tuple[ReplicaRank, ...]
    seconds: float
    undisturbed: float
    bound: float
    held: tuple[int, ...]
    held_undisturbed: tuple[int, ...]

    @property
    def slowdown(self) -> float:
        """The time of a batch over that of the undisturbed job."""
        return self.seconds / self.undisturbed

    @property
    def least_slowdown(self) -> float:
        """A lower bound on the slowdown, for any order of these computations within the memory limit."""
        return self.bound / self.undisturbed


def without(
    schedule: PipelineSchedule,
    num_microbatches: int,
    *,
    num_replicas: int,
    lost: Iterable[ReplicaRank],
    costs: Costs | None = None,
    most_held: int | None = None,
) -> Survivors:
    """Return the job without its lost ranks: the program of the ranks that are left, its time and its memory.

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
            that are left would have to hold more, or the costs are those of another number of stages or edges.
    """
    sharing, costs = Sharing(schedule, num_microbatches, num_replicas, frozenset(lost)), costs or Costs()
    before = sharing.held_undisturbed
    limit = max(before) if most_held is None else most_held
    if limit < 1:
        raise ValueError(f"a rank cannot compute and hold {limit} microbatches; let it hold 1 and more")
    found, bound = (_drained, drained_bound) if schedule.weights.drains else (_steady, steady_bound)
    rooms = rooms_of(sharing, limit)
    least = bound(sharing, costs, rooms[-1].most)
    program = found(rooms, costs, least)
    needed = program.max_saved_on_rank(program.program.batches)
    if max(needed) > limit:
        raise ValueError(
            f"{program.name} holds {max(needed)} microbatches on a rank, and may hold {limit}; give its ranks room for "
            f"{max(needed)}, or let the job end with a lost rank"
        )
    held = [0] * schedule.num_ranks
    for each, count in zip(sharing.ranks, needed, strict=True):
        held[each.rank] = max(held[each.rank], count)
    return Survivors(
        schedule=program,
        ranks=sharing.ranks,
        lost=tuple(sorted(sharing.lost)),
        seconds=_seconds(program, sharing.costs(costs)),
        undisturbed=_seconds(schedule, costs, num_microbatches),
        bound=least,
        held=tuple(held),
        held_undisturbed=before,
    )


def _drained(rooms: Sequence[Room], costs: Costs, bound: float) -> ProgramSchedule:
    """Return the fastest program that drains after each batch. `bound`: a lower bound on its time.

    The search assumes that receives are posted in time and that moves take no time. So the best few orders of each room
    are simulated, in which a receive or a move may come late. The simulation ends at the first order whose time in the
    search is not below the best simulated time. If no order keeps the limit, the result is the program that holds the
    fewest microbatches.
    """
    sharing, fitting, emptiest = rooms[0].sharing, [], None
    for room in rooms:
        if fitting and fitting[0][0].seconds <= bound:
            break
        work, orders = drained_orders(room, costs)
        emptiest = emptiest or min(orders, key=lambda each: max(each.held))
        fitting += [(each, room) for each in orders if not any(room.over(each.held))][:_SIMULATED]
    fitting.sort(key=lambda each: each[0].seconds)  # of equals, those without moves first

    best, least, priced = None, inf, sharing.costs(costs)
    for ordered, room in fitting:
        if ordered.seconds >= least and not work.extent.recompute:  # a recompute may hide in a wait, and save time
            break
        with suppress(ValueError) if room.moves else nullcontext():  # moves may not keep the limit
            program = completed(_program(work, ordered, room))
            seconds = simulate(program, priced).makespan
            if seconds < least and not (room.moves and max(check(program).peak_saved_on_rank) > room.limit):
                best, least = program, seconds
    return _schedule(sharing, best or _program(work, emptiest, rooms[0]))


def _steady(rooms: Sequence[Room], costs: Costs, bound: float) -> ProgramSchedule:
    """Return the fastest program that goes on without a drain; of equals, the one without moves.

    `bound`: a lower bound on its time.
    """
    best, least, refusal, priced = None, inf, None, rooms[0].sharing.costs(costs)
    for room in rooms:
        if least <= bound:
            break
        try:
            program = _steady_in(room, costs)
        except ValueError as error:
            refusal = error
            continue
        fits = max(program.max_saved_on_rank(program.program.batches)) <= room.limit
        seconds = _seconds(program, priced)
        if best is None or (fits and seconds < least):
            best, least = program, seconds if fits else inf
    if best is None:
        raise refusal
    return best


def _steady_in(room: Room, costs: Costs) -> ProgramSchedule:
    """Return the fastest program that keeps to the room; if there is none, the fastest other program.

    Some orders do not repeat, or begin a batch before the step that it needs. So the fastest order that can be proved
    is taken. Orders are first tried with a period of one batch, then with any period.

    Raises:
        ValueError: no order can be proved.
    """
    schedule, fuller = room.sharing.schedule, None
    work, orders = steady_orders(room, costs, schedule.settling_batches + _REPEATED)
    may_drain = isinstance(schedule, ProgramSchedule) and schedule.drains_between_periods
    for period in (1, None):
        for ordered in orders:
            if room.moves and any(room.over(ordered.held)):
                continue
            with suppress(ValueError if room.moves else ProgramError):  # moves may not keep the limit
                program = _schedule(room.sharing, _program(work, ordered, room), period)
                if program.drains_between_periods and not may_drain:
                    continue
                if max(program.max_saved_on_rank(program.program.batches)) <= room.limit:
                    return program
                fuller = fuller or program
    if fuller is not None:
        return fuller
    raise ValueError(
        "no order was found in which the remaining ranks repeat their work every batch or every few; take "
        f"{schedule.name_of_weights} from a preset, or flush"
    )


def _program(work: Work, ordered: Ordered, room: Room) -> Program:
    return room.program(work.extent, work.instructions(ordered.rows))


def _schedule(sharing: Sharing, program: Program, period: int | None = None) -> ProgramSchedule:
    name = name_of(sharing.schedule.name_of_weights, sharing.lost, sharing.num_replicas)
    return ProgramSchedule.of(program, name=name, period=period)


def name_of(weights: str, lost: Collection[ReplicaRank], num_replicas: int) -> str:
    """Return the name of a program with these weights without the lost ranks; if none is lost, of all replicas."""
    without = f"without {counted(len(lost), 'rank')} ({' '.join(map(str, sorted(lost)))})"
    return f"{weights} {without if lost else 'of ' + counted(num_replicas, 'replica')}"


_SIMULATED = 4  # orders of each room
_REPEATED = 5
"""The number of batches behind those that settle, in rows that are to repeat: some are alike, and the last drains."""


def _settled(schedule: PipelineSchedule, num_microbatches: int) -> tuple[int, ...]:
    """Return the sizes of enough batches for the last ones to be alike."""
    return schedule.weights.full_batches(num_microbatches, schedule.settling_batches + 4)


def _seconds(schedule: PipelineSchedule, costs: Costs, num_microbatches: int | None = None) -> float:
    """Simulate a batch: drained, or in the steady state."""
    size = schedule.num_microbatches if num_microbatches is None else num_microbatches
    timeline = simulate(schedule.build(_settled(schedule, size)), costs)
    return timeline.makespan if schedule.weights.drains else timeline.steady_time_per_batch()
