"""Flags from a YAML file: `finetune.py config.yaml` or `--config config.yaml`. Those of the command line come after.

The keys are the flags without dashes in front. A file becomes words of a command line, so each flag is parsed and
checked in one way.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from megatron.documents.faults import refuse_unknown_keys, shown
from megatron.documents.files import read_document
from megatron.documents.flag_files import FlagFileParser


def with_configuration(argv: Sequence[str], parser: FlagFileParser) -> list[str]:
    """The words of a command line, behind those of the file that the first word or --config names.

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
