"""Which values fit together: a list of small rules, each of which may also fill in a value that follows from others.

A rule takes the namespace and raises ValueError with one sentence: value, reason, remedy. The order matters only where
a rule uses what an earlier one has filled in (degrees before stages and batches, these before schedules).
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from megatron.training.arguments import (
    rules_bert,
    rules_classification,
    rules_data,
    rules_freezing,
    rules_model,
    rules_programs,
    rules_run,
    rules_stages,
)
from megatron.training.arguments.parser import GROUPS, shown

RULES: tuple[Callable[[argparse.Namespace], None], ...] = (
    *rules_classification.FIRST,
    *rules_model.RULES,
    *rules_stages.RULES,
    *rules_programs.RULES,
    *rules_bert.RULES,
    *rules_classification.RULES,
    rules_freezing.flags,
    *rules_run.RULES,
    *rules_data.RULES,
    rules_freezing.schedules,
    *rules_classification.LAST,
)


def validate_args(args: argparse.Namespace, *, world_size: int, rank: int = 0) -> list[str]:
    """Check `args` and fill in what follows from it.

    Sets `world_size`, `rank`, `data_parallel_size`, `batch_sizes` (a `BatchSizes`), `train_iters`, ... Returns notes
    for the log about values that were given and have no effect. Raises ValueError.
    """
    args.world_size, args.rank = world_size, rank
    args.notes = []
    for rule in RULES:
        rule(args)
    notes = args.notes + _notes_on_ignored(args)
    del args.notes
    return notes


def _notes_on_ignored(args: argparse.Namespace) -> list[str]:
    given = [flag for group in GROUPS for flag in group.flags if flag.ignored and flag.dest in args.given]
    values = [(flag, getattr(args, flag.dest)) for flag in given]
    return [
        f"{shown(flag, value)} has no effect: {flag.ignored}" for flag, value in values if value not in flag.neutral
    ]


def notes_on_overridden(given: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """Notes for the log about flags that --use-checkpoint-args overrode.

    Args:
        given: the values that the command line named, by destination.
        args: the arguments after the checkpoint's were taken over.
    """
    notes = []
    for flag in (flag for group in GROUPS for flag in group.flags):
        if flag.dest in given and given[flag.dest] != (taken := getattr(args, flag.dest)):
            written = shown(flag, given[flag.dest])
            notes.append(
                f"{written} has no effect: --use-checkpoint-args takes {flag.dest} {taken} from the checkpoint"
            )
    return notes
