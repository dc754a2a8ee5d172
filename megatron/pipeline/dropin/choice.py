"""From Megatron-LM's arguments to the schedule of a run, and the batches that it has to take."""

import argparse
from collections.abc import Sequence

from megatron.pipeline.program.weight_policies import FLUSH
from megatron.pipeline.schedules import PRESETS, Schedule


def schedule_of(args: argparse.Namespace, *, tied_embeddings: bool) -> Schedule:
    """The schedule that `args.pipeline_schedule` names, for the stages of `args`.

    Where Megatron-LM updates the weights, its reductions are no part of the program.

    Raises:
        ValueError: it does not take these stages.
    """
    name, num_virtual_stages = args.pipeline_schedule, args.virtual_pipeline_model_parallel_size or 1
    preset = PRESETS[name]
    choices = {}
    if preset.weights != FLUSH.name:
        choices = {
            "data_parallel": args.data_parallel_size > 1,
            "tied_embeddings": tied_embeddings and args.pipeline_model_parallel_size > 1,
            "norm_decides": args.clip_grad > 0.0 or getattr(args, "fp16", False),
        }
    if preset.interleaves:
        choices["microbatch_group_size"] = getattr(args, "microbatch_group_size_per_vp_stage", None)
    return Schedule.preset(
        name, num_stages=args.pipeline_model_parallel_size * num_virtual_stages,
        num_virtual_stages=num_virtual_stages, **choices,
    )  # fmt: skip


def batches_of(args: argparse.Namespace) -> Sequence[int]:
    """How many microbatches of a pipeline the batches of the run have, in the order in which they come."""
    per_microbatch = args.micro_batch_size * args.data_parallel_size
    sizes = [args.global_batch_size]
    if getattr(args, "rampup_batch_size", None) is not None:
        start, increment = (int(each) for each in args.rampup_batch_size[:2])
        sizes = [*range(start, args.global_batch_size, increment), args.global_batch_size]
    return [size // per_microbatch for size in sizes]


def prove(schedule: Schedule, batches: Sequence[int]) -> None:
    """Build and prove what the run will execute: every batch size, from each to the next, and the drain.

    The engine proves each batch again as it comes, from what this has kept.

    Raises:
        ValueError: the schedule does not take a batch.
    """
    stream = schedule.stream()
    for size in dict.fromkeys(batches):
        schedule.validate(size)
        for _ in range(schedule.settling_batches + 1):
            stream.start_batch(size)
    stream.drain()
