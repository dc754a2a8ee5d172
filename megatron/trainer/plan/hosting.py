"""Whether weights live on the host, and what the planner has to know of that."""

import argparse

from megatron.pipeline.schedules import Schedule
from megatron.planner.memory.hosted import Hosting


def hosting_of(args: argparse.Namespace, schedule: Schedule) -> Hosting | None:
    """None: weights live on the device."""
    if schedule.residency is None:
        return None
    most = max(args.batch_sizes.all_num_microbatches())
    return Hosting(stages=schedule.residency.stages, stash=schedule.residency.stash, num_microbatches=most)
