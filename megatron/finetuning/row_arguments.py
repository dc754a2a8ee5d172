"""The flags of rows: the padding of microbatches, files that keep rows, and the checks that need no model."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable

from megatron.documents.flag_types import count

PADDED = ("text-to-text", "sequence-classification", "causal-lm", "chat", "token-classification")
"""The tasks whose rows have different lengths, and whose losses do not depend on the padding behind.
A softmax of question-answering is over all tokens of a row, padding included."""

STORED = (*PADDED, "question-answering")
"""The tasks whose rows are whole numbers, decided by the file of samples, the model's folder and the flags."""


def add_rows(add: Callable[..., argparse.Action]) -> None:
    """Add the flags. `add`: the `add_argument` of a parser or of a group."""
    padding = "a microbatch is padded to the multiple of N tokens that holds its longest row; none: all to one length"
    add("--pad_to_multiple_of", type=count, metavar="N", help=padding)
    add("--group_by_length", action="store_true", default=None, help="rows of similar lengths make a batch")
    add("--data_cache", metavar="FOLDER", help="rows to train on are kept in files there, for data larger than memory")


def validate_rows(args: argparse.Namespace) -> None:
    """Check the flags. Raises ValueError for rows that all have one length, and for rows that no file can keep."""
    if args.data_cache is not None:
        where = f"--data_cache {args.data_cache}"
        if args.task not in STORED:
            raise ValueError(f"{where} is for --task {', '.join(STORED)}, and --task is {args.task}; leave it out")
        if args.packing:
            raise ValueError(f"{where} takes rows one after another, and --packing chooses among all; leave one out")
        if importlib.util.find_spec("datasets") is None:
            raise ValueError(f"{where} needs the package datasets; pip install .[datasets]")
    if args.pad_to_multiple_of is None and not args.group_by_length:
        return
    flag = "--group_by_length" if args.pad_to_multiple_of is None else f"--pad_to_multiple_of {args.pad_to_multiple_of}"
    if args.task not in PADDED:
        raise ValueError(
            f"{flag} is for --task {', '.join(PADDED)}, whose losses do not depend on padding, and --task is "
            f"{args.task}; leave it out"
        )
    if args.packing or (args.task == "causal-lm" and not args.no_group_texts):
        full = "--packing" if args.packing else "--task causal-lm without --no_group_texts"
        raise ValueError(f"{flag} is for rows of different lengths, and with {full} all rows are full; leave it out")
