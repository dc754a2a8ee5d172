"""Flags in a file, which one `@FILE` of a command line stands for: a model is written once, to search and to train."""

import argparse
import shlex
from typing import Any


class FlagFileParser(argparse.ArgumentParser):
    """Takes `@FILE` as the words of that file, which may name another.

    Words are quoted as in a shell, `#` outside quotes begins a comment, and a line may end with a backslash.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"fromfile_prefix_chars": "@", **options})

    def convert_arg_line_to_args(self, line: str) -> list[str]:
        try:
            return shlex.split(line.rstrip().removesuffix("\\"), comments=True)
        except ValueError:
            self.error(f"a file of flags has a quote that does not end in '{line.strip()}'; end it in its line")
