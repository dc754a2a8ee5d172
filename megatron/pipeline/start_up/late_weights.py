"""Late and predicted weights: their flags, their description, and the Transformer Engine that they need."""

import argparse
import importlib.metadata

from packaging.version import Version

from megatron.documents import counted
from megatron.pipeline.program.weight_policies import TWO_BW, WeightPolicy
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule


def take_error_feedback(args: argparse.Namespace) -> None:
    """Set the flags of `--2bw-provisional` for `--2bw-error-feedback`: a prediction that reads no gradients.

    Raises:
        ValueError: both are given.
    """
    if not args.pipeline_2bw_error_feedback:
        return
    if args.pipeline_2bw_provisional_microbatches not in (None, 0):
        raise ValueError(
            f"--2bw-error-feedback reads no gradients, and --2bw-provisional-microbatches "
            f"{args.pipeline_2bw_provisional_microbatches} asks for some; leave one of them out"
        )
    if args.pipeline_2bw_provisional != "off" and args.pipeline_2bw_provisional_microbatches != 0:
        raise ValueError(
            f"--2bw-error-feedback and --2bw-provisional {args.pipeline_2bw_provisional} both estimate the same "
            "missing update, and a batch uses only one estimate; leave one of them out (docs/error_feedback.md)"
        )
    args.pipeline_2bw_provisional, args.pipeline_2bw_provisional_microbatches = "uniform", 0


def require_predictions(args: argparse.Namespace, weights: WeightPolicy, name: str) -> None:
    """Raise ValueError if `--2bw-provisional` or a flag that belongs to it is not possible in this run.

    Args:
        args: the parsed arguments, in which the flags' names begin with `pipeline_2bw_provisional`.
        weights: the weight policy of the schedule, without predictions.
        name: the name of the schedule for messages.
    """
    mode, number = args.pipeline_2bw_provisional, args.pipeline_2bw_provisional_microbatches
    flag = "--2bw-error-feedback" if args.pipeline_2bw_error_feedback else f"--2bw-provisional {mode}"
    if mode == "off" and (number is not None or args.pipeline_2bw_provisional_reduce):
        given = "--2bw-provisional-reduce" if number is None else f"--2bw-provisional-microbatches {number}"
        raise ValueError(f"{given} has no effect without predictions; add --2bw-provisional, or leave it out")
    if mode == "off":
        return
    if weights != TWO_BW:
        raise ValueError(
            f"{flag} goes with the weights of --pipeline-schedule 2bw, not {name}: leave it out, or use 2bw"
        )
    if (mode == "uniform") != (number is not None):
        raise ValueError(
            f"{flag} reads what each stage has done; leave out --2bw-provisional-microbatches, or use uniform"
            if mode == "stage"
            else f"{flag} needs --2bw-provisional-microbatches, from 0 to m-p+1"
        )
    if args.pipeline_2bw_provisional_reduce and number == 0:
        raise ValueError(
            "--2bw-provisional-reduce has nothing to reduce where predictions read no gradients; leave it out"
        )
    if args.pipeline_2bw_provisional_reduce and args.data_parallel_size * args.context_parallel_size == 1:
        raise ValueError("--2bw-provisional-reduce needs replicas, and this job has one; leave it out")


def description(schedule: PipelineSchedule, name: str, num_microbatches: int) -> str | None:
    """The log line on the weights at which a batch of `num_microbatches` is computed; None for the newest weights.

    `name`: the name of the schedule for messages.
    """
    if schedule.weights == TWO_BW:
        return (
            f"{name} computes each batch at the weights of one update before, so its loss may be far higher at a "
            "learning rate at which flush is stable; add --2bw-provisional stage, which predicts the newest weights "
            "(docs/provisional.md), or take a smaller --lr"
        )
    if not schedule.weights.predicts:
        return None
    if schedule.provisional_microbatches == 0:
        return f"{name} with error feedback: each batch uses the last update twice, in place of the missing one"
    read = [num_microbatches - unread for unread in schedule.remaining_backwards(num_microbatches)]
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
    return f"{name} with provisional weights: {stages} {numbers} of {counted(num_microbatches, 'microbatch')}{replicas}"


LOOKS_UP_GRADIENTS = "2.6.0"
"""The first Transformer Engine whose linear layers look up a weight's `main_grad` in the backward.

The layers are `Linear`, `LayerNormLinear` and `LayerNormMLP`. Older versions read `main_grad` in the forward (2.0 to
2.5), or from the weight that the autograd graph has saved, which need not be the parameter (1.x)."""

PUTS_GRADIENTS_OFF = "2.3.0"
"""The first Transformer Engine whose linear layers can put weight gradients off (`delay_wgrad_compute`)."""


def installed_engine_version() -> str:
    """The installed version of Transformer Engine; "0.0" if it has no package metadata, as when built from source."""
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return "0.0"


def engine_keeps_main_grad(version: str) -> bool:
    """Whether this version of Transformer Engine adds gradients to the buffer that was current in the forward.

    `version`: such as "2.5.0+a1b2c3".
    """
    return Version(version) < Version(LOOKS_UP_GRADIENTS)


def engine_puts_off(version: str) -> bool:
    """Whether the layers of this version of Transformer Engine can put weight gradients off."""
    return Version(version) >= Version(PUTS_GRADIENTS_OFF)
