"""The demand of a schedule, without building programs of thousands of microbatches.

The closed form is that of proved programs, which tests show for all schedules, but where moves balance saved
activations: a batch that hardly fills the pipeline, or stages that share a rank, may stay below their bounds; and with
two ranks receives may be used as soon as they are posted. What is held then is read off a proved program.
"""

from functools import lru_cache

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.schedules import Schedule
from megatron.planner.closed_form_demand import closed_form_demand
from megatron.planner.demand import Demand, demand_of


def schedule_demand(schedule: Schedule, num_microbatches: int) -> Demand:
    """What each rank holds at most in a run of batches with so many microbatches. Raises ValueError as `validate`."""
    schedule.validate(num_microbatches)
    full = 2 * schedule.num_ranks  # microbatches: more only repeat what these do
    if schedule.order == "gpipe":
        return closed_form_demand(schedule, num_microbatches)
    if schedule.num_ranks == 2 or (schedule.balance and schedule.num_virtual_stages > 1):
        return _proved(schedule, min(num_microbatches, 2 * full + num_microbatches % schedule.num_ranks))
    if schedule.balance and num_microbatches < full:
        return _proved(schedule, num_microbatches)
    return closed_form_demand(schedule, num_microbatches)


@lru_cache(maxsize=4096)
def _proved(schedule: Schedule, num_microbatches: int) -> Demand:
    if schedule.weights.drains:
        program = schedule.build((num_microbatches,))
        return demand_of(program, check(program))
    periodic = schedule.build_periodic(num_microbatches)
    return demand_of(periodic.unroll(1), check_periodic(periodic))
