"""Flags of Megatron-LM that do nothing here: each is refused by name, or accepted without effect.

Problem: Megatron-LM has over 800 flags, and a script that works there may use any of them. An error about an unknown
flag does not tell the user whether training would differ without the flag, nor what to do.

Solution: a flag that would change training is refused, with a remedy. A flag that changes neither training nor its
outputs is accepted and noted once. Two text tables list these flags. The flags of `megatron_lm_in_help.txt` become
records, like the flags that work, and `--help` shows them. `megatron_lm.txt` has all other flags, and is read only when
a command line has a flag that argparse does not know.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron.trainer.arguments.flags.specification import Flag, Group, Role, integer, number

_REFUSED, _WITHOUT_EFFECT = "refused", "without effect"
_KINDS = {"N": integer, "X": number, "TEXT": str}
_ROLES = {"--overlap-moe-expert-parallel-comm": Role.PRICED}


def _rows(table: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield ("refused" or "without effect", reason, name, words after the name) for each flag of a table, in order."""
    for line in Path(__file__).with_name(table).read_text(encoding="utf-8").splitlines():
        if line.startswith((_REFUSED, _WITHOUT_EFFECT)):
            what, _, reason = line.partition(": ")
        elif line.startswith(" "):
            yield from ((what, reason, *flag) for flag in by_flag(shlex.split(line)))


def by_flag(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, values) for each flag in `words`; words before the first flag have the name ''.

    A name begins with `--` and ends before any `=`; the rest of its word is its first value.
    """
    name, values = "", []
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name or values:
            yield name, values
        name, equals, value = word.partition("=")
        values = [value] if equals else []
    if name or values:
        yield name, values


# --- flags that --help shows ------------------------------------------------------------------------------------------


def _records(wanted: str) -> tuple[Flag, ...]:
    return tuple(_record(*row) for row in _rows("megatron_lm_in_help.txt") if row[0] == wanted)


def _record(what: str, reason: str, name: str, words: Sequence[str]) -> Flag:
    """The record of a flag.

    `words`: the kind of its value, its default, and further values that ask for nothing; a switch has no words.
    """
    kind, *values = words or [""]
    read, takes_several = _KINDS.get(kind.removesuffix("+"), str), kind.endswith("+")
    default, *neutral = [None if each == "-" else read(each) for each in values] or [None]
    if takes_several:
        neutral = [neutral]
    is_refused = what == _REFUSED
    return Flag(
        names=(name,),
        help=f"Refused: {reason}" if is_refused else f"Accepted without effect: {reason}.",
        dest=name.lstrip("-").replace("-", "_"),
        type=read if kind else None,
        default=default if kind else False,
        choices=tuple(kind.split("|")) if "|" in kind else None,
        nargs="+" if takes_several else None,
        stores=None if kind else True,
        refused=reason if is_refused else None,
        ignored=None if is_refused else reason,
        neutral=tuple(neutral) if default is None else (default, *neutral),
        roles=_ROLES.get(name),
    )


def refused(flag: str, reason: str) -> Flag:
    """The record of a refused flag that is written as in a table, such as `--partitions N 1`."""
    name, *words = shlex.split(flag)
    return _record(_REFUSED, reason, name, words)


REFUSED = Group(
    "refused", "Known from Megatron-LM. Each parses, and using it is an error that says what to do.", _records(_REFUSED)
)
IGNORED = Group(
    "without effect",
    "Known from Megatron-LM, about logging, checks and speed of what is done otherwise here. Each is accepted, and the "
    "run says once that it has no effect.",
    _records(_WITHOUT_EFFECT),
)


# --- the other flags --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Elsewhere:
    """A flag of `megatron_lm.txt`.

    Attributes:
        kind: the kind of its value; None for a switch.
        several: whether it takes several values.
        default: Megatron-LM's default, which asks for nothing.
        refused: whether it would change training.
        reason: why it is refused, with the remedy, or why it has no effect.
    """

    name: str
    kind: str | None
    several: bool
    default: str | None
    refused: bool
    reason: str

    def takes(self, words: Sequence[str]) -> int:
        """The number of the words after the flag that are its values."""
        return 0 if self.kind is None else len(words) if self.several else min(len(words), 1)

    def asks(self, values: Sequence[str]) -> bool:
        """Whether these values ask for something. Raises ValueError with a sentence about an invalid value."""
        if self.kind is None:
            return True
        if not values:
            raise ValueError(f"{self.name}: expected {'a value' if not self.several else 'values'}")
        read = _KINDS[self.kind]
        try:
            return [read(value) for value in values] != ([] if self.default is None else [read(self.default)])
        except Exception as error:  # argparse's own error type has no public name
            raise ValueError(f"{self.name}: {error}") from None


@cache
def table() -> dict[str, Elsewhere]:
    """All flags of `megatron_lm.txt` by name, in the table's order."""
    flags = {}
    for what, reason, name, words in _rows("megatron_lm.txt"):
        kind, default = (*words, None, None)[:2]
        flags[name] = Elsewhere(
            name=name,
            kind=kind and kind.removesuffix("+"),
            several=(kind or "").endswith("+"),
            default=default,
            refused=what == _REFUSED,
            reason=reason,
        )
    return flags
