"""Which program a flag belongs to: `args.architecture`, "gpt", "bert", "vit" or "bert-classify".

What only another one has is refused by name.
"""

import argparse
from collections.abc import Mapping

from megatron.trainer.arguments.flags import bert, classification
from megatron.trainer.arguments.flags.parser import FLAGS, shown

Refusals = Mapping[str, tuple[object, str]]
"""Destination -> (the value that asks for nothing, why any other is refused)."""

_OWNERS = (
    (bert.GROUP, ("bert",), "pretrain_bert.py"),
    (classification.GROUP, classification.CLASSIFIERS, "pretrain_vision_classify.py and finetune_bert.py"),
    (classification.VISION, ("vit",), "pretrain_vision_classify.py"),
)
_SHARED = {"bert_binary_head": ("bert", "bert-classify")}
ONLY_OF = {
    each.dest: _SHARED.get(each.dest, architectures) for group, architectures, _ in _OWNERS for each in group.flags
}
"""Destination -> the architectures to which it belongs, where these are not all."""


def owners(args: argparse.Namespace) -> None:
    """Flags fit the architecture of the program."""
    for group, _, programs in _OWNERS:
        for each in group.flags:
            if each.dest in args.given and args.architecture not in ONLY_OF[each.dest]:
                raise ValueError(f"{each.name} belongs to {programs}; leave it out")


def refuse_values(args: argparse.Namespace, refusals: Refusals) -> None:
    """Raise ValueError for the first value that asks for what the program does not have."""
    named = {each.dest: each for each in FLAGS}
    for name, (neutral, reason) in refusals.items():
        value = getattr(args, name)
        if value != neutral:
            raise ValueError(f"{shown(named[name], value)}: {reason}")


RULES = (owners,)
