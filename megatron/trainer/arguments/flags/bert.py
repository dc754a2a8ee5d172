"""Flags of `pretrain_bert.py`, one of them of `finetune_bert.py`, too."""

from megatron.trainer.arguments.flags.specification import Group, Role, negation, number, option

NUM_TOKEN_TYPES = 2
"""First and second segment of a sample."""

GROUP = Group(
    "bert",
    "What `pretrain_bert.py` learns to predict. The other programs refuse these flags, but for --bert-no-binary-head, "
    "which `finetune_bert.py` needs for a BERT that was trained with it.",
    (
        option("--mask-prob", number, 0.15, "Share of a sample's tokens that are to be predicted.", roles=Role.ORDER),
        option(
            "--short-seq-prob",
            number,
            0.1,
            "Share of samples that are cut to a random length; rounded to 1 / a whole number.",
            roles=Role.ORDER,
        ),
        negation(
            "--bert-no-binary-head",
            "bert_binary_head",
            "Predict masked tokens only: one segment a sample, no token types, and no head that says whether two "
            "segments were swapped.",
            roles=Role.SHAPE,
        ),
    ),
)
