"""Programs that are made for the configurations that lead a search, beside the named schedules.

A search prices named schedules. For each of the fastest configurations whose batches drain, programs with one stage on
each rank and with two in a V are synthesized for its costs and for the memory of the device, unless the lower bound
says that none of them would be the fastest.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.pipeline.check import check
from megatron.pipeline.program.program import Program
from megatron.pipeline.simulate import simulate
from megatron.pipeline.synthesis import Synthesis, synthesize
from megatron.pipeline.synthesis.bound import lower_bound
from megatron.planner.job.configuration import DEFAULTS, Configuration
from megatron.planner.job.estimate import LOST, Verdict
from megatron.planner.memory.memory import RankMemory
from megatron.planner.memory.schedule_demand import demand_of, schedule_demand
from megatron.planner.planner import Planner
from megatron.planner.search.outcome import Kept
from megatron.planner.synthesis import STAND_INS, problem_of, with_fewer_receives, with_receives

_CONSIDERED = 3  # configurations with other degrees, microbatches or recompute


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
) -> Made | None:
    """Return the fastest program for the leading configurations of a ranking; None if none fits a device.

    Args:
        ranking: configurations, best first, of which the best is compared with.
        planner_of: returns the planner for a tensor parallel size.
        seconds: how long to search in all.
        refuse: returns why the training program would refuse a configuration, or None.
    """
    leading = list(_leading(ranking))
    best: Made | None = None
    for kept in leading:
        planner = planner_of(kept.choice.tensor)
        for virtual, name in STAND_INS.items():
            made = _made(kept, name, virtual, planner, seconds / (len(STAND_INS) * len(leading)), refuse, ranking[0])
            if made is not None and (best is None or made.kept.estimate.seconds < best.kept.estimate.seconds):
                best = made
    return best


def _leading(ranking: Sequence[Kept]) -> Iterator[Kept]:
    """Yield the fastest configurations in a pipeline whose batches drain, one for each way to cut the work."""
    seen = set()
    for each in ranking:
        configuration = each.estimate.configuration
        if configuration.pipeline == 1 or configuration.is_hosted or configuration.sharding is not None:
            continue
        cut = _cut(configuration, "flush", 1)
        if cut in seen or not configuration.pipeline_schedule(tied_embeddings=False).weights.drains:
            continue
        seen.add(cut)
        yield each
        if len(seen) == _CONSIDERED:
            return


def _cut(configuration: Configuration, schedule: str, virtual: int) -> Configuration:
    """Return the configuration under another schedule."""
    same = {name: DEFAULTS[name] for name in ("balance", "layers")}
    return replace(configuration, **same, schedule=schedule, virtual=virtual)


def _made(
    kept: Kept,
    name: str,
    virtual: int,
    planner: Planner,
    seconds: float,
    refuse: Callable[[Configuration], str | None],
    fastest: Kept,
) -> Made | None:
    """Return the program for a configuration with the stages of a named schedule; None where it cannot run or win."""
    configuration = _cut(kept.estimate.configuration, name, virtual)
    if refuse(configuration) is not None:
        return None
    software, model, m = planner.software.of(configuration), planner.model, configuration.num_microbatches
    schedule = configuration.pipeline_schedule(tied_embeddings=model.shares_embedding)
    try:
        layers = planner.layers(configuration)
        estimate = planner.estimate(configuration)
        costs = planner.cost_model.costs(configuration, layers)
        demand = with_receives(schedule_demand(schedule, m))
        problem = problem_of(
            schedule, m, costs, model, software.activation_setting(configuration), layers,
            memory=planner.memory_of(configuration, demand, layers),
            limit=(1 - LOST) * planner.cluster.device.memory_gib,
        )  # fmt: skip
    except ValueError:  # too few layers, a schedule that does not accept the batch, or no room
        return None
    if lower_bound(problem)[0] >= fastest.estimate.seconds:
        return None

    def judged(program: Program) -> tuple[tuple[RankMemory, ...], Verdict]:
        memory = planner.memory_of(configuration, demand_of(program, check(program)), layers)
        return memory, planner.judge(configuration, memory)

    found = synthesize(problem, seconds=seconds)
    found = with_fewer_receives(found, lambda program: judged(program)[1].fits)
    program = found.schedule(data_parallel=schedule.data_parallel, tied_embeddings=schedule.tied_embeddings)
    memory, verdict = judged(program.program)
    if not verdict.fits:
        return None
    time = simulate(program.program, costs).makespan
    estimate = replace(
        estimate, configuration=configuration, seconds=time, memory=memory, verdict=verdict,
        mfu=estimate.mfu * estimate.seconds / time, bubble=1 - (1 - found.bubble) * found.seconds / time,
    )  # fmt: skip
    choice = replace(kept.choice, schedule=name, virtual=virtual)
    return Made(kept=replace(kept, choice=choice, estimate=estimate, is_simulated=True, notes=()), found=found)


def sentence(made: Made | None, best: Kept) -> str:
    """What a note says of the program beside the fastest configuration with a named schedule."""
    if made is None:
        return "no program is faster than the best named schedule, since its bound is not or it has no room"
    choice, seconds = made.kept.choice, made.kept.estimate.seconds
    v = " in a V" * (choice.virtual == 2)
    degrees = f"t={choice.tensor}, p={choice.pipeline}, d={choice.data}, microbatches of {choice.micro_batch_size}"
    faster = best.estimate.seconds / seconds - 1
    beside = f"{faster:.1%} faster than" if faster > 0 else f"not faster than the {best.estimate.seconds:.4g} s of"
    return (
        f"a program made for {degrees}, stages{v}, takes {seconds:.4g} s, {beside} the best named schedule; without "
        f"reductions and the step a batch takes {made.found.seconds:.4g} s, and no program less than "
        f"{made.found.bound:.4g}"
    )
