"""How many rows an embedding has. No torch in here."""

import argparse

USUAL = {"gpt": ("GPT-2's", 50257), "bert": ("BERT's", 30522), "bert-classify": ("BERT's", 30522)}
"""By architecture: whose vocabulary is taken where none is given, and its size."""
_OF_ONE_MODEL = {"Llama2Tokenizer": ("Llama 2's", 32000)}


def usual(args: argparse.Namespace) -> tuple[str, int]:
    """Whose vocabulary is taken where neither tokenizer nor --vocab-size can be asked, and its size."""
    return _OF_ONE_MODEL.get(args.tokenizer_type, USUAL[args.architecture])


def assumed_size(args: argparse.Namespace) -> int:
    """Token ids without asking a tokenizer: those of --vocab-size, or of the usual one."""
    return (args.vocab_size or usual(args)[1]) + args.vocab_extra_ids


def padded(args: argparse.Namespace, size: int) -> int:
    """`size` up to a multiple of --make-vocab-size-divisible-by x tensor parallel size."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-size // multiple) * multiple
