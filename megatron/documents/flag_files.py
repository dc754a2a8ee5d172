"""A parser of command lines that reads flags from files, given as `@FILE`, and reports all mistakes at once.

A model's flags are written once into a file, for searches and for training. The user of a long command line sees all
mistakes in one run: an invalid value is noted, and parsing continues. The usage text is not printed, since it would
hide the mistakes.

`with_configuration` puts the flags of a YAML file before the flags of a command line: `run.yaml --seed 2`, or `--config
run.yaml`. The keys are the flags without dashes in front. The file becomes words of the command line, so each flag is
parsed and checked in one way.
"""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from megatron.documents.faults import refuse_unknown_keys, shown
from megatron.documents.files import read_document

HEAD = "mistakes in the command line"


def in_one(sentences: list[str], head: str) -> str:
    """Join sentences: a single sentence unchanged, several as lines below a first line with their number and `head`."""
    return sentences[0] if len(sentences) == 1 else "\n  ".join([f"{len(sentences)} {head}", *sentences])


class FlagFileParser(argparse.ArgumentParser):
    """An argument parser that replaces `@FILE` by the words of that file, which may name another file.

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
        """Parse all words, and collect the mistakes.

        Returns:
            The namespace without flags of invalid values, the words that belong to no flag, and a sentence for each
            mistake.
        """
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
        """Print the mistakes and the hint at `--help`, and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {in_one(self.with_usage(mistakes), HEAD)}\n")

    def with_usage(self, mistakes: list[str]) -> list[str]:
        """The mistakes, with a hint at `--help` appended to the last one."""
        return mistakes and [*mistakes[:-1], f"{mistakes[-1]} ({self.prog} --help shows the usage)"]

    # Overrides of argparse's own methods, which stop at the first mistake.

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            self._mistakes.append(str(error))
            self._unmatched.add(action)
            # The flag takes all words up to the next flag, so that they are not reported again.
            return len(arg_strings_pattern) - len(arg_strings_pattern.lstrip("A"))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action in self._unmatched:
            self._unmatched.remove(action)
            return argparse.SUPPRESS
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            if action.nargs == argparse.PARSER:  # an unknown command, without which the other words cannot be parsed
                raise
            self._mistakes.append(str(error))
            return argparse.SUPPRESS


# --- a YAML file of flags


def with_configuration(argv: Sequence[str], parser: FlagFileParser) -> list[str]:
    """The words of a command line, preceded by the words of the file that the first word or --config names.

    Raises ValueError if the file cannot be read, has an unknown key, or a value of the wrong kind.
    """
    words = list(argv)
    if words and not words[0].startswith(("-", "@")):
        words.insert(0, "--config")
    finder = type(parser)(prog=parser.prog, add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    found, *_ = finder.parse_all(words)
    path = getattr(found, "config", None)
    return words if path is None else [*_words_of(path, parser), *words]


def _words_of(path: str, parser: argparse.ArgumentParser) -> list[str]:
    content = read_document(path)
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} is no table of flags; give lines such as learning_rate: 1e-4")
    actions = {
        option.removeprefix("--").replace("-", "_"): action
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and action.dest not in ("help", "config")
    }
    named: dict[str, object] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in named:
            raise ValueError(f"{path}: {name} is given in both spellings; give it once")
        named[name] = value
    try:
        refuse_unknown_keys(named, actions)
        return [word for name, value in named.items() for word in _words(name, value, actions[name])]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _words(name: str, value: object, action: argparse.Action) -> list[str]:
    """The words that give a flag a value; none for null, which leaves the default."""
    takes_many, takes_none = action.nargs in ("*", "+"), action.nargs in (0, "?")
    if value is None:
        return []
    if isinstance(value, bool) and takes_none:
        return [f"--{name}"] if value else [] if action.type is None else [f"--{name}=false"]
    if value is False and "no" in (action.choices or ()):  # YAML's `no`
        value = "no"
    if isinstance(value, (list, tuple)) and takes_many:
        return [f"--{name}", *map(str, value)]
    if isinstance(value, (bool, list, tuple, Mapping)):
        kind = "a boolean" if isinstance(value, bool) else "a table" if isinstance(value, Mapping) else "a list"
        raise ValueError(f"{name} is {shown(value)}, {kind}; give one value")
    return [f"--{name}", str(value)] if takes_many else [f"--{name}={value}"]
