"""The programs of a run, proved before it begins, and what they ask of memory. Without torch."""

import argparse

from megatron.pipeline.check import CheckReport, check_periodic
from megatron.pipeline.schedules import PipelineSchedule
from megatron.planner import Demand, demand_of, most


def prove(args: argparse.Namespace) -> tuple[CheckReport, Demand]:
    """Build and prove what the run would execute; returns the report of its largest batches, and what all demand.

    The runtime executes segments of a stream, whose programs are proved as they are built: here every batch size of the
    run, from each to the next, and the evaluation. The largest size is proved for any number of batches besides.

    Raises ProgramError, ValueError.
    """
    schedule = args.schedule
    sizes = list(dict.fromkeys(args.batch_sizes.all_num_microbatches()))
    stream = schedule.stream()
    for size in sizes:
        for _ in range((schedule.settling_batches or 0) + 1):
            stream.start_batch(size)
    stream.drain()
    if args.eval_iters:
        stream.evaluation(sizes[-1])
    proved = [_prove_periodic(schedule, size) for size in dict.fromkeys((sizes[0], max(sizes)))]
    return proved[-1][0], most(demand for _, demand in proved)


def _prove_periodic(schedule: PipelineSchedule, num_microbatches: int) -> tuple[CheckReport, Demand]:
    periodic = schedule.build_periodic(num_microbatches)
    program = periodic.unroll(1)
    report = check_periodic(
        periodic,
        max_saved=schedule.max_saved_microbatches(program.batches),
        max_saved_on_rank=schedule.max_saved_on_rank(program.batches),
    )
    return report, demand_of(program, report)
