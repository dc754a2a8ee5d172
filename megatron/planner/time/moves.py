"""Moves of saved activations to a pair stage (balance): how many there are, and whether anything waits for them."""

from dataclasses import replace

from megatron.pipeline.schedules import Schedule
from megatron.planner.time.stage_times import StageTimes

_MANY = (1 << 20,)  # microbatches, which fill any pipeline


def moving_parts(schedule: Schedule) -> list[float]:
    """About which part of its microbatches each rank moves to its pair: of n in flight as many as exceed the bound, and
    one more to make room for those that come back."""
    if not schedule.balance:
        return [0.0] * schedule.num_ranks
    own, bounds = (each.max_saved_on_rank(_MANY) for each in (replace(schedule, balance=False), schedule))
    evicting = set(schedule.evicting_ranks(_MANY))
    return [
        (count - bound + 1) / count if rank in evicting else 0.0
        for rank, (count, bound) in enumerate(zip(own, bounds, strict=True))
    ]


def hides_moves(stages: StageTimes) -> bool:
    """Whether nothing waits for moves of saved activations: each has the time of one computation."""
    computations = zip(stages.moves, stages.forward, stages.backward, strict=True)
    return all(moves <= min(forward, backward) * (1 + 1e-9) for moves, forward, backward in computations)
