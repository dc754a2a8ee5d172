"""What a schedule asks of the ranks' memory: the microbatches, versions and receives that they hold at once.

`proved_demand` has no formula of its own: the checker reports what is saved and which versions live, and the rest is
read off the rows. So its numbers are those of the very programs that run.

A search cannot build every program. `closed_form_demand` is for orders that reach the bounds that they state, with
batches that fill the pipeline (`RECEIVES`). Tests compare it with the demand of proved programs. Three numbers are
upper bounds: what each single stage of an accepting rank saves (over all its stages the rank saves as much as it says
here), what it saves where a batch is too small to bring it to its bound, and the receives of a few ranks.

`schedule_demand` takes the closed form where tests show it for the order. It reads a proved program where moves balance
saved activations, since a batch that hardly fills the pipeline, stages that share a rank, or small batches of split
backwards may stay below their bounds; with two ranks, whose receives may be used as soon as they are posted; and for an
order without a closed form. `representative_sizes` finds smaller batches that stand for a large one: what a pipeline
does with many microbatches, it does with fewer.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from megatron.pipeline.check import CheckReport, check, check_periodic
from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, ENDS_BACKWARD, Kind, Tensor
from megatron.pipeline.program.lane_order import DEVICE, RELOADED_AHEAD
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import PipelineSchedule, Schedule
from megatron.pipeline.schedules.gpipe import GPipe
from megatron.pipeline.schedules.interleaved import Interleaved
from megatron.pipeline.schedules.one_f_one_b import OneForwardOneBackward
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.relay import Relay
from megatron.pipeline.schedules.zero_bubble_h1 import ZeroBubbleH1
from megatron.pipeline.schedules.zero_bubble_v import ZeroBubbleV
from megatron.planner.memory.demand import Demand, Moment, moments_of

_MOST_GROUPS = 6  # of p microbatches, by which batches that a schedule takes may differ


def representative_sizes(
    schedule: Schedule, num_microbatches: int, *, least: int, step: int, count: int
) -> tuple[int, ...]:
    """Sizes of `count` batches, ascending, about `step` apart and the first about `least`, all below this one.

    They differ from it by whole groups of p microbatches, so that what is left over is the same; by as many as it takes
    for the schedule to run them all. None of them: there are no such batches.
    """
    p = schedule.num_ranks
    for unit in range(p, (_MOST_GROUPS + 1) * p, p):
        apart = max(step // unit, 1) * unit
        first = num_microbatches - (num_microbatches - least) // unit * unit
        sizes = tuple(first + index * apart for index in range(count))
        if sizes[-1] < num_microbatches and all(
            resized(schedule, num_microbatches, each).accepts(each) for each in sizes
        ):
            return sizes
    return ()


def resized(schedule: Schedule, num_microbatches: int, fewer: int) -> Schedule:
    """The schedule that does with batches of `fewer` microbatches what this one does with those of so many.

    It differs where each prediction reads a number of microbatches that is given: as many as before are left unread,
    or all but one.
    """
    if schedule.provisional_microbatches is None:
        return schedule
    read = schedule.provisional_microbatches - (num_microbatches - fewer)
    return replace(schedule, provisional_microbatches=max(1, read))


@lru_cache(maxsize=4096)
def proved_demand(schedule: PipelineSchedule, num_microbatches: int) -> Demand:
    """What each rank holds at most in a run of batches with so many microbatches, whose programs are built and proved.

    Raises ValueError as `Schedule.validate`, and where the checker refuses them.
    """
    if schedule.weights.drains:
        program = schedule.build((num_microbatches,))
        return demand_of(program, check(program))
    periodic = schedule.build_periodic(num_microbatches)
    return demand_of(periodic.unroll(1), check_periodic(periodic))


def demand_of(program: Program, report: CheckReport) -> Demand:
    """The demand of a training program that has been proved."""
    ranks = range(program.num_ranks)
    versions = report.live_versions or (1,) * program.num_stages
    evicts = [any(report.evicted_microbatches[stage] for stage in program.stages_of(rank)) for rank in ranks]
    return Demand(
        rank_of_stage=program.rank_of_stage,
        saved_microbatches=report.peak_saved_microbatches,
        own_microbatches=_own_microbatches(program),
        saved_on_rank=report.peak_saved_on_rank,
        live_versions=tuple(max(versions[stage] for stage in program.stages_of(rank)) for rank in ranks),
        gradient_buffers=tuple(_gradient_buffers(program, rank) for rank in ranks),
        held_gradients=tuple(_held(program, rank, "gradients") for rank in ranks),
        held_embeddings=tuple(_held(program, rank, "tied_gradients") for rank in ranks),
        predicts=(program.weights.predicts,) * program.num_ranks,
        receives_ahead=tuple(_receives_ahead(program, rank) for rank in ranks),
        evicts=tuple(evicts),
        accepts=tuple(any(evicts) and evicts[program.pairs.of_rank(rank)] for rank in ranks),
        boundaries=report.peak_boundaries_on_rank,
        moments=tuple(moments_of(program.rows[rank], program.stages_of(rank)) for rank in ranks)
        if any(report.peak_deferred_microbatches)
        else (),
        num_frozen=program.graph.num_frozen,
        unread=tuple(_unread(program, rank) for rank in ranks) if program.graph.num_frozen else (),
    )


def _own_microbatches(program: Program) -> tuple[int, ...]:
    held, peaks = [0] * program.num_stages, [0] * program.num_stages
    first_trained = program.graph.num_frozen
    for instruction in (each for row in program.rows for each in row):
        if instruction.kind is Kind.FORWARD and instruction.stage >= first_trained:
            held[instruction.stage] += 1
            peaks[instruction.stage] = max(peaks[instruction.stage], held[instruction.stage])
        elif instruction.kind in ENDS_BACKWARD:
            held[instruction.stage] -= 1
    return tuple(peaks)


def _unread(program: Program, rank: int) -> int:
    """The most tensors that a frozen stage which hands on to another rank leaves unread."""
    leaves = program.stages_of(rank)[-1]
    return program.graph.most_unread(leaves) if program.graph.is_forward_only(leaves) else 0


def _gradient_buffers(program: Program, rank: int) -> int:
    open_batches: set[int] = set()
    peak = 0
    for instruction in program.rows[rank]:
        if instruction.kind in BEGINS_BACKWARD:
            open_batches.add(program.batch_of(instruction.microbatch))
            peak = max(peak, len(open_batches))
        elif instruction.kind is Kind.STEP:
            open_batches.discard(instruction.version - 1)
    return peak


def _held(program: Program, rank: int, gradients: str) -> int:
    """The most copies of these gradients at once that words keep for a prediction, and the prediction drops."""
    held: set[int] = set()
    peak = 0
    for instruction in program.rows[rank]:
        if instruction.kind.row.keeps == gradients:
            held.add(instruction.version)
            peak = max(peak, len(held))
        elif instruction.kind.row.is_prediction:
            held.discard(instruction.version)
    return peak


def _receives_ahead(program: Program, rank: int) -> int:
    posted: set[tuple[Tensor, int, int]] = set()
    peak = 0
    for instruction in program.rows[rank]:
        word, key = instruction.kind.row, (instruction.stage, instruction.microbatch)
        if word.receives:
            posted.add((word.receives, *key))
            peak = max(peak, len(posted))
        elif word.needs:
            posted.discard((word.needs, *key))
    return peak


def _of_both(schedule: Schedule, rank: int) -> int:
    """An activation and a gradient."""
    return 2


def _of_turns(schedule: Schedule, rank: int) -> int:
    """The last stage of 1F1B runs each backward right after its forward, and only waits for activations."""
    is_turn = schedule.num_virtual_stages == 1 and rank == schedule.rank_of_stage[-1]
    return 1 if is_turn else _of_both(schedule, rank)


RECEIVES: dict[type[Order], Callable[[Schedule, int], int]] = {
    GPipe: _of_both, OneForwardOneBackward: _of_turns, Interleaved: _of_turns, Relay: _of_turns,
    ZeroBubbleH1: _of_turns, ZeroBubbleV: _of_turns,
}  # fmt: skip
"""Class of an order whose demand has a closed form -> how many receives a rank has posted ahead at once.

