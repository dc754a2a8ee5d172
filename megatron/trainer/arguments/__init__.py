"""The command line of the training programs: Megatron-LM's flags, as data, with rules. No torch in here."""

from megatron.trainer.arguments.flags.parser import build_parser, parse_args
from megatron.trainer.arguments.platform import Platform, resolve_platform
from megatron.trainer.arguments.validation import notes_on_overridden, validate_args

__all__ = ["Platform", "build_parser", "notes_on_overridden", "parse_args", "resolve_platform", "validate_args"]
