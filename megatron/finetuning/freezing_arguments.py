"""The flags of training that freezes layers: the Megatron programs' flags in `finetune.py`'s spelling."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megatron.documents.flag_types import count, count_from_0
from megatron.finetuning.adapter_arguments import SOURCES
from megatron.finetuning.data.task_arguments import PREFERENCE

FREEZING = (
    "freeze_training", "freeze_interval", "freeze_start", "freeze_alpha", "freeze_schedule", "freeze_watch_validation",
)  # fmt: skip
"""The flags of freezing. A resumed run must repeat them."""

FREEZE_SCHEDULES = ("flush", "gpipe", "2bw", "l2l")
"""Schedules whose programs may have a frozen prefix."""

FREEZE_ALPHA = 1 / 3


def add_freezing(add: Callable[..., argparse.Action]) -> None:
    """Add the flags. `add`: the `add_argument` of a parser or of a group."""
    add("--freeze_training", action="store_true", help="freeze layers from the input on as they converge")
    add("--freeze_interval", type=count, help="batches between two decisions")
    add("--freeze_start", type=count_from_0, default=0, help="batches before the first interval begins")
    add("--freeze_alpha", type=float, help="largest part of the layers left that an interval freezes; 1/3")
    add("--freeze_schedule", metavar="N,N,...", help="frozen layers after interval 1, 2, ..., in place of gradients")
    add("--freeze_watch_validation", type=float, metavar="TOLERANCE",
        help="train all layers again when an evaluation is worse than the best before by more than this")  # fmt: skip


def settle(args: argparse.Namespace) -> None:
    """Check the flags of freezing, and set `freeze_counts` to the numbers of --freeze_schedule.

    Raises ValueError for flags that do not go together.
    """
    args.freeze_counts = ()
    if not args.freeze_training:
        for name in FREEZING:
            if getattr(args, name) not in (None, False, 0):
                raise ValueError(f"--{name} needs --freeze_training; add it, or leave this out")
        return
    if args.freeze_interval is None:
        raise ValueError("--freeze_training needs --freeze_interval, the batches between two decisions")
    if args.pipeline_schedule not in FREEZE_SCHEDULES:
        raise ValueError(
            f"--freeze_training needs stages that step together, and --pipeline_schedule is {args.pipeline_schedule}; "
            f"give {', '.join(FREEZE_SCHEDULES[:-1])} or {FREEZE_SCHEDULES[-1]}"
        )
    for name, why in (
        ("fp16", "its norms would have the loss scale"),
        ("load_best_model_at_end", "the best checkpoint may have another number of frozen layers"),
        ("pipeline_timeline", "the program changes during the run"),
        *((name, "an adapter's weights are frozen already") for name in SOURCES),
    ):
        if getattr(args, name, None):
            raise ValueError(f"--{name} does not go with --freeze_training: {why}; leave one out")
    if args.task == PREFERENCE:
        raise ValueError(
            f"--task {PREFERENCE} does not go with --freeze_training: a resumed run would compute its reference with "
            "the frozen layers of the checkpoint; leave --freeze_training out"
        )
    if args.freeze_schedule is not None:
        if args.freeze_alpha is not None:
            raise ValueError("--freeze_alpha has no effect with --freeze_schedule; leave one of them out")
        try:
            args.freeze_counts = tuple(map(int, args.freeze_schedule.split(",")))
        except ValueError:
            raise ValueError(
                f"--freeze_schedule {args.freeze_schedule} is no list of numbers of layers; give such as 0,4,6"
            ) from None
    if args.freeze_watch_validation is not None and args.eval_strategy == "no":
        raise ValueError(
            "--freeze_watch_validation compares evaluations during training; give --eval_strategy steps or epoch"
        )