The order's `max_in_flight` has to be reached; where it splits backwards, what waits for W is read off its rows. Others
are read off proved programs (`proved_demand`).
"""


def has_closed_form(schedule: Schedule, num_microbatches: int) -> bool:
    """Whether the closed form is that of the proved programs of such batches.

    A batch that is smaller than what is in flight, which policies with a delay of several batches allow, leaves fewer
    buffers in use.
    """
    if schedule.order_class not in RECEIVES:
        return False
    return not schedule.weights.overlaps_updates or num_microbatches >= schedule.max_in_flight


def closed_form_demand(schedule: Schedule, num_microbatches: int) -> Demand:
    """The most that each rank holds in a run of batches with so many microbatches. Raises ValueError as `validate`."""
    schedule.validate(num_microbatches)
    holds = schedule.needs_gradient_copy(num_microbatches)
    if schedule.max_in_flight is not None:  # full with so many, and holds no more of a larger batch
        full = 3 * schedule.num_ranks
        num_microbatches = min(num_microbatches, full + num_microbatches % schedule.num_ranks)
    return _demand(schedule, num_microbatches, holds)


def _ends_of_ties(schedule: Schedule) -> set[int]:
    """The ranks whose predictions read a gradient of tied embeddings that another one has a part of."""
    ends = {schedule.rank_of_stage[0], schedule.rank_of_stage[-1]}
    return ends if schedule.weights.predicts and schedule.tied_embeddings and len(ends) > 1 else set()


@lru_cache(maxsize=4096)
def _demand(schedule: Schedule, num_microbatches: int, holds: tuple[bool, ...]) -> Demand:
    rule, num_ranks, receives = schedule.weights, schedule.num_ranks, RECEIVES[schedule.order_class]
    batches = rule.full_batches(num_microbatches, 2 * num_ranks + 1)
    plain = replace(schedule, balance=False)
    own, own_on_rank = plain.max_saved_microbatches(batches), plain.max_saved_on_rank(batches)
    evicting = set(schedule.evicting_ranks(batches))
    accepting = {schedule.pairs.of_rank(rank) for rank in evicting}
    bounds = schedule.max_saved_on_rank(batches)
    if schedule.residency:  # the whole of a batch at a stage before the next one, so that all of them come together
        together = [sum(own[stage] for stage in schedule.stages_of(rank)) for rank in range(num_ranks)]
        bounds = own_on_rank = tuple(map(min, together, bounds))
    # An acceptor holds what its pair cannot, and one more while an eviction and a load cross.
    excess = {schedule.pairs.of_rank(rank): own_on_rank[rank] - bounds[rank] + 1 for rank in evicting}
    on_rank = tuple(min(bounds[rank], own_on_rank[rank] + excess.get(rank, 0)) for rank in range(num_ranks))
    return Demand(
        rank_of_stage=schedule.rank_of_stage,
        saved_microbatches=tuple(
            on_rank[rank] if rank in accepting else min(own[stage], on_rank[rank])
            for stage, rank in enumerate(schedule.rank_of_stage)
        ),
        own_microbatches=own,
        saved_on_rank=on_rank,
        live_versions=tuple(
            max(rule.max_live_versions(stage, schedule.num_stages) for stage in stages)
            for stages in stages_by_rank(schedule.rank_of_stage)
        ),
        gradient_buffers=(rule.max_gradient_buffers,) * num_ranks,
        held_gradients=tuple(
            sum(holds[stage] for stage in stages) for stages in stages_by_rank(schedule.rank_of_stage)
        ),
        held_embeddings=tuple(int(rank in _ends_of_ties(schedule)) for rank in range(num_ranks)),
        predicts=(rule.predicts,) * num_ranks,
        receives_ahead=tuple(0 if num_ranks == 1 else receives(schedule, rank) for rank in range(num_ranks)),
        evicts=tuple(rank in evicting for rank in range(num_ranks)),
        accepts=tuple(rank in accepting for rank in range(num_ranks)),
        boundaries=_boundaries(schedule, num_microbatches),
        moments=_moments(schedule, num_microbatches),
    )


def _moments(schedule: Schedule, num_microbatches: int) -> tuple[tuple[Moment, ...], ...]:
    if not schedule.splits_backward:
        return ()
    batches = schedule.weights.full_batches(num_microbatches, 3)
    rows = (schedule.computations(rank, batches) for rank in range(schedule.num_ranks))
    return tuple(moments_of(row, schedule.stages_of(rank)) for rank, row in enumerate(rows))


def _boundaries(schedule: Schedule, num_microbatches: int) -> tuple[int, ...]:
    """By rank, the most tensors between its stages on the device; none where weights live there.

    Inputs of all stages but the first one's, which are data. On one rank a batch waits between two stages besides, on
    several as receives. With the stash on the host the inputs of the last run of stages stay, which turns around, and
    of the others those that are in use or reloaded ahead; on one rank also the batch that waits.
    """
    if schedule.residency is None:
        return ()
    p, last = schedule.num_ranks, schedule.num_stages - 1
    kept = replace(schedule, residency=replace(schedule.residency, stash=DEVICE))
    own = kept.max_saved_microbatches((num_microbatches,))
    waiting = num_microbatches if p == 1 < schedule.num_stages else 0
    found = [sum(own[each] for each in schedule.stages_of(rank) if each > 0) + waiting for rank in range(p)]
    if schedule.residency.stashes_on_host:
        turn = [own[last - p + 1 + rank] if p > 1 else 0 for rank in range(p)]
        found = [min(each, max(at_turn, RELOADED_AHEAD + 1) + waiting)
                 for each, at_turn in zip(found, turn, strict=True)]  # fmt: skip
    return tuple(found)


_MOST_PROVED = 4_000  # computations of an order without a closed form; beyond, two sizes have to say the same


def schedule_demand(schedule: Schedule, num_microbatches: int, *, proved: bool = True) -> Demand:
    """What each rank holds at most in a run of batches with so many microbatches.

    Args:
        proved: what proved programs hold; else the closed form where there is one, which is that or a little more and
            takes no time.

    Raises:
        ValueError: as `Schedule.validate`, or where the checker refuses the programs that are built.
    """
    schedule.validate(num_microbatches)
    if not has_closed_form(schedule, num_microbatches):
        return _without_closed_form(schedule, num_microbatches)
    if proved and _may_stay_below(schedule, num_microbatches):
        p = schedule.num_ranks
        fewer = min(num_microbatches, 4 * p + num_microbatches % p)  # more only repeat what these do
        return proved_demand(resized(schedule, num_microbatches, fewer), fewer)
    return closed_form_demand(schedule, num_microbatches)


def _may_stay_below(schedule: Schedule, num_microbatches: int) -> bool:
    """Whether programs may hold less than the closed form says."""
    if schedule.max_in_flight is None:
        return False
    if schedule.splits_backward and num_microbatches < 2 * schedule.num_ranks:
        return True
    is_tight = schedule.num_virtual_stages == 1 and num_microbatches >= 2 * schedule.num_ranks
    return schedule.num_ranks == 2 or (schedule.balance and not is_tight)


def _without_closed_form(schedule: Schedule, num_microbatches: int) -> Demand:
    """What proved programs hold. Of a large batch, what smaller ones hold, if a group of microbatches more adds nothing
    and the order says that there is a bound.
    """
    p = schedule.num_ranks
    if num_microbatches * schedule.num_stages > _MOST_PROVED and schedule.max_in_flight is not None:
        full = schedule.max_in_flight + 2 * p
        sizes = representative_sizes(schedule, num_microbatches, least=full, step=p, count=2)
        found = [proved_demand(resized(schedule, num_microbatches, size), size) for size in sizes]
        if found and found[0] == found[1]:
            return found[1]
    return proved_demand(schedule, num_microbatches)
