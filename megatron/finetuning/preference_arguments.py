"""The flags of direct preference optimization (DPO), named as in TRL where its names say whose they are."""

from __future__ import annotations

import argparse
from collections.abc import Callable

PREFERENCE = "dpo"
"""The task."""

ELSEWHERE = {"dpo_beta": 0.1, "dpo_label_smoothing": 0.0, "chosen_column": None, "rejected_column": None}
"""Flags of this task alone -> their defaults, which are TRL's."""


def add_preference(add: Callable[..., argparse.Action], *, within: Callable[..., Callable[[str], float]]) -> None:
    """Add the flags. `add`: as of a group; `within`: makes a parser of numbers."""
    add("--chosen_column", help="column of the preferred answer (dpo)")
    add("--rejected_column", help="column of the other answer (dpo)")
    add("--dpo_beta", type=within(1e-6, float), metavar="B", default=ELSEWHERE["dpo_beta"],
        help="how strongly the model is held to the one that it began as (dpo)")  # fmt: skip
    add("--dpo_label_smoothing", type=within(0, float, most=0.5), metavar="E", default=ELSEWHERE["dpo_label_smoothing"],
        help="share of pairs that are taken to be the wrong way round (dpo)")  # fmt: skip


def validate_preference(args: argparse.Namespace) -> None:
    """Check the flags. Raises ValueError, with the remedy, for flags that contradict each other."""
    if args.task != PREFERENCE:
        given = [name for name, default in ELSEWHERE.items() if getattr(args, name) != default]
        if given:
            raise ValueError(f"--{given[0]} is for --task dpo, and --task is {args.task}; leave it out")
        return
    if not (args.do_train or args.dry_run or args.resume_from_checkpoint):
        raise ValueError(
            "--do_eval alone with --task dpo compares a model with itself, since rewards are relative to where a run "
            "began; give --resume_from_checkpoint, too"
        )
