"""The flags of rows: what a microbatch is padded to, and the checks that need no model."""

from __future__ import annotations

import argparse
from collections.abc import Callable

PADDED = ("text-to-text", "sequence-classification", "causal-lm", "chat", "token-classification", "question-answering")
"""The tasks whose rows are sequences of different lengths, with padding behind."""


def add_rows(add: Callable[..., argparse.Action], *, count: Callable[[str], float]) -> None:
    """Add the flags. `add`: as of a group; `count`: parses a number from 1 on."""
    add("--pad_to_multiple_of", type=count, metavar="N",
        help="a microbatch is padded to the multiple of N tokens that holds its longest row; none: all to one length")  # fmt: skip
    add("--group_by_length", action="store_true", default=None, help="rows of similar lengths make a batch")


def validate_rows(args: argparse.Namespace) -> None:
    """Check the flags. Raises ValueError if the rows of the task have one length."""
    if args.pad_to_multiple_of is None and not args.group_by_length:
        return
    flag = "--group_by_length" if args.pad_to_multiple_of is None else f"--pad_to_multiple_of {args.pad_to_multiple_of}"
    if args.task not in PADDED:
        raise ValueError(f"{flag} is for --task {', '.join(PADDED)}, and --task is {args.task}; leave it out")
    if args.packing or (args.task == "causal-lm" and not args.no_group_texts):
        full = "--packing" if args.packing else "--task causal-lm without --no_group_texts"
        raise ValueError(f"{flag} is for rows of different lengths, and with {full} all rows are full; leave it out")
