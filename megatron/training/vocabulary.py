"""How many rows an embedding has. No torch in here."""

import argparse

USUAL = {"gpt": ("GPT-2's", 50257), "bert": ("BERT's", 30522)}
"""By architecture: whose vocabulary is taken where none is given, and its size."""


def assumed_size(args: argparse.Namespace) -> int:
    """Token ids without asking a tokenizer: those of --vocab-size, or of the usual one."""
    return (args.vocab_size or USUAL[args.architecture][1]) + args.vocab_extra_ids


def padded(args: argparse.Namespace, size: int) -> int:
    """`size` up to a multiple of --make-vocab-size-divisible-by x tensor parallel size."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-size // multiple) * multiple
