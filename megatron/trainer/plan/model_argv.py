"""The flags of a training script without those that a configuration, or a short run itself, decides.

A profile and a measured run belong to a model, its data and its precision; they choose degrees, batches, schedule,
recompute scope, length and outputs themselves. So a user may hand over the flags of a whole script. No torch in here.
"""

from collections.abc import Sequence

from megatron.trainer.arguments import parse_args
from megatron.trainer.arguments.flags.parser import GROUPS
from megatron.trainer.plan.command import CHOSEN, CHOSEN_GROUPS, PROGRAMS, written

_OF_A_RUN_GROUPS = frozenset({"learning rate", "checkpoint", "logging"})
_OF_A_RUN = frozenset(
    {
        "pipeline_timeline", "pipeline_timeline_iterations", "distributed_timeout_minutes", "local_rank",
        "rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed",
        "train_iters", "train_samples", "exit_interval",
        "exit_duration_in_mins", "exit_signal_handler", "skip_train", "eval_iters", "eval_interval",
    }
)  # fmt: skip
_KEPT = frozenset({"lr", "min_lr"})


def model_words(words: Sequence[str], *, architecture: str) -> tuple[str, ...]:
    """The words of `words` that say what is trained, in the order of docs/flags.md.

    Raises ValueError as `parse_args`.
    """
    program, defaults = PROGRAMS[architecture]
    args = parse_args(list(words), prog=program, defaults=defaults)
    kept: list[str] = []
    for group in GROUPS:
        for flag in group.flags:
            chosen = flag.dest in CHOSEN or group.title in CHOSEN_GROUPS
            of_a_run = flag.dest in _OF_A_RUN or group.title in _OF_A_RUN_GROUPS
            if flag.dest in args.given and (flag.dest in _KEPT or not (chosen or of_a_run)):
                kept += written(flag, args) if flag.stores in (None, getattr(args, flag.dest, None)) else ()
    return tuple(kept)
