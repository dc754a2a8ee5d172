"""The flags of a training script without those that a configuration, or a short run itself, decides.

A profile and a measured run belong to a model, its data and its precision; they choose degrees, batches, schedule,
recompute scope, length and outputs themselves. So a user may hand over the flags of a whole script. No torch in here.
"""

from collections.abc import Sequence

from megatron.trainer.arguments import parse_args
from megatron.trainer.arguments.flags.specification import Role
from megatron.trainer.plan.command import PROGRAMS, given_flags, written


def model_argv(argv: Sequence[str], *, architecture: str) -> tuple[str, ...]:
    """The flags in `argv` that say what is trained, in the order of docs/flags.md.

    Raises ValueError as `parse_args`.
    """
    program, defaults = PROGRAMS[architecture]
    args = parse_args(list(argv), prog=program, defaults=defaults)
    kept: list[str] = []
    for flag in given_flags(args):
        if not flag.roles & (Role.CONFIGURATION | Role.SHORT_RUN):
            kept += written(flag, args) if flag.stores in (None, getattr(args, flag.dest, None)) else ()
    return tuple(kept)
