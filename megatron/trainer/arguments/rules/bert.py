"""Rules of BERTs: what `pretrain_bert.py` does not have of other programs' flags is refused by name."""

import argparse

from megatron.trainer.arguments.rules.programs import Refusals, refuse_values

SHORTEST_SEQUENCE = 5
"""Tokens: [CLS], two [SEP], and two of text, the least that megatron.core's samples have."""
_LARGEST_SEED = 2**31 - 1  # of megatron.core's sample index

LAYER_REFUSALS: Refusals = {
    "qk_layernorm": (False, "megatron.core's BERT layer has no such norm; leave the flag out"),
    "normalization": ("LayerNorm", "the head of megatron.core's BERT has a LayerNorm; leave the flag out"),
    "rotary_base": (10000, "megatron.core's BERT rotates with 10000; leave the flag out"),
    "use_rope_scaling": (False, "megatron.core's BERT does not scale them; leave the flag out"),
}
_REFUSALS: Refusals = {
    "mock_data": (False, "megatron.core has no synthetic samples of BERT; give --data-path"),
    "reset_position_ids": (False, "a sample of BERT ends with its document; leave the flag out"),
    "reset_attention_mask": (False, "a sample of BERT ends with its document; leave the flag out"),
    "eod_mask_loss": (False, "only masked tokens have a loss; leave the flag out"),
    "calculate_per_token_loss": (
        False,
        "microbatches differ in their number of masked tokens, and their losses are averaged; leave the flag out",
    ),
    "create_attention_mask_in_dataloader": (True, "BERT needs the masks of its padding; leave the flag out"),
    **LAYER_REFUSALS,
}


def bert(args: argparse.Namespace) -> None:
    """Flags fit a BERT and its samples."""
    if args.architecture != "bert":
        return
    refuse_values(args, _REFUSALS)
    if args.seq_length < SHORTEST_SEQUENCE:
        raise ValueError(
            f"--seq-length {args.seq_length} has no room for [CLS], two [SEP] and two tokens of text; give at least "
            f"{SHORTEST_SEQUENCE}"
        )
    if args.seed > _LARGEST_SEED:
        raise ValueError(f"--seed {args.seed} is beyond what BERT's sample index takes; give at most {_LARGEST_SEED}")


RULES = (bert,)
