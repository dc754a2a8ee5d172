"""The demand of a schedule's proved programs, without building programs of thousands of microbatches.

What a pipeline holds at once is reached as soon as it is full, so a program of a few microbatches more than it has
stages asks for as much as one of thousands; gpipe alone holds the whole batch, which is entered afterwards. Tests
compare with the programs of whole batches.
"""

from dataclasses import replace
from functools import lru_cache

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.schedules import Schedule
from megatron.planner.demand import Demand, demand_of


def schedule_demand(schedule: Schedule, num_microbatches: int) -> Demand:
    """What each rank holds at most in a run of batches with so many microbatches. Raises ValueError as `validate`."""
    schedule.validate(num_microbatches)
    ranks = schedule.num_ranks
    enough = 3 * ranks + num_microbatches % ranks
    if num_microbatches <= enough:
        return _proved(schedule, num_microbatches)
    demand = _proved(schedule, enough)
    if schedule.order == "gpipe":
        whole = (num_microbatches,) * schedule.num_stages
        demand = replace(demand, saved_microbatches=whole, own_microbatches=whole, saved_on_rank=whole)
    return demand


@lru_cache(maxsize=4096)
def _proved(schedule: Schedule, num_microbatches: int) -> Demand:
    if schedule.weights.rule.drains:
        program = schedule.build((num_microbatches,))
        return demand_of(program, check(program))
    periodic = schedule.build_periodic(num_microbatches)
    return demand_of(periodic.unroll(1), check_periodic(periodic))
