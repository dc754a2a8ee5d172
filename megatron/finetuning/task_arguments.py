"""The flags of single tasks and of the model's attention, and the checks that need no data."""

from __future__ import annotations

import argparse
from collections.abc import Callable

TASKS_OF_FLAG = {
    "mlm_probability": ("masked-lm",),
    "whole_word_mask": ("masked-lm",),
}
"""Flag -> the tasks that read it."""

MLM_PROBABILITY = 0.15
"""The share of tokens that are hidden if --mlm_probability is not given, as in transformers' examples."""


ATTENTIONS = ("eager", "sdpa")
"""Words of --attn_implementation."""


def _attention(text: str) -> str:
    if text not in ATTENTIONS:
        raise argparse.ArgumentTypeError(
            f"stages are graphs of torch's operators, which {text!r} is not known to be; give {' or '.join(ATTENTIONS)}"
        )
    return text


def add_task(add: Callable[..., argparse.Action], *, within: Callable[..., Callable[[str], float]]) -> None:
    """Add the flags of single tasks. `add`: as of a group; `within`: makes a parser of numbers."""
    add("--attn_implementation", type=_attention, metavar="WORD",
        help="attention as single operators (eager) or as torch's kernel (sdpa); none: what transformers takes")  # fmt: skip
    add("--mlm_probability", type=within(0.001, float, most=1.0),
        help=f"share of the tokens that are hidden (masked-lm); {MLM_PROBABILITY}")  # fmt: skip
    add("--whole_word_mask", action="store_true", help="all tokens of a word are hidden, or none (masked-lm)")


def validate_task(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag that --task does not read."""
    for name, tasks in TASKS_OF_FLAG.items():
        if getattr(args, name) and args.task not in tasks:
            raise ValueError(f"--{name} is for --task {' and '.join(tasks)}, and --task is {args.task}; leave it out")
