"""The problem of a job's program: its costs, and the memory that weights and buffers leave to activations."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule, read_schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem, Synthesis
from megatron.pipeline.synthesis.problem import csv_of
from megatron.planner.memory.activations import ActivationSetting
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.demand import Demand
from megatron.planner.memory.encoder_decoder import activations_of
from megatron.planner.memory.memory import GIB, RankMemory
from megatron.planner.memory.recompute import NOTHING, Recompute

STAND_INS = {1: "zb-h1", 2: "zbv"}
"""Number of stages of a rank -> the named schedule that has the stages and the costs of a program with so many."""


def with_receives(demand: Demand, *, ahead: int = 1) -> Demand:
    """Return the demand of a named schedule with the receives that any program made in its place may have posted.

    A receive that stands `ahead` computations ahead is there with those of the computations before.
    """
    return replace(demand, receives_ahead=tuple(max(each, ahead + 1) for each in demand.receives_ahead))


def with_fewer_receives(found: Synthesis, fits: Callable[[Program], bool]) -> Synthesis:
    """Return a program with its receives as far ahead as fits, or one computation ahead."""
    while found.receives_ahead > 1 and not fits(found.program):
        ahead = found.receives_ahead - 1
        program = read_schedule("synthesized", text=csv_of(found.program, ahead)).program
        seconds = simulate(program, found.problem.costs).makespan
        found = replace(found, program=program, seconds=seconds, receives_ahead=ahead)
    return found


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
) -> Problem:
    """Return the problem whose programs have the stages of a named schedule. Sizes are in GiB.

    Args:
        schedule: the named schedule. Its programs split backwards if its own do.
        num_microbatches: the number of microbatches of a batch.
        costs: the costs of the named schedule's instructions. Those of updates are left out: the search makes no
            difference between programs by them.
        shape: the model.
        setting: how activations are saved at stages that are not recomputed.
        layers: the number of layers of each stage.
        recomputed: the stages that are recomputed from their input.
        memory: the memory of each rank under the named schedule, for a demand `with_receives`.
        limit: the most GiB that a rank may take; needs `memory`. None: as many microbatches on each rank as there are
            ranks, which 1F1B holds on its first one.

    Raises:
        ValueError: a rank takes more than the limit without activations, or with those of one microbatch.
    """
    saved, workspace, deferred = activations_of(shape, setting).by_stage(layers)
    inputs, again = _recomputed(shape, setting, layers)
    # Of a recomputed stage any microbatches may be kept, which save no more.
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
    """Return, by stage, the bytes of a microbatch's input, and those that its recompute makes."""
    whole, nothing = (
        activations_of(shape, replace(setting, recompute=each)).by_stage(layers)
        for each in (Recompute(whole_stage=True), NOTHING)
    )
    return whole[0], [more - less for more, less in zip(whole[1], nothing[1], strict=True)]


def _besides(memory: RankMemory, workspace: float, limit: float) -> float:
    """Return the GiB that a rank takes besides activations. `workspace`: bytes of its largest one."""
    parts = memory.parts
    computing = parts.while_computing - parts.activations - parts.deferred - parts.workspace + workspace
    stepping = parts.held - parts.activations - parts.deferred - parts.workspace - parts.transfers
    if (least := max(computing, stepping) / GIB) >= limit:
        raise ValueError(
            f"rank {memory.rank} takes {least:.3g} GiB without activations; raise the limit, or use more GPUs"
        )
    return computing / GIB
