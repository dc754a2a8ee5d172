"""The problem of a job's program: its costs, and the memory that weights and buffers leave to activations."""

from collections.abc import Sequence

from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem
from megatron.planner.memory.activations import Activations
from megatron.planner.memory.memory import GIB, RankMemory

STAND_INS = {1: "zb-h1", 2: "zbv"}
"""Number of stages of a rank -> the named schedule that has the stages and the costs of a program with so many."""


def problem_of(
    schedule: Schedule,
    num_microbatches: int,
    costs: Costs,
    activations: Activations,
    layers: Sequence[int],
    *,
    memory: Sequence[RankMemory] | None = None,
    limit: float | None = None,
) -> Problem:
    """Return the problem whose programs have the stages of a named schedule. Sizes are in GiB.

    Args:
        schedule: the named schedule. Its programs split backwards if its own do.
        num_microbatches: the number of microbatches of a batch.
        costs: the costs of the named schedule's instructions.
        activations: bytes by stage.
        layers: the number of layers of each stage.
        memory: the memory of each rank under the named schedule.
        limit: the most GiB that a rank may take; needs `memory`. None: as many microbatches on each rank as there are
            ranks, which 1F1B holds on its first one.

    Raises:
        ValueError: a rank takes more than the limit without activations, or with those of one microbatch.
    """
    saved, workspace, deferred = activations.by_stage(layers)
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
    return Problem(
        rank_of_stage=tuple(schedule.rank_of_stage), num_microbatches=num_microbatches, costs=costs, saved=whole,
        deferred=[each / GIB for each in deferred] if splits else None, limits=limits, splits=splits,
    )  # fmt: skip


def _besides(memory: RankMemory, workspace: float, limit: float) -> float:
    """Return the GiB that a rank takes besides activations. `workspace`: bytes of its largest one."""
    parts = memory.parts
    workspace = max(workspace, parts.workspace)
    computing = parts.while_computing - parts.activations - parts.deferred - parts.workspace + workspace
    stepping = parts.held - parts.activations - parts.deferred - parts.workspace - parts.transfers
    if (least := max(computing, stepping) / GIB) >= limit:
        raise ValueError(
            f"rank {memory.rank} takes {least:.3g} GiB without activations; raise the limit, or use more GPUs"
        )
    return computing / GIB
