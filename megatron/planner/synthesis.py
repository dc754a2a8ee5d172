"""The synthesis problem of a job: the costs of its computations, and the memory that weights and buffers leave to
activations."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import weight_policy
from megatron.pipeline.schedules import Schedule, read_schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem, Steady, Synthesis, synthesize_steady
from megatron.pipeline.synthesis.moves import CHOICES, PAIR, ways_of
from megatron.pipeline.synthesis.problem import ROUNDING, csv_of
from megatron.pipeline.synthesis.several_problems import bound_of, synthesize_fastest
from megatron.planner.memory.activations import ActivationSetting
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.demand import Demand
from megatron.planner.memory.encoder_decoder import activations_of
from megatron.planner.memory.memory import GIB, RankMemory
from megatron.planner.memory.recompute import NOTHING, Recompute

STAND_INS = {1: "zb-h1", 2: "zbv"}
"""Number of stages of a rank -> the named schedule with the stages and costs of a synthesized program of that many."""

AS_SHORT = 1.001
"""The longest batch that a steady program may have, as a multiple of the shortest, if it holds less memory."""

SecondsOfMoves = Callable[[Sequence[float]], Mapping[str, Sequence[float]]]
"""Bytes of a microbatch at each stage -> the seconds of its moves, keyed by the fields of `Costs`."""


def with_moves(demand: Demand, ways: Collection[str]) -> Demand:
    """Return `demand` with room to move activations: every rank evicts, and with the way `pair` every rank accepts."""
    every = (True,) * demand.num_ranks
    return replace(demand, evicts=every, accepts=every if "pair" in ways else demand.accepts)


def ways_named(moves: str, rank_of_stage: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the ways that a choice of moves allows for a placement; no pairs if stages lie in a V."""
    in_a_v = len(rank_of_stage) > max(rank_of_stage) + 1
    return tuple(way.name for way in CHOICES[moves] if not (in_a_v and way is PAIR))


def fastest_made(
    problems: Sequence[Problem],
    moving: Sequence[Problem] = (),
    *,
    moves: str = "none",
    recomputes_some: bool = False,
    seconds: float,
    rounds: int | None = None,
) -> tuple[Synthesis, ...]:
    """Return the fastest program without moves, preceded by one with moves if that is faster.

    Args:
        problems: as for `synthesize_fastest`.
        moving: the same problems with less room, since moves of activations take some of it.
        moves: where moved activations may wait, as for `synthesize`.
        recomputes_some: as for `synthesize_fastest`.
        seconds: how long to search in all.
        rounds: as for `synthesize`.
    """
    search = partial(
        synthesize_fastest, recomputes_some=recomputes_some, seconds=seconds / (1 + bool(moving)), rounds=rounds
    )
    found = search(problems)
    if not moving:
        return (found,)
    ways = {way for each in moving for way in ways_of(moves, each)}
    bounds = [bound_of(each, moves=moves, recomputes_some=recomputes_some) for each in moving]
    bound, bound_from = min((found.bound, found.bound_from), *bounds)
    found = replace(found, bound=bound, bound_from=bound_from, ways=tuple(sorted(ways, key=lambda way: way.name)))
    could_win = [
        each for each, (least, _) in zip(moving, bounds, strict=True) if least < found.seconds * (1 - ROUNDING)
    ]
    if not could_win:
        return (found,)
    moved = search(could_win, moves=moves, known=[found])
    moved = replace(moved, bound=bound, bound_from=bound_from, ways=found.ways)
    return (moved, found) if moved.way is not None and moved.seconds < found.seconds * (1 - ROUNDING) else (found,)


def fastest_steady(problems: Sequence[Problem], *, weights: str, seconds: float) -> Steady:
    """Return the `leanest` of the programs found for the problems, with the least of their lower bounds.

    Args:
        problems: costs and limits.
        weights: the name of a policy whose pipelines do not drain.
        seconds: how long to search in all.
    """
    policy, each_has = weight_policy(weights), seconds / len(problems)
    found = [synthesize_steady(each, weights=policy, seconds=each_has) for each in problems]
    bound, bound_from = min((each.bound, each.bound_from) for each in found)
    return replace(leanest(found), bound=bound, bound_from=bound_from)


def leanest(found: Sequence[Steady]) -> Steady:
    """Return, among the programs with the shortest batches, the one whose fullest rank holds least."""
    least = min(each.seconds for each in found)
    return min((each for each in found if each.seconds <= least * AS_SHORT), key=lambda each: each.fullness)


def with_receives(demand: Demand, *, ahead: int = 1) -> Demand:
    """Return `demand` with the receives that any program made in place of the named schedule may have posted.

    If receives are posted `ahead` computations ahead, up to `ahead` + 1 are posted at once.
    """
    return replace(demand, receives_ahead=tuple(max(each, ahead + 1) for each in demand.receives_ahead))


