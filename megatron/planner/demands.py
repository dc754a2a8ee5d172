"""The demand of a schedule, without building programs of thousands of microbatches.

A schedule states how many microbatches each stage and rank hold at most; the checker proves every program that runs
against it, and programs reach it, which tests show for all schedules. So the numbers of the proved programs are known
without them, but where moves balance saved activations: a batch that hardly fills the pipeline, or stages that share a
rank, may stay below their bounds; and with two ranks receives may be used as soon as they are posted. What is held then
is read off a proved program.
"""

from dataclasses import replace
from functools import lru_cache

from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.moves import pair_of
from megatron.pipeline.schedules import Schedule
from megatron.planner.demand import Demand, demand_of


def schedule_demand(schedule: Schedule, num_microbatches: int) -> Demand:
    """What each rank holds at most in a run of batches with so many microbatches. Raises ValueError as `validate`."""
    schedule.validate(num_microbatches)
    full = 2 * schedule.num_ranks  # microbatches: more only repeat what these do
    if schedule.order == "gpipe":
        return _stated(schedule, num_microbatches)
    if schedule.num_ranks == 2 or (schedule.balance and schedule.num_virtual_stages > 1):
        return _proved(schedule, min(num_microbatches, 2 * full + num_microbatches % schedule.num_ranks))
    if schedule.balance and num_microbatches < full:
        return _proved(schedule, num_microbatches)
    return _stated(schedule, min(num_microbatches, full))


@lru_cache(maxsize=4096)
def _stated(schedule: Schedule, num_microbatches: int) -> Demand:
    rule, p = schedule.weights.rule, schedule.num_ranks
    batches = (num_microbatches,) * (1 if rule.drains else max(1, (rule.delay or 0) + schedule.settling_batches) + 1)
    evictors = schedule.evicting_ranks(batches)
    evicts = tuple(rank in evictors for rank in range(p))
    ahead = [2 if p > 1 else 0] * p
    if schedule.order == "1f1b" or (schedule.order == "interleaved" and schedule.num_virtual_stages == 1):
        ahead[-1] = min(1, ahead[-1])  # the gradients of the last stage are its own
    return Demand(
        rank_of_stage=schedule.rank_of_stage,
        saved_microbatches=schedule.max_saved_microbatches(batches),
        own_microbatches=replace(schedule, balance=False).max_saved_microbatches(batches),
        saved_on_rank=schedule.max_saved_on_rank(batches),
        live_versions=tuple(rule.max_live_versions(rank, p) for rank in range(p)),
        gradient_buffers=(2 if rule.delay else 1,) * p,
        receives_ahead=tuple(ahead),
        evicts=evicts,
        accepts=tuple(evicts[pair_of(rank, p)] for rank in range(p)),
    )


@lru_cache(maxsize=4096)
def _proved(schedule: Schedule, num_microbatches: int) -> Demand:
    if schedule.weights.rule.drains:
        program = schedule.build((num_microbatches,))
        return demand_of(program, check(program))
    periodic = schedule.build_periodic(num_microbatches)
    return demand_of(periodic.unroll(1), check_periodic(periodic))
