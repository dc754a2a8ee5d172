"""The memory demand of a schedule: the microbatches, versions and receives that each rank holds at once.

`proved_demand` has no formulas: the checker reports saved microbatches and live versions, and the other numbers are
counted in the rows. So its numbers are those of the programs that run.

A search cannot build every program. `closed_form_demand` is for orders that reach their stated bounds if a batch fills
the pipeline (`RECEIVES`). Tests compare it with the demand of proved programs. Three numbers are upper bounds: the
saved microbatches of a single stage of an accepting rank (the number of the whole rank is exact), the saved
microbatches of a batch too small to reach the bound, and the receives of a few ranks.

`schedule_demand` takes the closed form for orders for which tests have shown it exact. It reads a proved program in
three cases. First, programs may stay below the bounds: backwards are split and batches are small, or saved activations
are balanced and a batch hardly fills the pipeline or stages share a rank. Second, there are two ranks, whose receives
may be used as soon as they are posted. Third, the order has no closed form.

`representative_sizes` finds smaller batches with the same demand as a large one, since a pipeline treats many
microbatches as it treats fewer.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from megatron.pipeline.check import CheckReport, check, check_periodic
from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.program.instruction import (
    BEGINS_BACKWARD,
    ENDS_BACKWARD,
    MOVES,
    SWAPS,
    Instruction,
    Kind,
    Tensor,
)
from megatron.pipeline.program.lane_order import DEVICE, RELOADED_AHEAD, MoveOrder, awaited_in_lanes
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import PipelineSchedule, Schedule
from megatron.pipeline.schedules.interleaved import Interleaved, Relay
from megatron.pipeline.schedules.one_f_one_b import GPipe, OneForwardOneBackward
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.zero_bubble_h1 import ZeroBubbleH1
from megatron.pipeline.schedules.zero_bubble_v import ZeroBubbleV
from megatron.planner.memory.demand import Demand, Moment, moments_of

_MOST_GROUPS = 6  # the most groups of p microbatches between two batch sizes that a schedule accepts


def representative_sizes(
    schedule: Schedule, num_microbatches: int, *, least: int, step: int, count: int
) -> tuple[int, ...]:
    """Sizes of `count` smaller batches with the demand of one of `num_microbatches`; empty if there are no such sizes.

    The sizes ascend by about `step` from about `least`. They differ from `num_microbatches` by whole groups of p
    microbatches, so that the remainder is the same, and the schedule accepts all of them.
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
    """The schedule for batches of `fewer` microbatches that corresponds to `schedule` with `num_microbatches`.

    The two differ only if a prediction reads a given number of microbatches, and not 0: in the smaller batch a
    prediction leaves as many microbatches unread, but reads at least one.
    """
    if not schedule.provisional_microbatches:
        return schedule
    read = schedule.provisional_microbatches - (num_microbatches - fewer)
    return replace(schedule, provisional_microbatches=max(1, read))


@lru_cache(maxsize=4096)
def proved_demand(schedule: PipelineSchedule, num_microbatches: int) -> Demand:
    """The demand of a run of batches with `num_microbatches` each, from programs that are built and proved.

    Raises ValueError for the reasons of `Schedule.validate`, or if the checker refuses the programs.
    """
    if schedule.weights.drains:
        program = schedule.build((num_microbatches,))
        return demand_of(program, check(program))
    periodic = schedule.build_periodic(num_microbatches)
    return demand_of(periodic.unroll(1), check_periodic(periodic))


def demand_of(program: Program, report: CheckReport) -> Demand:
    """The demand of a training program that has been proved."""
    ranks = range(program.num_ranks)
    keeps_some = program.recompute and bool(program.kept or program.not_recomputed)
    versions = report.live_versions or (1,) * program.num_stages
    evicts, swaps = (
        [any(moved[stage] for stage in program.stages_of(rank)) for rank in ranks]
        for moved in (report.evicted_microbatches, report.swapped_microbatches)
    )
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
        repeats_update=program.provisional_microbatches == 0,
        receives_ahead=tuple(_receives_ahead(program, rank) for rank in ranks),
        evicts=tuple(map(any, zip(evicts, swaps, strict=True))),
        on_host=report.peak_on_host,
        accepts=tuple(any(evicts) and evicts[program.pairs.of_rank(rank)] for rank in ranks),
        boundaries=report.peak_boundaries_on_rank,
        moments=tuple(
            moments_of(
                program.rows[rank],
                program.stages_of(rank),
                keeps=lambda stage, microbatch: not program.is_recomputed(stage, microbatch),
                complete=_complete_moves(program, rank),
            )
            for rank in ranks
        )
        if any(report.peak_deferred_microbatches) or keeps_some
        else (),
        num_frozen=program.graph.num_frozen,
        unread=tuple(_unread(program, rank) for rank in ranks) if program.graph.num_frozen else (),
        recomputed_microbatches=report.peak_recomputed_microbatches
        if keeps_some or max(report.peak_recomputed_microbatches) > 1
        else (),
    )


