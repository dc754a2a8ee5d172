"""The problems of a job's program: its costs, and the memory that a limit leaves to activations."""

from collections.abc import Sequence
from dataclasses import replace

from megatron.pipeline.check import check
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import WeightPolicy, weight_policy
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem, Synthesis
from megatron.pipeline.synthesis.several import recomputed_sets
from megatron.planner.memory.demand import Demand
from megatron.planner.memory.memory import GIB, RankMemory, estimate_memory
from megatron.planner.memory.schedule_demand import demand_of, proved_demand
from megatron.planner.synthesis import problem_of, with_fewer_receives, with_receives
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.plan import from_flags
from megatron.trainer.plan.auto_costs import CostsOf, MeasuredHere


def problems_of(config: TrainConfig, costs_of: CostsOf) -> list[Problem]:
    """Return the problems that have a stand-in's placement: one, or one for each set of stages that may be recomputed.

    Sizes are in GiB. Under a limit there is room for receives as far ahead as any search puts them, or where this
    leaves none to activations, one computation ahead (`within_limit`). Raises ValueError where nothing fits the limit.
    """
    layers, config = _layers(config), costs_of.with_vocabulary(config)
    costs, limit, drains = costs_of(config, layers), config.pipeline_memory_limit, _weights(config).drains
    if limit is None:
        return _problems(config, layers, costs)
    placement = tuple(config.schedule.rank_of_stage)
    most = max(Problem(rank_of_stage=placement, num_microbatches=1, costs=costs).receives_ahead)
    for ahead in range(most, 0, -1) if drains else (most,):
        try:
            return _problems(config, layers, costs, receives_ahead=ahead)
        except ValueError as error:
            refusal = error
    raise ValueError(f"--pipeline-memory-limit {limit:g}: {refusal}") from refusal


def _problems(
    config: TrainConfig, layers: Sequence[int], costs: Costs, *, receives_ahead: int | None = None
) -> list[Problem]:
    """Return the problems under a limit that leaves room for such receives; None: without a limit."""
    (num_microbatches,) = set(config.batch_sizes.all_num_microbatches())
    shape, setting = from_flags.architecture(config), from_flags.activation_setting(config)
    setting = replace(setting, recompute=replace(setting.recompute, whole_stage=False))
    schedule, memory, limit = config.schedule, None, config.pipeline_memory_limit
    if receives_ahead is not None:
        demand = with_receives(proved_demand(schedule, num_microbatches), ahead=receives_ahead)
        if not (weights := _weights(config)).drains:
            demand = replace(
                demand, live_versions=(weights.max_live_versions(0, schedule.num_stages),) * schedule.num_ranks,
                gradient_buffers=(weights.max_gradient_buffers,) * schedule.num_ranks,
            )  # fmt: skip
        memory = _memory(config, demand, layers)
    problems = []
    for recomputed in recomputed_sets(schedule.rank_of_stage) if config.pipeline_recompute else (frozenset(),):
        try:
            problems.append(problem_of(
                schedule, num_microbatches, costs, shape, setting, layers, recomputed=recomputed, memory=memory,
                limit=limit,
            ))  # fmt: skip
        except ValueError as error:
            refusal = error
    if not problems:
        raise refusal
    return problems


def measured_problems(config: TrainConfig, costs: Costs) -> list[Problem]:
    """Return the problems of a run that has measured itself: the stages and limits of what it runs, with these costs.

    There are several where it may recompute. Raises ValueError.
    """
    return problems_of(config, MeasuredHere(costs))


def within_limit(config: TrainConfig, costs_of: CostsOf, found: Synthesis) -> Synthesis:
    """Return a program for `problems_of` with its receives as far ahead as the limit allows."""
    if config.pipeline_memory_limit is None:
        return found
    layers, config = _layers(config), costs_of.with_vocabulary(config)

    def fits(program: Program) -> bool:
        memory = _memory(config, demand_of(program, check(program)), layers, recomputes=program.recompute)
        return max(each.total for each in memory) <= config.pipeline_memory_limit * GIB

    return with_fewer_receives(found, fits)


def _weights(config: TrainConfig) -> WeightPolicy:
    return weight_policy(config.pipeline_weights)


def _layers(config: TrainConfig) -> tuple[int, ...]:
    from megatron.trainer.models.core_config import transformer_config  # imports torch

    return from_flags.layers_of_stages(transformer_config(replace(config, **from_flags.WITHOUT_ENGINE)))


def _memory(
    config: TrainConfig, demand: Demand, layers: Sequence[int], *, recomputes: bool = False
) -> tuple[RankMemory, ...]:
    setting = from_flags.activation_setting(config)
    setting = replace(setting, recompute=replace(setting.recompute, whole_stage=recomputes))
    return estimate_memory(
        from_flags.architecture(config), setting, from_flags.training_state(config), demand, layers=layers,
        counts_communicators=from_flags.uses_nccl(config),
    )  # fmt: skip
