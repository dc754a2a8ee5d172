"""Programs that are made for the configurations that lead a search, beside the named schedules.

A search prices named schedules. For each of the fastest configurations whose batches drain, programs with one stage on
each rank and with two in a V are synthesized for its costs and for the memory of the device, unless the lower bound
says that none of them would be the fastest. Where memory asks for it, they recompute microbatches and move activations.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from megatron.pipeline.check import check
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.synthesis import Problem, Synthesis
from megatron.pipeline.synthesis.several_problems import bound_of
from megatron.planner.job.configuration import DEFAULTS, Configuration
from megatron.planner.job.estimate import LOST, Verdict
from megatron.planner.memory.memory import RankMemory
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.memory.schedule_demand import demand_of, schedule_demand
from megatron.planner.planner import Planner
from megatron.planner.search.outcome import Kept
from megatron.planner.synthesis import (
    STAND_INS,
    fastest_made,
    first_that_fits,
    problem_of,
    ways_named,
    with_moves,
    with_receives,
)

_CONSIDERED = 3  # configurations with other degrees, microbatches or recompute
_WITH_RECOMPUTES = RecomputeScope.NONE, RecomputeScope.ATTENTION
"""The scopes of layers beside which a stage may recompute microbatches."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A program for a configuration.

    Attributes:
        kept: the configuration under the named schedule that has the program's stages, with the time and the memory of
            the program.
        found: the program, with its bound.
    """

    kept: Kept
    found: Synthesis


def synthesized(
    ranking: Sequence[Kept],
    planner_of: Callable[[int], Planner],
    *,
    seconds: float,
    refuse: Callable[[Configuration], str | None],
    moves: str = "none",
) -> Made | None:
    """Return the fastest program for the leading configurations of a ranking; None if none fits a device.

    Args:
        ranking: configurations, best first. A program has to be faster than the first one.
        planner_of: returns the planner for a tensor parallel size.
        seconds: how long to search in all.
        refuse: returns why the training program would refuse a configuration, or None.
        moves: where saved activations may wait, as for `synthesize`.
    """
    leading = list(_leading(ranking))
    best: Made | None = None
    for kept, scope in leading:
        planner = planner_of(kept.choice.tensor)
        for virtual, name in STAND_INS.items():
            configuration = _cut(kept.estimate.configuration, name, virtual, scope)
            part = seconds / (len(STAND_INS) * len(leading))
            if refuse(configuration) is not None:
                continue
            made = _made(kept, configuration, planner, part, moves, ranking[0].estimate.seconds)
            if made is not None and (best is None or made.kept.estimate.seconds < best.kept.estimate.seconds):
                best = made
    return best


def _leading(ranking: Sequence[Kept]) -> Iterator[tuple[Kept, RecomputeScope]]:
    """Yield the fastest pipelined configurations whose batches drain, each with a recompute scope of its layers.

    A configuration whose layers recompute also comes with the scope none, since programs may recompute microbatches
    instead. Configurations that differ only in their schedule come once.
    """
    seen = set()
    for each in ranking:
        configuration = each.estimate.configuration
        if configuration.pipeline == 1 or configuration.is_hosted or configuration.sharding is not None:
            continue
        if not configuration.pipeline_schedule(tied_embeddings=False).weights.drains:
            continue
        for scope in dict.fromkeys((configuration.recompute, RecomputeScope.NONE)):
            cut = _cut(configuration, "flush", 1, scope)
            if cut not in seen:
                seen.add(cut)
                yield each, scope
        if len(seen) >= _CONSIDERED:
            return


def _cut(configuration: Configuration, schedule: str, virtual: int, scope: RecomputeScope) -> Configuration:
    """Return the configuration under another schedule and with another scope of recompute in its layers."""
    same = {name: DEFAULTS[name] for name in ("balance", "layers")}
    return replace(configuration, **same, schedule=schedule, virtual=virtual, recompute=scope)


def _made(
    kept: Kept, configuration: Configuration, planner: Planner, seconds: float, moves: str, fastest: float
) -> Made | None:
    """Return the program for a configuration with the stages of its named schedule; None if it cannot run or win.

    Args:
        kept: the configuration of the search from which `configuration` was made.
        fastest: the seconds that the program has to beat.
    """
    model = planner.model
    schedule = configuration.pipeline_schedule(tied_embeddings=model.shares_embedding)
    try:
        layers, estimate = planner.layers(configuration), planner.estimate(configuration)
        problems, moving = _problems(configuration, schedule, planner, layers, moves)
    except ValueError:  # too few layers, a schedule that does not accept the batch, or no room
        return None
    recomputes_some = len(problems) > 1
    bounds = [bound_of(each, recomputes_some=recomputes_some) for each in problems]
    bounds += [bound_of(each, moves=moves, recomputes_some=recomputes_some) for each in moving]
    if min(bounds)[0] >= fastest:
        return None

    def judged(program: Program) -> tuple[tuple[RankMemory, ...], Verdict]:
        demand = demand_of(program, check(program))
        memory = planner.memory_of(configuration, demand, layers, recomputes=program.recompute)
        return memory, planner.judge(configuration, memory)

    made = fastest_made(problems, moving, moves=moves, recomputes_some=recomputes_some, seconds=seconds)
    found = first_that_fits(made, lambda program: judged(program)[1].fits)
    program = found.schedule(data_parallel=schedule.data_parallel, tied_embeddings=schedule.tied_embeddings)
    memory, verdict = judged(program.program)
    if not verdict.fits:
        return None
    costs = planner.costs(configuration, schedule, layers, verdict)
    copies = ("swap_out", "swap_in", "evict", "load")
    costs = replace(costs, **{name: getattr(found.problem.costs, name) for name in copies})
    time = simulate(program.program, costs).makespan
    estimate = replace(
        estimate, configuration=configuration, seconds=time, memory=memory, verdict=verdict,
        mfu=estimate.mfu * estimate.seconds / time, bubble=1 - (1 - found.bubble) * found.seconds / time,
    )  # fmt: skip
    choice = replace(
        kept.choice, schedule=configuration.schedule, virtual=configuration.virtual, recompute=configuration.recompute
    )
    return Made(kept=replace(kept, choice=choice, estimate=estimate, is_simulated=True, notes=()), found=found)


def _problems(
    configuration: Configuration, schedule: Schedule, planner: Planner, layers: Sequence[int], moves: str
) -> tuple[list[Problem], list[Problem]]:
    """Return the problems of a configuration, and those whose programs may move activations.

    Raises ValueError where a device has no room, or the cost model cannot predict the configuration.
    """
    m, model, placement = configuration.num_microbatches, planner.model, schedule.rank_of_stage
    setting = planner.software.of(configuration).activation_setting(configuration)
    costs = planner.cost_model.costs(configuration, layers)
    may_recompute = configuration.recompute in _WITH_RECOMPUTES and not setting.fp8
    ways = () if setting.fp8 or model.experts is not None else ways_named(moves, placement)
    demand = with_receives(schedule_demand(schedule, m))

    def problem(recomputed: frozenset[int], *, moving: bool) -> Problem | ValueError:
        taken = with_moves(demand, ways) if moving else demand
        try:
            return problem_of(
                schedule, m, costs, model, setting, layers, recomputed=recomputed,
                memory=planner.memory_of(configuration, taken, layers),
                limit=(1 - LOST) * planner.cluster.device.memory_gib,
                moves=(lambda sizes: planner.cost_model.moves(configuration, sizes, ways)) if moving else None,
            )  # fmt: skip
        except ValueError as error:
            return error

    # If all stages recompute, any microbatch may still be kept, so other sets of stages would only take time.
    sets = [frozenset(), frozenset(range(schedule.num_stages))][: 1 + may_recompute]
    plain = [problem(each, moving=False) for each in sets]
    problems = [each for each in plain if isinstance(each, Problem)]
    if not problems:
        raise plain[0]
    # Programs that move activations recompute only if they do not fit otherwise.
    moving = (made for each in sets if isinstance(made := problem(each, moving=True), Problem)) if ways else iter(())
    return problems, list(islice(moving, 1))


def sentence(made: Made | None, best: Kept) -> str:
    """The note on the made program, beside the fastest configuration with a named schedule."""
    if made is None:
        return "no program was made: each would be as slow as the best named schedule, or would not fit in memory"
    choice, seconds = made.kept.choice, made.kept.estimate.seconds
    v = " in a V" * (choice.virtual == 2)
    degrees = f"t={choice.tensor}, p={choice.pipeline}, d={choice.data}, microbatches of {choice.micro_batch_size}"
    faster = best.estimate.seconds / seconds - 1
    beside = f"{faster:.1%} faster than" if faster > 0 else f"not faster than the {best.estimate.seconds:.4g} s of"
    problem = made.found.problem
    again = ", ".join(
        f"{stage} ({count} of {problem.num_microbatches})" for stage, count in problem.num_recomputed.items()
    )
    away = "" if made.found.way is None else {"host": "the host", "pair": "the pair rank"}[made.found.way.name]
    moved = ", ".join(
        f"{stage} ({len(each)} of {problem.num_microbatches})" for stage, each in made.found.moved.items()
    )
    how = f"; it recomputes microbatches of the stages {again}" * bool(again)
    how += f"; it moves microbatches of the stages {moved} to {away}" * bool(moved)
    return (
        f"a program made for {degrees}, stages{v}, takes {seconds:.4g} s, {beside} the best named schedule; without "
        f"reductions and the step a batch takes {made.found.seconds:.4g} s, and no program less than "
        f"{made.found.bound:.4g}{how}"
    )