def _complete_moves(program: Program, rank: int) -> dict[int, int]:
    """Position in a row -> how many of the row's first moves, or copies of activations, are complete there."""
    row = program.rows[rank]
    if any(each.kind in SWAPS for each in row):
        number = list(accumulate(each.kind in SWAPS for each in row))
        lanes = awaited_in_lanes(row, program.rank_of_stage)
        return {position: max(number[each] for each in needed) for position, needed in lanes.items()}
    if any(each.kind in MOVES for each in row):
        order = MoveOrder(num_frozen=program.graph.num_frozen)
        return {position: order.awaited(each) for position, each in enumerate(row)}
    return {}


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
    """The most outputs of the rank's last frozen stage that the next rank has not read; 0 without such a stage."""
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
    """The most copies of the given gradients that are held at once for predictions; a prediction frees its copy."""
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
    """Two receives: an activation and a gradient."""
    return 2


def _of_turns(schedule: Schedule, rank: int) -> int:
    """Two receives, or one on the last stage of 1F1B, which runs each backward right after its forward and so receives
    only activations."""
    is_turn = schedule.num_virtual_stages == 1 and rank == schedule.rank_of_stage[-1]
    return 1 if is_turn else _of_both(schedule, rank)


RECEIVES: dict[type[Order], Callable[[Schedule, int], int]] = {
    GPipe: _of_both, OneForwardOneBackward: _of_turns, Interleaved: _of_turns, Relay: _of_turns,
    ZeroBubbleH1: _of_turns, ZeroBubbleV: _of_turns,
}  # fmt: skip
"""The number of receives that a rank posts ahead, by class of an order whose demand has a closed form.

Such an order must reach its `max_in_flight`. If it splits backwards, the microbatches that wait for W are counted in
its rows. The demand of other orders is read from proved programs (`proved_demand`).
"""


def has_closed_form(schedule: Schedule, num_microbatches: int) -> bool:
    """Whether the closed form holds for batches of `num_microbatches`.

    It does not hold for a batch with fewer microbatches than are in flight, which policies with a delay of several
    batches allow: fewer buffers are in use.
    """
    if schedule.order_class not in RECEIVES:
        return False
    return not schedule.weights.overlaps_updates or num_microbatches >= schedule.max_in_flight


def closed_form_demand(schedule: Schedule, num_microbatches: int) -> Demand:
    """The demand of a run of batches with `num_microbatches` each, in closed form.

    Raises ValueError for the reasons of `Schedule.validate`.
    """
    schedule.validate(num_microbatches)
    holds = schedule.needs_gradient_copy(num_microbatches)
    if schedule.max_in_flight is not None:  # 3 p microbatches fill the pipeline; a larger batch saves no more
        full = 3 * schedule.num_ranks
        num_microbatches = min(num_microbatches, full + num_microbatches % schedule.num_ranks)
    return _demand(schedule, num_microbatches, holds)


def _ends_of_ties(schedule: Schedule) -> set[int]:
    """The ranks whose predictions read a gradient of tied embeddings that is split over two ranks."""
    reads = schedule.weights.predicts and schedule.provisional_microbatches != 0
    return {*schedule.tied_ranks} if reads and schedule.ties_ranks else set()