def first_that_fits(found: Sequence[Synthesis], fits: Callable[[Program], bool]) -> Synthesis:
    """Return the first program that fits, its receives posted as far ahead as fits; if none fits, the last program."""
    for each in found:
        while not (is_fine := fits(each.program)) and each.receives_ahead > 1:
            ahead = each.receives_ahead - 1
            program = read_schedule("synthesized", text=csv_of(each.program, ahead)).program
            seconds = simulate(program, each.problem.costs).makespan
            each = replace(each, program=program, seconds=seconds, receives_ahead=ahead)
        if is_fine:
            break
    return each


def problem_of(
    schedule: Schedule,
    num_microbatches: int,
    costs: Costs,
    shape: Architecture,
    setting: ActivationSetting,
    layers: Sequence[int],
    *,
    recomputed: frozenset[int] = frozenset(),
    memory: Sequence[RankMemory] | None = None,
    limit: float | None = None,
    moves: SecondsOfMoves | None = None,
) -> Problem:
    """Return the problem whose programs have the stages of a named schedule. Sizes are in GiB.

    Args:
        schedule: the named schedule. Its programs split backwards if its own do.
        num_microbatches: the number of microbatches of a batch.
        costs: the costs of the named schedule's instructions. The costs of updates are left out, since they are the
        same
            for all programs.
        shape: the model.
        setting: how activations are saved at stages that are not recomputed.
        layers: the number of layers of each stage.
        recomputed: the stages that are recomputed from their input.
        memory: the memory of each rank under the named schedule, for a demand `with_receives`.
        limit: the most GiB that a rank may take; needs `memory`. None: each rank may hold as many microbatches as there
            are ranks, as the first rank of 1F1B does.
        moves: returns the seconds that moves of activations take; None: activations cannot move.

    Raises:
        ValueError: a rank takes more than the limit without activations, or with those of one microbatch.
    """
    saved, workspace, deferred = activations_of(shape, setting).by_stage(layers)
    inputs, again = _recomputed(shape, setting, layers)
    if moves is not None:
        # Where all stages recompute, some microbatches may be kept, and then only these move.
        moved = saved if len(recomputed) == len(saved) else [
            inputs[stage] if stage in recomputed else each for stage, each in enumerate(saved)
        ]  # fmt: skip
        costs = replace(costs, **moves(moved))
    # A recomputed stage may keep any microbatch: the larger of the two sizes covers kept and recomputed ones.
    saved = [
        max(each, inputs[stage] + again[stage]) if stage in recomputed else each for stage, each in enumerate(saved)
    ]
    # What W needs beside saved activations counts from the forward on: more than is held, never less.
    splits = schedule.splits_backward
    whole = (
        [max(pair) / GIB for pair in zip(saved, deferred, strict=True)] if splits else [each / GIB for each in saved]
    )
    ranks = stages_by_rank(schedule.rank_of_stage)
    limits = [min(num_microbatches, schedule.num_ranks) * sum(whole[stage] for stage in own) for own in ranks]
    if limit is not None:
        assert memory is not None
        limits = [
            limit - _besides(each, max(workspace[stage] for stage in own), limit)
            for each, own in zip(memory, ranks, strict=True)
        ]
    costs = replace(costs, step=0.0, reduce_grad=0.0, reduce_embed=0.0, reduce_norm=0.0)
    return Problem(
        rank_of_stage=tuple(schedule.rank_of_stage), num_microbatches=num_microbatches, costs=costs, saved=whole,
        deferred=[each / GIB for each in deferred] if splits else None, limits=limits, splits=splits,
        recomputed=recomputed, stage_input=[each / GIB for each in inputs],
    )  # fmt: skip


def _recomputed(
    shape: Architecture, setting: ActivationSetting, layers: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Return two lists by stage: bytes of a microbatch's input, and bytes of the activations that its recompute
    makes."""
    whole, nothing = (
        activations_of(shape, replace(setting, recompute=each)).by_stage(layers)
        for each in (Recompute(whole_stage=True), NOTHING)
    )
    return whole[0], [more - less for more, less in zip(whole[1], nothing[1], strict=True)]


def _besides(memory: RankMemory, workspace: float, limit: float) -> float:
    """Return the GiB that a rank takes besides activations. `workspace`: bytes of the largest workspace of a stage."""
    parts = memory.parts
    computing = parts.while_computing - parts.activations - parts.deferred - parts.workspace + workspace
    stepping = parts.held - parts.activations - parts.deferred - parts.workspace - parts.transfers
    if (least := max(computing, stepping) / GIB) >= limit:
        raise ValueError(
            f"rank {memory.rank} takes {least:.3g} GiB without activations; raise the limit, or use more GPUs"
        )
    return computing / GIB
