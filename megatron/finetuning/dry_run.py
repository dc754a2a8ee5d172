"""What a job takes, before anything is loaded: stages, staleness, memory and time of each device."""

from __future__ import annotations

import argparse

from rich.table import Table

from megatron.documents.numbers import counted
from megatron.documents.tables import console
from megatron.finetuning.partitioning import simulated_seconds, weight_bytes
from megatron.finetuning.plan import RunPlan, make_plan
from megatron.finetuning.samples import read_data
from megatron.pipeline.program.weight_policies import Ahead
from megatron.pipeline.start_up.shared_errors import SameEverywhere

_GIB = 2**30


def run_dry(args: argparse.Namespace) -> None:
    """Print it, once in the job. Raises SameEverywhere for what would keep the job from running."""
    if args.rank:
        return
    try:
        plan = make_plan(args, read_data(args))
    except ValueError as error:
        raise SameEverywhere(str(error)) from error
    out = console(150, highlight=True)
    for line in first_lines(plan, args):
        out.print(line, highlight=False)
    table = Table("device", "stages", "parameters M", "weights GiB", "activations GiB", "of GiB", "compute ms")
    for rank, (parameters, weights, saved, milliseconds) in enumerate(of_devices(plan, args)):
        limit = plan.partition.memory_limit_bytes
        table.add_row(
            str(rank), " ".join(map(str, plan.schedule.stages_of(rank))), f"{parameters / 1e6:.2f}",
            f"{weights / _GIB:.3f}", f"{saved / _GIB:.3f}", f"{limit / _GIB:.2f}", f"{milliseconds:.2f}",
        )  # fmt: skip
    out.print(table)
    accumulation = args.gradient_accumulation_steps
    out.print(f"simulated: {1000 * _seconds(plan, args):.2f} ms a microbatch, {accumulation} of them a batch")


def first_lines(plan: RunPlan, args: argparse.Namespace) -> list[str]:
    """What a run says first: stages per rank, depth, staleness, memory."""
    schedule = plan.schedule
    graph, accumulation = schedule.graph, args.gradient_accumulation_steps
    edges = " ".join(
        f"{edge} ({plan.edge_bytes[pair].a_microbatch(accumulation, schedule.weights) / 1e6:.2f} MB)"
        for edge in graph.edges
        for pair in [(edge.source, edge.target)]
    )
    ranks = "; ".join(
        f"rank {rank}: {' '.join(map(str, schedule.stages_of(rank)))} "
        f"({(of[1] + of[2]) / _GIB:.2f} GiB, {of[3]:.1f} ms)"
        for rank, of in enumerate(of_devices(plan, args))
    )
    depth = max(map(graph.depth, range(schedule.num_stages)))
    lines = [
        f"{plan.captured.model_name}: {counted(schedule.num_stages, 'stage')} on "
        f"{counted(schedule.num_ranks, 'rank')}, {args.pipeline_schedule}; stages, memory and work of a "
        f"microbatch: {ranks}",
        f"edges, with what a microbatch sends over each: {edges or 'none'}",
    ]
    if schedule.weights.refreshes:
        stale = [-(-graph.depth(stage) // accumulation) for stage in range(schedule.num_stages)]
        lines.append(
            f"depth {depth}: the forwards of stages 0 to {schedule.num_stages - 1} use weights that are up to "
            f"{' '.join(map(str, stale))} steps older than those of their backwards"
            + (f", and {schedule.weights.ahead.value} from there" if schedule.weights.looks_ahead else "")
        )
    else:
        delay = schedule.weights.delay
        lines.append(
            f"depth {depth}: "
            + ("weights are never stale" if delay == 0 else "weights are one step old" if delay == 1 else "weights are "
               "stashed: backwards use those of their forwards")
        )  # fmt: skip
    takes, assumed = weight_bytes(args), plan.partition.weight_bytes_per_parameter
    if takes > assumed:
        lines.append(
            f"note: a parameter takes {takes:g} bytes with its optimizer, and the partition counted {assumed:g}; make "
            "it again with this run's --optim and --bf16"
        )
    return lines


def of_devices(plan: RunPlan, args: argparse.Namespace) -> list[tuple[int, float, float, float]]:
    """By device: parameters, bytes of weights with gradients and optimizer, bytes of activations, and milliseconds of a
    microbatch.
    """
    schedule, found = plan.schedule, []
    work = plan.partition.work(schedule.graph)
    saved_by_stage = schedule.max_saved_microbatches((args.gradient_accumulation_steps,) * 4)
    for rank in range(schedule.num_ranks):
        parameters, weights, saved, seconds = 0, 0.0, 0.0, 0.0
        for stage in schedule.stages_of(rank):
            cost = plan.partition.stages[stage]
            received = [each for (_, target), each in plan.edge_bytes.items() if target == stage]
            versions = schedule.weights.max_live_versions(stage, schedule.num_stages) - 1
            size = weight_bytes(args) + versions * plan.dtype.itemsize + _gap_bytes(plan, args, stage)
            parameters, weights = parameters + cost.parameters, weights + cost.parameters * size
            in_flight = saved_by_stage[stage]
            recomputes = schedule.recomputes(stage)
            saved += sum(each.activations for each in received) * in_flight
            # One value of a shared parameter for each version in flight, or step, and the sum of its gradients.
            is_stepped = schedule.weights.ahead is Ahead.PROVISIONAL_STEP
            held = -(-in_flight // (1 if is_stepped else args.gradient_accumulation_steps)) + 1
            saved += sum(each.parameters for each in received) * held
            saved += cost.saved_bytes * (1 if recomputes else in_flight)
            seconds += sum(work[stage])
        found.append((parameters, weights, saved, 1000 * seconds))
    return found


def _gap_bytes(plan: RunPlan, args: argparse.Namespace, stage: int) -> int:
    """Bytes a parameter has under gap-aware steps: the average of steps, the weights of each forward whose step is to
    come, and those before a step while it is taken.
    """
    steps_behind = -(-plan.schedule.graph.depth(stage) // args.gradient_accumulation_steps)
    if not args.gap_aware or not steps_behind:
        return 0
    return (steps_behind + 2) * (4 if args.bf16 else plan.dtype.itemsize)


def _seconds(plan: RunPlan, args: argparse.Namespace) -> float:
    return simulated_seconds(plan.schedule, plan.partition, plan.edge_bytes, args.gradient_accumulation_steps)
