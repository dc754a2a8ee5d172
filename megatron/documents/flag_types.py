"""Types of the values of flags, and flags spelled as Hugging Face spells them, with underscores or dashes."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST_TOKENS = 1e18  # over 10,000 times the longest trainings; costs of far larger numbers are infinite


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


def within(least: float, *, most: float = math.inf, below: float = math.inf) -> Callable[[str], float]:
    """Make a type for argparse: a finite number from `least` to `most`, and less than `below`."""

    def parse(text: str) -> float:
        value = float(text)
        if not (least <= value <= min(most, sys.float_info.max) and value < below):
            limits = f"from {least:g} on" if most == math.inf else f"from {least:g} to {most:g}"
            limits = limits if below == math.inf else f"from {least:g} to less than {below:g}"
            raise argparse.ArgumentTypeError(f"{text} is no number {limits}")
        return value

    parse.__name__ = "number"
    return parse


real, part, decay = within(0), within(0, most=1.0), within(0, below=1.0)
scale = within(2.0**-24, most=2.0**100)


def steps(text: str) -> float:
    """Parse a number of batches, or a fraction of all batches if it is below 1. Raises ArgumentTypeError otherwise."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or (value > 1 and not value.is_integer()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of batches, and no part of all between 0 and 1")
    return value


def count(text: str) -> int:
    """A type for argparse: a whole number, at least 1."""
    return _whole(text, 1, "no positive whole number")


def count_from_0(text: str) -> int:
    """A type for argparse: a whole number, at least 0."""
    return _whole(text, 0, "no whole number of 0 and more")


def _whole(text: str, least: int, fault: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is {fault}")
    if value > sys.float_info.max:
        raise argparse.ArgumentTypeError(f"{text!r} is too large; give a smaller number")
    return value


def usual_threads() -> str:
    """The default of a flag of type `count` for a process's threads: OMP_NUM_THREADS, or 1 where it is not set."""
    return os.environ.get("OMP_NUM_THREADS", "").partition(",")[0] or "1"  # the other numbers are for nested regions


def counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def time(text: str) -> float:
    """A type for argparse: a finite number, at least 0."""
    return _finite(text, lambda value: value >= 0, "no finite number of 0 and more")


def _finite(text: str, fits: Callable[[float], bool], fault: str, *, unit: float = 1.0) -> float:
    """Parse a number. Unless `unit` is 1, the last letter of the text stands for a factor of `unit`.

    Raises ArgumentTypeError with `fault` if the text is no finite number for which `fits` holds.
    """
    try:
        value = float(text if unit == 1.0 else text[:-1]) * unit
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and fits(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is {fault}")
    return value


def times(text: str) -> float | tuple[float, ...]:
    values = tuple(time(part) for part in text.split(","))
    return values[0] if len(values) == 1 else values


def tokens(text: str) -> float:
    """A type for argparse: a number of at least 1, such as "300B", "1.5T" or "300e9"."""
    unit = UNITS.get(text[-1:].upper(), 1)
    value = _finite(text, lambda value: value >= 1, "no number of tokens; write 300B, 1.5T or 300e9", unit=unit)
    if value > _MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than any training has; give {_MOST_TOKENS:g} or less")
    return value


def positive(text: str) -> float:
    """A type for argparse: a finite number above 0."""
    return _finite(text, lambda value: value > 0, "no finite number above 0")
