"""What a run says about the weights that its batches are computed at, where these are not the newest."""

import argparse

from megatron.pipeline.start_up import provisional
from megatron.trainer.arguments.flags.values import choice_of


def description(args: argparse.Namespace, num_microbatches: int) -> str | None:
    """What to say of the schedule of `args` with batches of so many microbatches; None where there is nothing."""
    return provisional.description(args.schedule, choice_of(args).name, num_microbatches)
