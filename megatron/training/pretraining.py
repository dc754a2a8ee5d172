"""`pretrain`: one training job on this rank, from checked flags to the last checkpoint."""

import argparse
from collections.abc import Callable

from megatron.pipeline.runtime import failure
from megatron.pipeline.runtime.megatron_stage import ForwardStep
from megatron.training import initialize
from megatron.training.arguments import resolve_platform, validate_args
from megatron.training.assembly import DatasetsProvider, ModelProvider, assemble
from megatron.training.checkpointing import apply_checkpoint_arguments
from megatron.training.entry import SameEverywhere, agree_or_raise
from megatron.training.logging import configure_logging
from megatron.training.loop import run_to_the_end
from megatron.training.signals import StopSignal


def pretrain(
    args: argparse.Namespace,
    stop: StopSignal,
    started: float,
    *,
    model_provider: Callable[[argparse.Namespace, object], ModelProvider],
    forward_step: ForwardStep,
    datasets_provider: DatasetsProvider,
) -> None:
    """Train as `args` say.

    Args:
        args: parsed; validated unless `--use-checkpoint-args` is given, which happens here.
        stop, started: SIGTERM as a wish, and when the program started (`time.time()`).
        model_provider, forward_step, datasets_provider: see `assembly.assemble`.

    Raises:
        SameEverywhere: an error that all ranks found alike; print it once.
    """
    configure_logging(args.logging_level)
    rank, world_size, _ = initialize.environment_ranks()
    try:
        if args.use_checkpoint_args:
            apply_checkpoint_arguments(args)
            args.notes_for_log = validate_args(args, world_size=world_size, rank=rank)
        notes = args.notes_for_log + resolve_platform(args, initialize.this_platform())
        del args.notes_for_log
        initialize.initialize(args)
    except ValueError as error:
        raise SameEverywhere(str(error)) from error
    outcome = None
    with failure.guard():
        try:
            run = assemble(args, model_provider=model_provider, forward_step=forward_step,
                           datasets_provider=datasets_provider)  # fmt: skip
            for note in notes:
                run.reporter.say(f"note: {note}")
            run_to_the_end(run, stop, started=started)
        except ValueError as error:
            try:
                agree_or_raise(error)
            except SameEverywhere as same:
                outcome = same
    if outcome is not None:
        raise outcome
    initialize.shut_down()
