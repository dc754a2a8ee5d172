"""The demand of a schedule, without building programs of thousands of microbatches.

The closed form is that of proved programs, which tests show for the orders that have one, but where moves balance saved
activations: a batch that hardly fills the pipeline, or stages that share a rank, may stay below their bounds, as do
small batches where backwards are split; and with two ranks receives may be used as soon as they are posted. What is
held then is read off a proved program, and so is what an order without a closed form holds.
"""

from megatron.pipeline.schedules import Schedule
from megatron.planner.memory.closed_form_demand import closed_form_demand, has_closed_form
from megatron.planner.memory.demand import Demand
from megatron.planner.memory.proved_demand import proved_demand
from megatron.planner.memory.sizes import alike, resized

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
        sizes = alike(schedule, num_microbatches, least=full, step=p, count=2)
        found = [proved_demand(resized(schedule, num_microbatches, size), size) for size in sizes]
        if found and found[0] == found[1]:
            return found[1]
    return proved_demand(schedule, num_microbatches)
