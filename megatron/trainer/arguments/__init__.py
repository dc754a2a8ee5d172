"""The command line of the training programs: Megatron-LM's flags as data, with rules. Imports no torch.

A rule checks which values fit together, and may fill in a value that follows from others. It takes the run's
`Arguments`, returns notes for the log, and raises ValueError with one sentence: value, reason, remedy. The order of the
rules matters only if a rule uses a value that an earlier rule has filled in (degrees before stages and batches, these
before schedules).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron.trainer.arguments import hugging_face
from megatron.trainer.arguments.flags.parser import FLAGS, build_parser, parse_args, shown
from megatron.trainer.arguments.flags.specification import Arguments
from megatron.trainer.arguments.platform import Platform, resolve_platform
from megatron.trainer.arguments.rules import (
    attention,
    context,
    data,
    experts,
    fp8,
    freezing,
    lost_ranks,
    model,
    optimistic,
    programs,
    run,
    schedule,
    stages,
    without_effect,
)

__all__ = ["Platform", "build_parser", "notes_on_overridden", "parse_args", "resolve_platform", "validate_args"]

RULES: tuple[Callable[[Arguments], Iterable[str] | None], ...] = (
    *programs.FIRST, hugging_face.load_hf, programs.t5_shape, *model.RULES, attention.attention, experts.experts,
    context.context, schedule.pipeline_program, *stages.RULES, *programs.RULES, programs.t5, freezing.flags,
    optimistic.optimistic_steps, *run.RULES, lost_ranks.lost_ranks, experts.counted_tokens, experts.moved_activations,
    model.freed_activations, fp8.fp8, *data.RULES, freezing.schedules, freezing.intervals, *programs.LAST,
    *without_effect.RULES,
)  # fmt: skip


def validate_args(args: Arguments, *, world_size: int, rank: int = 0) -> list[str]:
    """Check `args` and fill in the values that follow from the flags.

    Sets `world_size`, `rank`, `data_parallel_size`, `batch_sizes` (a `BatchSizes`), `train_iters`, ... Returns notes
    for the log, for example about values without an effect. Raises ValueError for the first broken rule.
    """
    args.world_size, args.rank = world_size, rank
    notes = [note for rule in RULES for note in rule(args) or ()]
    return notes + _notes_on_ignored(args)


def _notes_on_ignored(args: Arguments) -> list[str]:
    given = [flag for flag in FLAGS if flag.ignored and flag.dest in args.given]
    values = [(flag, getattr(args, flag.dest)) for flag in given]
    notes = [
        f"{shown(flag, value)} has no effect: {flag.ignored}" for flag, value in values if value not in flag.neutral
    ]
    return [*notes, *args.unread]


def notes_on_overridden(given: Mapping[str, Any], args: Arguments) -> list[str]:
    """Notes for the log about flags that --use-checkpoint-args overrode.

    Args:
        given: the values that the command line named, by destination.
        args: the arguments after the checkpoint's were taken over.
    """
    notes = []
    for flag in FLAGS:
        if flag.dest in given and given[flag.dest] != (taken := getattr(args, flag.dest)):
            written = shown(flag, given[flag.dest])
            notes.append(
                f"{written} has no effect: --use-checkpoint-args takes {flag.dest} {taken} from the checkpoint"
            )
    return notes
