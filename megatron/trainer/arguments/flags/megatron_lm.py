"""Flags of Megatron-LM that mean nothing here, which `megatron_lm.txt` lists: each is refused, or has no effect.

Problem: Megatron-LM has over 800 flags, and a script that works there may carry any of them. A flag that is unknown
here tells its user nothing: neither whether the training is another one without it, nor what to do.

Solution: a table of text, read when a command line has a flag that argparse does not know.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron.trainer.arguments.flags.specification import integer, number

_TABLE = Path(__file__).with_name("megatron_lm.txt")
_REFUSED, _WITHOUT_EFFECT = "refused: ", "without effect: "
_KINDS = {"N": integer, "X": number, "TEXT": str}


@dataclass(frozen=True)
class Elsewhere:
    """A flag of the table. `kind`: what its value is, None for a switch; `several`: whether it takes more than one;
    `default`: Megatron-LM's, which asks for nothing; `refused`: whether it changes what is trained; `reason`: why it is
    refused, with the remedy, or why it has no effect."""

    name: str
    kind: str | None
    several: bool
    default: str | None
    refused: bool
    reason: str

    def takes(self, words: Sequence[str]) -> int:
        """How many of the words behind the flag are its values."""
        return 0 if self.kind is None else len(words) if self.several else min(len(words), 1)

    def asks(self, values: Sequence[str]) -> bool:
        """Whether these values ask for something. Raises ValueError with a sentence about an invalid one."""
        if self.kind is None:
            return True
        if not values:
            raise ValueError(f"{self.name}: expected {'a value' if not self.several else 'values'}")
        read = _KINDS[self.kind]
        try:
            return [read(value) for value in values] != ([] if self.default is None else [read(self.default)])
        except Exception as error:  # argparse's own type, which would be named in the annotation only
            raise ValueError(f"{self.name}: {error}") from None


@cache
def table() -> dict[str, Elsewhere]:
    """All flags of the table by name, in its order."""
    flags, reason = {}, ""
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith((_REFUSED, _WITHOUT_EFFECT)):
            reason = line
        elif line.startswith(" "):
            for name, values in by_flag(shlex.split(line)):
                kind, default = (*values, None, None)[:2]
                refused = reason.startswith(_REFUSED)
                flags[name] = Elsewhere(
                    name=name,
                    kind=kind and kind.removesuffix("+"),
                    several=(kind or "").endswith("+"),
                    default=default,
                    refused=refused,
                    reason=reason.removeprefix(_REFUSED if refused else _WITHOUT_EFFECT),
                )
    return flags


def by_flag(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each word that begins with `--`, without the `=` and what stands behind it, and the words up to the next one;
    words before the first flag have the name ''."""
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
