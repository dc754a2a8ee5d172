"""What the commands that draw metrics files have alike: their flags, and how they refuse a file."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatron.commands.common import command_line

Run = TypeVar("Run")


def parser_of(description: str, *, output: str, help_of_output: str) -> argparse.ArgumentParser:
    """A parser of metrics files, their labels, and the picture with its title. `output`: the picture's default."""
    parser = command_line.parser_of(description)
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics files")
    parser.add_argument("--labels", nargs="+", help="a name for each file (default: its file name)")
    parser.add_argument("--output", type=Path, default=Path(output), help=f"{help_of_output} (default: %(default)s)")
    parser.add_argument("--title", default="", help="above the picture")
    return parser


def read_and_draw(
    parser: argparse.ArgumentParser, options: argparse.Namespace, read: Callable[[Path, str], Run],
    draw: Callable[..., None],
) -> list[Run]:  # fmt: skip
    """Read each file under its label, and draw all of them; ends the process with a sentence where that fails."""
    labels = options.labels or [path.stem for path in options.metrics]
    if len(labels) != len(options.metrics):
        parser.error(f"--labels gives {len(labels)} names for {len(options.metrics)} files; give one for each")
    try:
        runs = [read(path, label) for path, label in zip(options.metrics, labels, strict=True)]
        draw(runs, options.output, title=options.title)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    return runs