@lru_cache(maxsize=4096)
def _demand(schedule: Schedule, num_microbatches: int, holds: tuple[bool, ...]) -> Demand:
    rule, num_ranks, receives = schedule.weights, schedule.num_ranks, RECEIVES[schedule.order_class]
    batches = rule.full_batches(num_microbatches, 2 * num_ranks + 1)
    plain = replace(schedule, balance=False, most_on_device=None)
    own, own_on_rank = plain.max_saved_microbatches(batches), plain.max_saved_on_rank(batches)
    evicting = set(schedule.evicting_ranks(batches))
    accepting = {schedule.pairs.of_rank(rank) for rank in evicting}
    bounds = schedule.max_saved_on_rank(batches)
    if schedule.residency:  # a stage computes a whole batch before the next stage, so the peaks of stages add up
        together = [sum(own[stage] for stage in schedule.stages_of(rank)) for rank in range(num_ranks)]
        bounds = own_on_rank = tuple(map(min, together, bounds))
    # An accepting rank holds the excess of its pair, and one more microbatch while an eviction and a load cross.
    excess = {schedule.pairs.of_rank(rank): own_on_rank[rank] - bounds[rank] + 1 for rank in evicting}
    away = tuple(own - most if schedule.swaps else 0 for own, most in zip(own_on_rank, bounds, strict=True))
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
        repeats_update=schedule.provisional_microbatches == 0,
        receives_ahead=tuple(0 if num_ranks == 1 else receives(schedule, rank) for rank in range(num_ranks)),
        evicts=tuple(rank in evicting or away[rank] > 0 for rank in range(num_ranks)),
        on_host=away,
        accepts=tuple(rank in accepting for rank in range(num_ranks)),
        boundaries=_boundaries(schedule, num_microbatches),
        moments=_moments(schedule, num_microbatches),
    )


def _moments(schedule: Schedule, num_microbatches: int) -> tuple[tuple[Moment, ...], ...]:
    if not schedule.splits_backward:
        return ()
    batches = schedule.weights.full_batches(num_microbatches, 3)
    rows = (_with_recomputes(schedule, schedule.computations(rank, batches)) for rank in range(schedule.num_ranks))
    return tuple(moments_of(row, schedule.stages_of(rank)) for rank, row in enumerate(rows))


def _with_recomputes(schedule: Schedule, row: Iterable[Instruction]) -> Iterator[Instruction]:
    for each in row:
        if each.kind in BEGINS_BACKWARD and schedule.recomputes(each.stage):
            yield replace(each, kind=Kind.RECOMPUTE)
        yield each


def _boundaries(schedule: Schedule, num_microbatches: int) -> tuple[int, ...]:
    """The `Demand.boundaries` of a schedule with weights on the host; empty if weights are on the device.

    The inputs of all stages but the first count; the inputs of the first are data. On one rank, a batch that waits
    between two stages counts, too; on several ranks such tensors are receives. With the stash on the host, the inputs
    on the device are those of each rank's last stage, where the relay turns around, or those in use or reloaded ahead;
    on one rank, the waiting batch counts besides.
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


_MOST_PROVED = 4_000  # larger programs without a closed form are replaced by two smaller ones with equal demands


def schedule_demand(schedule: Schedule, num_microbatches: int, *, proved: bool = True) -> Demand:
    """The demand of a run of batches with `num_microbatches` each.

    Args:
        proved: return the demand of proved programs. False: use the closed form, if there is one, which is equal or a
            little larger and much faster.

    Raises:
        ValueError: for the reasons of `Schedule.validate`, or the checker refuses the programs.
    """
    schedule.validate(num_microbatches)
    if not has_closed_form(schedule, num_microbatches):
        return _without_closed_form(schedule, num_microbatches)
    if proved and _may_stay_below(schedule, num_microbatches):
        p = schedule.num_ranks
        fewer = min(num_microbatches, 4 * p + num_microbatches % p)  # more microbatches only repeat the pattern
        return proved_demand(resized(schedule, num_microbatches, fewer), fewer)
    return closed_form_demand(schedule, num_microbatches)


def _may_stay_below(schedule: Schedule, num_microbatches: int) -> bool:
    """Whether programs may hold less than the closed form states."""
    if schedule.max_in_flight is None:
        return False
    if schedule.splits_backward and num_microbatches < 2 * schedule.num_ranks:
        return True
    is_tight = schedule.num_virtual_stages == 1 and num_microbatches >= 2 * schedule.num_ranks
    return schedule.num_ranks == 2 or schedule.swaps or (schedule.balance and not is_tight)


def _without_closed_form(schedule: Schedule, num_microbatches: int) -> Demand:
    """The demand of proved programs.

    For a large batch, the demand of a smaller batch is returned if the order states a bound, and a batch with more
    groups of microbatches has the same demand.
    """
    p = schedule.num_ranks
    if num_microbatches * schedule.num_stages > _MOST_PROVED and schedule.max_in_flight is not None:
        full = schedule.max_in_flight + 2 * p
        sizes = representative_sizes(schedule, num_microbatches, least=full, step=p, count=2)
        found = [proved_demand(resized(schedule, num_microbatches, size), size) for size in sizes]
        if found and found[0] == found[1]:
            return found[1]
    return proved_demand(schedule, num_microbatches)
