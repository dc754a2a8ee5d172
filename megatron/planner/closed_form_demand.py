"""What a schedule asks of the ranks' memory, in closed form: for a search, which cannot build every program.

Tests compare with the demand that is read off proved programs. It is the same, but for three numbers, of which this is
the upper bound: what each single stage of an accepting rank saves (over all its stages the rank saves as much as it
says here), what it saves where a batch is too small to bring it to its bound, and the receives of a few ranks.
"""

from dataclasses import replace
from functools import lru_cache

from megatron.pipeline.moves import pair_of
from megatron.pipeline.schedules import Schedule
from megatron.planner.demand import Demand

_RECEIVES = 2  # posted ahead at once: an activation and a gradient


def closed_form_demand(schedule: Schedule, num_microbatches: int) -> Demand:
    """The most that each rank holds in a run of batches with so many microbatches. Raises ValueError as `validate`."""
    schedule.validate(num_microbatches)
    if schedule.order != "gpipe":  # the others are full with so many, and hold no more of a larger batch
        full = 3 * schedule.num_ranks
        num_microbatches = min(num_microbatches, full + num_microbatches % schedule.num_ranks)
    return _demand(schedule, num_microbatches)


@lru_cache(maxsize=4096)
def _demand(schedule: Schedule, num_microbatches: int) -> Demand:
    rule, num_ranks = schedule.weights, schedule.num_ranks
    batches = (num_microbatches,) if rule.drains else (num_microbatches,) * (2 * num_ranks + 1)
    plain = replace(schedule, balance=False)
    own, own_on_rank = plain.max_saved_microbatches(batches), plain.max_saved_on_rank(batches)
    evicting = set(schedule.evicting_ranks(batches))
    accepting = {pair_of(rank, num_ranks) for rank in evicting}
    bounds = schedule.max_saved_on_rank(batches)
    # An acceptor holds what its pair cannot, and one more while an eviction and a load cross.
    excess = {pair_of(rank, num_ranks): own_on_rank[rank] - bounds[rank] + 1 for rank in evicting}
    on_rank = tuple(min(bounds[rank], own_on_rank[rank] + excess.get(rank, 0)) for rank in range(num_ranks))
    return Demand(
        rank_of_stage=schedule.rank_of_stage,
        saved_microbatches=tuple(
            on_rank[rank] if rank in accepting else min(own[stage], on_rank[rank])
            for stage, rank in enumerate(schedule.rank_of_stage)
        ),
        own_microbatches=own,
        saved_on_rank=on_rank,
        live_versions=tuple(rule.max_live_versions(rank, num_ranks) for rank in range(num_ranks)),
        gradient_buffers=(2 if rule.delay else 1,) * num_ranks,
        receives_ahead=tuple(_receives(schedule, rank) for rank in range(num_ranks)),
        evicts=tuple(rank in evicting for rank in range(num_ranks)),
        accepts=tuple(rank in accepting for rank in range(num_ranks)),
    )


def _receives(schedule: Schedule, rank: int) -> int:
    """The last rank of 1F1B runs each backward right after its forward, and only waits for activations."""
    if schedule.num_ranks == 1:
        return 0
    is_1f1b = schedule.order == "1f1b" or (schedule.order == "interleaved" and schedule.num_virtual_stages == 1)
    return 1 if is_1f1b and rank == schedule.num_ranks - 1 else _RECEIVES
