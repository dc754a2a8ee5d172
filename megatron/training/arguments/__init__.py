"""The command line of the training programs: Megatron-LM's flags, as data, with rules. No torch in here."""

from megatron.training.arguments.parser import build_parser, parse_args
from megatron.training.arguments.platform import Platform, resolve_platform
from megatron.training.arguments.rules import notes_on_overridden, validate_args

__all__ = ["Platform", "build_parser", "notes_on_overridden", "parse_args", "resolve_platform", "validate_args"]
