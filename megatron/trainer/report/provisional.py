"""What a run says about the weights that its batches are computed at, where these are not the newest."""

import argparse

from megatron.pipeline.program.weight_policies import TWO_BW
from megatron.trainer.arguments.values.pipeline_choice import choice_of


def description(args: argparse.Namespace, num_microbatches: int) -> str | None:
    """What to say of 2bw's delay with batches of so many microbatches; None where there is nothing."""
    schedule = args.schedule
    if schedule.weights == TWO_BW:
        return (
            f"{choice_of(args).name} computes each batch at the weights of one update before; "
            "--2bw-provisional stage predicts the newest (docs/provisional.md)"
        )
    if not schedule.weights.predicts:
        return None
    read = [num_microbatches - unread for unread in schedule.unread(num_microbatches)]
    if schedule.provisional_microbatches is not None:
        read = [schedule.provisional_microbatches] * schedule.num_stages
    if len(set(read)) == 1:
        stages = "every stage reads" if schedule.num_stages > 1 else "the stage reads"
        numbers = str(read[0])
    else:
        stages, numbers = "stages read", ", ".join(map(str, read))
    if schedule.data_parallel:
        replicas = ", means over the replicas" if schedule.reduce_partial else " of each replica"
    else:
        replicas = ""
    return (
        f"{choice_of(args).name} with provisional weights: {stages} {numbers} of {num_microbatches} microbatches"
        f"{replicas}"
    )
