"""Rules that depend on whether a BERT or a GPT is trained: `args.architecture`, "bert" or "gpt".

What only the other one has is refused by name.
"""

import argparse

from megatron.training.arguments import bert as flags_of_bert
from megatron.training.arguments.parser import GROUPS, shown

SHORTEST_SEQUENCE = 5
"""Tokens: [CLS], two [SEP], and two of text, the least that megatron.core's samples have."""
_LARGEST_SEED = 2**31 - 1  # of megatron.core's sample index

# Destination -> (the value that asks for nothing, why any other is refused).
_NOT_FOR_BERT = {
    "mock_data": (False, "megatron.core has no synthetic samples of BERT; give --data-path"),
    "reset_position_ids": (False, "a sample of BERT ends with its document; leave the flag out"),
    "reset_attention_mask": (False, "a sample of BERT ends with its document; leave the flag out"),
    "eod_mask_loss": (False, "only masked tokens have a loss; leave the flag out"),
    "calculate_per_token_loss": (
        False,
        "microbatches differ in their number of masked tokens, and their losses are averaged; leave the flag out",
    ),
    "create_attention_mask_in_dataloader": (True, "BERT needs the masks of its padding; leave the flag out"),
    "qk_layernorm": (False, "megatron.core's BERT layer has no such norm; leave the flag out"),
    "normalization": ("LayerNorm", "the head of megatron.core's BERT has a LayerNorm; leave the flag out"),
    "rotary_base": (10000, "megatron.core's BERT rotates with 10000; leave the flag out"),
    "use_rope_scaling": (False, "megatron.core's BERT does not scale them; leave the flag out"),
}


def architecture(args: argparse.Namespace) -> None:
    """Flags fit the architecture of the program."""
    if args.architecture != "bert":
        for each in flags_of_bert.GROUP.flags:
            if each.dest in args.given:
                raise ValueError(f"{each.name} belongs to pretrain_bert.py; leave it out")
        return
    named = {each.dest: each for group in GROUPS for each in group.flags}
    for name, (neutral, reason) in _NOT_FOR_BERT.items():
        value = getattr(args, name)
        if value != neutral:
            raise ValueError(f"{shown(named[name], value)}: {reason}")
    if args.seq_length < SHORTEST_SEQUENCE:
        raise ValueError(
            f"--seq-length {args.seq_length} has no room for [CLS], two [SEP] and two tokens of text; give at least "
            f"{SHORTEST_SEQUENCE}"
        )
    if args.seed > _LARGEST_SEED:
        raise ValueError(f"--seed {args.seed} is beyond what BERT's sample index takes; give at most {_LARGEST_SEED}")


RULES = (architecture,)
