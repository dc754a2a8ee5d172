"""Checks before an engine runs: schedule, stages, update and ranks fit together."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.documents import counted
from megatron.pipeline.program.copies import graph_of_model
from megatron.pipeline.runtime.contract.stage import (
    AnyStage,
    AnyUpdate,
    GraphStage,
    OptimisticUpdate,
    RelayUpdate,
    StagewiseUpdate,
)
from megatron.pipeline.schedules import PipelineSchedule


def numbered(
    schedule: PipelineSchedule, stages: Sequence[AnyStage], update: AnyUpdate, *, rank: int, num_ranks: int,
    counts_activations: bool,
) -> dict[int, AnyStage]:  # fmt: skip
    """Check that an engine can run the schedule, and return the rank's stages by their numbers in the program.

    Args:
        rank, num_ranks: the rank in the pipeline, and the pipeline's number of ranks.
        counts_activations: the engine has an activation memory.

    Raises:
        ValueError: an engine cannot run the schedule with these stages and this update.
    """
    if schedule.weights.refreshes and not (
        isinstance(update, StagewiseUpdate) and all(isinstance(each, GraphStage) for each in stages)
    ):
        raise ValueError(
            f"under {schedule.weights.name} each stage steps by itself; give stages of a graph, such as "
            "GraphModuleStage, and an update for each, such as StageUpdates"
        )
    if schedule.optimistic and not (
        isinstance(update, OptimisticUpdate) and all(hasattr(each, "begin_again") for each in stages)
    ):
        raise ValueError(
            f"steps are optimistic, and {type(update).__name__} or {type(stages[0]).__name__} cannot undo a step; give "
            "an OptimisticUpdate and stages with begin_again, such as megatron.core's, or drop optimistic"
        )
    if schedule.num_ranks != num_ranks:
        raise ValueError(
            f"the schedule is for {counted(schedule.num_ranks, 'rank')}, and the pipeline has {num_ranks}; "
            f"give it {counted(num_ranks * schedule.num_virtual_stages, 'stage')}"
        )
    due = schedule.stages_of(rank)
    of_model = [schedule.copies[each].stage for each in due] if schedule.copies else list(due)
    if (given := [stage.index for stage in stages]) != of_model:
        raise ValueError(f"the schedule puts stages {of_model} on this rank; give these in this order, not {given}")
    if schedule.copies:
        require_copyable(schedule)
    if schedule.residency is not None:
        _require_relay(schedule, update, counts_activations=counts_activations)
    if schedule.swaps and not counts_activations:
        raise ValueError(
            "the schedule moves saved activations to the host; give the activation_memory with which the stages "
            "were built"
        )
    joined = graph_of_model(schedule.copies, schedule.edges) if schedule.copies else schedule.graph
    if not (joined.is_chain or joined.num_frozen or isinstance(stages[0], GraphStage)):
        raise ValueError(
            f"the stages of the schedule have the edges {' '.join(map(str, schedule.edges))}, and "
            f"{type(stages[0]).__name__} is for a chain; give stages of a graph, such as GraphModuleStage"
        )
    return dict(zip(due, stages, strict=True))


def require_copyable(schedule: PipelineSchedule) -> None:
    """Raise ValueError unless stages that are copies can have the weights of the schedule."""
    weights = schedule.weights
    if weights.updates_alone:
        raise ValueError(
            f"weights {weights.name} let each stage step by itself, and copies of a stage share a batch and step "
            "together; run copies under flush or 2bw"
        )
    if schedule.predicts_apart:
        raise ValueError(
            f"weights {weights.name} are predicted from the gradients of each copy alone, and copies of a stage share "
            "a batch; let predictions read the sum over the copies (reduce_partial)"
        )
    if schedule.residency is not None:
        raise ValueError("the schedule has copies of stages and its weights on the host; keep these on the device")


def _require_relay(schedule: PipelineSchedule, update: AnyUpdate, *, counts_activations: bool) -> None:
    """Raise ValueError unless the update keeps weights on the host as the schedule does."""
    asked = schedule.residency
    if not isinstance(update, RelayUpdate):
        raise ValueError(
            f"the schedule keeps weights on the host, and {type(update).__name__} has them on the device; give a "
            "RelayUpdate, such as ModuleRelayUpdate"
        )
    made_for = update.residency
    if made_for is not None and (asked.stages, asked.update) != (made_for.stages, made_for.update):
        raise ValueError(
            f"the schedule's residency is {asked}, and its update was made for {made_for}; make it with "
            "`residency=schedule.residency`"
        )
    if asked.stashes_on_host and counts_activations:
        raise ValueError(
            "inputs are stashed on the host, and activation_memory handles only activations on the device; leave it "
            "out, or stash inputs on the device"
        )
