"""What a command line names and this machine does not have: the files of data, tokenizer and checkpoint.

A dry run is often made where none of them are. What is here is checked as a run would check it; what is not becomes a
line for the user.
"""

import argparse
import os

from megatron.trainer.arguments.flags.model import CLASSIFIERS
from megatron.trainer.arguments.flags.values import assumed_vocabulary, padded_vocabulary, usual_vocabulary
from megatron.trainer.arguments.rules.programs import data_paths
from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size, problem_with_tokenizer
from megatron.trainer.files.indexed_files import blends, check_indexed_dataset


def missing_data(args: argparse.Namespace) -> list[str]:
    """A line for each part of the data that is not here. Raises ValueError for files that are here and damaged."""
    if args.architecture in CLASSIFIERS:
        named = (path for paths in data_paths(args).values() for path in paths)
        return [f"data {path} is not on this machine" for path in named if not os.path.exists(path)]
    for flag, path in (
        ("--data-args-path", args.data_args_path),
        ("--per-split-data-args-path", args.per_split_data_args_path),
    ):
        if path is not None and not os.path.exists(path):
            return [f"{flag} {path} is not on this machine"]
    blend, per_split = blends(args)
    lines = []
    for prefix in [prefix for each in (blend, *(per_split or ())) if each for prefix in each[0]]:
        absent = [name for name in (f"{prefix}.idx", f"{prefix}.bin") if not os.path.exists(name)]
        if absent:
            lines.append(f"data file {' and '.join(absent)} is not on this machine")
        else:
            check_indexed_dataset(prefix)
    return lines


def missing_checkpoint(args: argparse.Namespace) -> list[str]:
    """A line for each directory to load from that is not here."""
    named = (("--load", args.load), ("--pretrained-checkpoint", args.pretrained_checkpoint))
    return [f"{flag} {path} is not on this machine" for flag, path in named if path and not os.path.isdir(path)]


def choose_vocabulary(args: argparse.Namespace) -> list[str]:
    """Set `args.padded_vocab_size`: from the tokenizer, or where it is not here, from --vocab-size or a common one.

    Returns a line where it had to be assumed. Raises ValueError for a tokenizer that is here and cannot be read.
    """
    if args.architecture == "vit":
        args.padded_vocab_size = 0
        return []
    problem = problem_with_tokenizer(args)
    if problem is None and args.tokenizer_model is not None and not os.path.exists(args.tokenizer_model):
        problem = f"--tokenizer-model {args.tokenizer_model} names a hub, which is not asked"
    if problem is None:
        args.padded_vocab_size = padded_vocab_size(args, build_tokenizer(args))
        return []
    name, _ = usual_vocabulary(args)
    args.padded_vocab_size = padded_vocabulary(args, assumed_vocabulary(args))
    source = "as --vocab-size says" if args.vocab_size else f"as {name}; --vocab-size says another"
    return [f"{problem}; the embedding is taken to have {args.padded_vocab_size} rows, {source}"]
