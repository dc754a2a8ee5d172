"""The synthesis problems of a job's program: its costs, and the memory that a limit leaves for activations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from megatron.pipeline.check import check
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import WeightPolicy, weight_policy
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem, Steady, Synthesis, begin_steady, synthesize
from megatron.pipeline.synthesis.several_problems import recomputed_sets
from megatron.planner.memory.demand import Demand
from megatron.planner.memory.memory import GIB, RankMemory, estimate_memory
from megatron.planner.memory.schedule_demand import demand_of, proved_demand
from megatron.planner.synthesis import (
    SecondsOfMoves,
    fastest_made,
    fastest_steady,
    first_that_fits,
    leanest,
    problem_of,
    ways_named,
    with_moves,
    with_receives,
)
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.plan import from_flags
from megatron.trainer.plan.auto_costs import CostsOf


def problems_of(config: TrainConfig, costs_of: CostsOf) -> list[Problem]:
    """The problems with a stand-in's placement: one, or one for each set of stages that may be recomputed.

    Sizes are in GiB. A limit leaves room for as many receives ahead as a search may post, or for fewer if otherwise no
    room would be left for activations (`within_limit`). Raises ValueError if nothing fits the limit.
    """
    layers, config = _layers(config), costs_of.with_vocabulary(config)
    costs, limit, drains = costs_of(config, layers), config.pipeline_memory_limit, _weights(config).drains
    if limit is None:
        return _problems(config, layers, costs)
    most = _most_ahead(config, costs)
    for ahead in range(most, 0, -1) if drains else (most,):
        try:
            return _problems(config, layers, costs, receives_ahead=ahead)
        except ValueError as error:
            refusal = error
    raise ValueError(f"--pipeline-memory-limit {limit:g}: {refusal}") from refusal


def moving_problems_of(config: TrainConfig, costs_of: CostsOf) -> list[Problem]:
    """The problems whose programs may move activations, with room for the moves.

    The list is empty if --pipeline-moves is none or if the limit leaves no room. Raises ValueError if the costs have no
    times of moves.
    """
    layers, config = _layers(config), costs_of.with_vocabulary(config)
    ways = ways_named(config.pipeline_moves, config.schedule.rank_of_stage)
    if not ways:
        return []
    moves = partial(costs_of.of_moves, config, ways)
    moves([0.0] * len(layers))
    costs = costs_of(config, layers)
    try:
        return _problems(config, layers, costs, receives_ahead=_most_ahead(config, costs), ways=ways, moves=moves)
    except ValueError:
        return []


def _problems(
    config: TrainConfig,
    layers: Sequence[int],
    costs: Costs,
    *,
    receives_ahead: int | None = None,
    ways: tuple[str, ...] = (),
    moves: SecondsOfMoves | None = None,
) -> list[Problem]:
    """The problems under the limit, with room for receives and moves; without a limit if `receives_ahead` is None."""
    (num_microbatches,) = set(config.batch_sizes.all_num_microbatches())
    shape, setting = from_flags.architecture(config), from_flags.activation_setting(config)
    setting = replace(setting, recompute=replace(setting.recompute, whole_stage=False))
    schedule, memory, limit = config.schedule, None, config.pipeline_memory_limit
    if receives_ahead is not None:
        demand = with_receives(proved_demand(schedule, num_microbatches), ahead=receives_ahead)
        if ways:
            demand = with_moves(demand, ways)
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
                limit=limit, moves=moves,
            ))  # fmt: skip
        except ValueError as error:
            refusal = error
    if not problems:
        raise refusal
    return problems


def first_of(weights: WeightPolicy, problems: Sequence[Problem]) -> Synthesis | Steady:
    """The program with which a job begins before it has measured its costs."""
    if weights.drains:
        return min((synthesize(each, rounds=0) for each in problems), key=lambda each: each.seconds)
    return leanest([begin_steady(each, weights=weights) for each in problems])


def search_of(
    config: TrainConfig, problems: Sequence[Problem], moving: Sequence[Problem]
) -> Callable[[], tuple[Synthesis, ...] | Steady]:
    """The search for a job's program (`fastest_made`, `fastest_steady`)."""
    if not _weights(config).drains:
        return partial(
            fastest_steady, problems, weights=config.pipeline_weights, seconds=config.pipeline_synthesis_seconds
        )
    return partial(
        fastest_made, problems, moving, moves=config.pipeline_moves, recomputes_some=config.pipeline_recompute,
        seconds=config.pipeline_synthesis_seconds,
    )  # fmt: skip


def within_limit(
    configs: Mapping[tuple[int, ...], TrainConfig], costs_of: CostsOf, found: Sequence[Synthesis]
) -> Synthesis:
    """The first program that keeps the memory limit, with its receives as far ahead as the limit allows.

    Args:
        configs: placement of a program -> the configuration for whose problems it was found.
        found: programs, of which the last one keeps the limit with receives one computation ahead.
    """

    def fits(program: Program) -> bool:
        config = configs[tuple(program.rank_of_stage)]
        if config.pipeline_memory_limit is None:
            return True
        layers, config = _layers(config), costs_of.with_vocabulary(config)
        memory = _memory(config, demand_of(program, check(program)), layers, recomputes=program.recompute)
        return max(each.total for each in memory) <= config.pipeline_memory_limit * GIB

    return first_that_fits(found, fits)


def _most_ahead(config: TrainConfig, costs: Costs) -> int:
    """The largest number of computations by which a search posts a receive ahead."""
    placement = tuple(config.schedule.rank_of_stage)
    return max(Problem(rank_of_stage=placement, num_microbatches=1, costs=costs).receives_ahead)


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
