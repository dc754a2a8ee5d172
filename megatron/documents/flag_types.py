"""Flags of programs that spell them as Hugging Face does, with underscores or dashes, and the types of their values."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable


def boolean(text: str) -> bool:
    """Parse a boolean. Raises ArgumentTypeError for any other word."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def both_spellings(group) -> Callable[..., argparse.Action]:
    """The `add_argument` of a group, which also accepts each flag written with dashes, such as --learning-rate.

    A flag without a value also accepts true and false, as transformers' flags do.
    """

    def add(*names: str, **options: object) -> argparse.Action:
        if options.get("action") == "store_true":
            del options["action"]
            options = {"nargs": "?", "const": True, "default": False, "type": boolean, "metavar": "BOOL", **options}
        others = [name.replace("_", "-") for name in names if "_" in name]
        return group.add_argument(*names, *others, **options)

    return add


def within(least: float, kind: type, most: float = math.inf) -> Callable[[str], float]:
    """Make a type for argparse: a finite number of type `kind` from `least` to `most`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value <= min(most, sys.float_info.max):  # an integer may be larger
            limits = f"from {least:g} on" if most == math.inf else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text} is no number {limits}")
        return value

    parse.__name__ = "number"
    return parse


count, whole, real, part = within(1, int), within(0, int), within(0, float), within(0, float, most=1.0)
scale = within(2.0**-24, float, most=2.0**100)


def steps(text: str) -> float:
    """Parse a number of batches, or a fraction of all batches if it is below 1. Raises ArgumentTypeError otherwise."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or (value > 1 and not value.is_integer()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of batches, and no part of all between 0 and 1")
    return value
