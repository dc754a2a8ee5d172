"""The flags of direct preference optimization (DPO), named as in TRL where its names say whose they are."""

from __future__ import annotations

import argparse
from collections.abc import Callable

PREFERENCE = "dpo"
"""The task."""

BETA = 0.1
"""How strongly a model is held to the one that it began as, unless given; TRL's default."""

FLAGS = ("dpo_beta", "dpo_label_smoothing", "chosen_column", "rejected_column")


def add_preference(add: Callable[..., argparse.Action], *, within: Callable[..., Callable[[str], float]]) -> None:
    """Add the flags. `add`: as of a group; `within`: makes a parser of numbers."""
    add("--chosen_column", help="column of the preferred answer (dpo)")
    add("--rejected_column", help="column of the other answer (dpo)")
    add("--dpo_beta", type=within(1e-6, float), metavar="B",
        help=f"how strongly the model is held to the one that it began as (dpo); {BETA:g}")  # fmt: skip
    add("--dpo_label_smoothing", type=within(0, float, most=0.5), metavar="E",
        help="share of pairs that are taken to be the wrong way round (dpo); 0")  # fmt: skip


def validate_preference(args: argparse.Namespace) -> None:
    """Check the flags. Raises ValueError, with the remedy, for flags that contradict each other."""
    if args.task != PREFERENCE:
        given = [name for name in FLAGS if getattr(args, name) is not None]
        if given:
            raise ValueError(f"--{given[0]} is for --task dpo, and --task is {args.task}; leave it out")
        return
    if not (args.do_train or args.dry_run or args.resume_from_checkpoint):
        raise ValueError(
            "--do_eval alone with --task dpo compares a model with itself, since rewards are relative to where a run "
            "began; give --resume_from_checkpoint, too"
        )
