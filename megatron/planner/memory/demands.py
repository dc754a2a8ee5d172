"""The demand of a schedule, without building programs of thousands of microbatches.

The closed form is that of proved programs, which tests show for the orders that have one, but where moves balance saved
activations: a batch that hardly fills the pipeline, or stages that share a rank, may stay below their bounds; and with
two ranks receives may be used as soon as they are posted. What is held then is read off a proved program, and so is
what an order without a closed form holds.
"""

from functools import lru_cache

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.schedules import Schedule
from megatron.planner.memory.closed_form_demand import closed_form_demand, has_closed_form
from megatron.planner.memory.demand import Demand, demand_of
from megatron.planner.memory.sizes import alike, resized

_MOST_PROVED = 4_000  # computations of an order without a closed form; beyond, two sizes have to say the same


def schedule_demand(schedule: Schedule, num_microbatches: int) -> Demand:
    """What each rank holds at most in a run of batches with so many microbatches. Raises ValueError as `validate`."""
    schedule.validate(num_microbatches)
    if not has_closed_form(schedule, num_microbatches):
        return _read_off(schedule, num_microbatches)
    full = 2 * schedule.num_ranks  # microbatches: more only repeat what these do
    if schedule.max_in_flight is None:
        return closed_form_demand(schedule, num_microbatches)
    if schedule.num_ranks == 2 or (schedule.balance and schedule.num_virtual_stages > 1):
        fewer = min(num_microbatches, 2 * full + num_microbatches % schedule.num_ranks)
        return _proved(resized(schedule, num_microbatches, fewer), fewer)
    if schedule.balance and num_microbatches < full:
        return _proved(schedule, num_microbatches)
    return closed_form_demand(schedule, num_microbatches)


def stated_demand(schedule: Schedule, num_microbatches: int) -> Demand:
    """The closed form, which is that or a little more and takes no time; where there is none, as `schedule_demand`."""
    schedule.validate(num_microbatches)
    if has_closed_form(schedule, num_microbatches):
        return closed_form_demand(schedule, num_microbatches)
    return _read_off(schedule, num_microbatches)


def _read_off(schedule: Schedule, num_microbatches: int) -> Demand:
    """What proved programs hold. Of a large batch, what smaller ones hold, if a group of microbatches more adds nothing
    and the order says that there is a bound.
    """
    p = schedule.num_ranks
    if num_microbatches * schedule.num_stages > _MOST_PROVED and schedule.max_in_flight is not None:
        full = schedule.max_in_flight + 2 * p
        sizes = alike(schedule, num_microbatches, least=full, step=p, count=2)
        found = [_proved(resized(schedule, num_microbatches, size), size) for size in sizes]
        if found and found[0] == found[1]:
            return found[1]
    return _proved(schedule, num_microbatches)


@lru_cache(maxsize=4096)
def _proved(schedule: Schedule, num_microbatches: int) -> Demand:
    if schedule.weights.drains:
        program = schedule.build((num_microbatches,))
        return demand_of(program, check(program))
    periodic = schedule.build_periodic(num_microbatches)
    return demand_of(periodic.unroll(1), check_periodic(periodic))
