"""The common parts of a benchmark's command: its flags, its environment, its JSON file and its exit status."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def parser_of(description: str, *, json: str | None = None) -> argparse.ArgumentParser:
    """Make a benchmark's parser, with its docstring as the description. `json`: the help text of --json; None: no
    such flag."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if json is not None:
        parser.add_argument("--json", type=Path, metavar="FILE", help=json)
    return parser


def set_environment() -> None:
    """Set one thread for each process, and gloo on the loopback device, unless the user has set other values."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def save(args: argparse.Namespace, rows: Sequence[dict], *, unsaved: Sequence[str] = (), **others: object) -> None:
    """Write the flags except `unsaved`, the rows and `others` to the file of --json, if it is given."""
    settings = {name: value for name, value in vars(args).items() if name not in ("json", *unsaved)}
    write(args.json, {"settings": settings, "rows": rows, **others})


def write(path: Path | None, content: object) -> None:
    """Write `content` to `path` as JSON. A no-op if `path` is None, because the user named no file."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1, default=str) + "\n")


def status_of(rows: Sequence[dict], named: Callable[[dict], str]) -> int:
    """The exit status: 1 if processes executed something else than their program, with a printed line for each such
    row."""
    different = [row for row in rows if not row.get("executed_is_program", True)]
    for row in different:
        print(f"executed something else than the program: {named(row)}", file=sys.stderr)
    return 1 if different else 0
