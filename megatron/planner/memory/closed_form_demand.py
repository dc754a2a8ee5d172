"""What a schedule asks of the ranks' memory, in closed form: for a search, which cannot build every program.

It is for orders that reach the bounds that they state, with batches that fill the pipeline (`RECEIVES`). Tests compare
with the demand that is read off proved programs. It is the same, but for three numbers, of which this is the upper
bound: what each single stage of an accepting rank saves (over all its stages the rank saves as much as it says here),
what it saves where a batch is too small to bring it to its bound, and the receives of a few ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from megatron.pipeline.program.lane_order import DEVICE, RELOADED_AHEAD
from megatron.pipeline.program.stages import stages_by_rank
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.gpipe import GPipe
from megatron.pipeline.schedules.interleaved import Interleaved
from megatron.pipeline.schedules.one_f_one_b import OneForwardOneBackward
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.relay import Relay
from megatron.pipeline.schedules.zero_bubble_h1 import ZeroBubbleH1
from megatron.pipeline.schedules.zero_bubble_v import ZeroBubbleV
from megatron.planner.memory.demand import Demand, Moment, moments_of


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
are read off proved programs (proved_demand.py).
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
    batches = (num_microbatches,) if rule.drains else (num_microbatches,) * (2 * num_ranks + 1)
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
    batches = (num_microbatches,) * (1 if schedule.weights.drains else 3)
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
