"""Command lines: flags in a file, which one `@FILE` stands for, and all that is wrong with the words at once.

A model is written once into a file, to search and to train. And who brings a long command line reads in one run what
has to change: a value that is none is kept in mind, and parsing goes on; a screen of usage would hide the sentence.
"""

import argparse
import shlex
from typing import Any, NoReturn

HEAD = "mistakes in the command line"


def in_one(sentences: list[str], head: str) -> str:
    """One sentence as it stands; several below `head`, which follows their number."""
    return sentences[0] if len(sentences) == 1 else "\n  ".join([f"{len(sentences)} {head}", *sentences])


class FlagFileParser(argparse.ArgumentParser):
    """Takes `@FILE` as the words of that file, which may name another.

    Words are quoted as in a shell, `#` outside quotes begins a comment, and a line may end with a backslash.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"fromfile_prefix_chars": "@", **options})
        self._mistakes: list[str] = []
        self._unmatched: set[argparse.Action] = set()

    def convert_arg_line_to_args(self, line: str) -> list[str]:
        try:
            return shlex.split(line.rstrip().removesuffix("\\"), comments=True)
        except ValueError:
            self.error(f"a file of flags has a quote that does not end in '{line.strip()}'; end it in its line")

    def parse_all(
        self, args: list[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str], list[str]]:
        """The namespace, without flags whose values are none; words that belong to no flag; a sentence each for what
        is wrong."""
        self._mistakes = []
        self._unmatched.clear()
        namespace, rest = super().parse_known_args(args, namespace)
        return namespace, rest, self._mistakes

    def parse_known_args(self, args=None, namespace=None) -> tuple[argparse.Namespace, list[str]]:
        namespace, rest, mistakes = self.parse_all(args, namespace)
        if mistakes:
            self.end(mistakes)
        return namespace, rest

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        namespace, rest, mistakes = self.parse_all(args, namespace)
        if rest:
            mistakes.append(f"unrecognized arguments: {' '.join(rest)}")
        if mistakes:
            self.end(mistakes)
        return namespace

    def error(self, message: str) -> NoReturn:
        self.end([*self._mistakes, message])

    def end(self, mistakes: list[str]) -> NoReturn:
        """Say what is wrong with the command line, and no more than how to see the usage; status 2."""
        self.exit(2, f"{self.prog}: error: {in_one(self.with_usage(mistakes), HEAD)}\n")

    def with_usage(self, mistakes: list[str]) -> list[str]:
        """The mistakes, of which the last one says how to see the usage."""
        return mistakes and [*mistakes[:-1], f"{mistakes[-1]} ({self.prog} --help shows the usage)"]

    # argparse's own, which end at the first mistake

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            self._mistakes.append(str(error))
            self._unmatched.add(action)
            return len(arg_strings_pattern) - len(arg_strings_pattern.lstrip("A"))  # its words are no one else's

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action in self._unmatched:
            self._unmatched.remove(action)
            return argparse.SUPPRESS
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            if action.nargs == argparse.PARSER:  # a command, which says what follows
                raise
            self._mistakes.append(str(error))
            return argparse.SUPPRESS
