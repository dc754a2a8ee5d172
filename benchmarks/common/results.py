"""What a benchmark is asked, sets before its processes start, and leaves: a JSON file and an exit status."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def parser_of(description: str, *, json: str | None = None) -> argparse.ArgumentParser:
    """A parser that introduces a benchmark by its docstring; `json`: what --json is to hold, where there is that."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if json is not None:
        parser.add_argument("--json", type=Path, metavar="FILE", help=json)
    return parser


def set_environment() -> None:
    """A thread a process, and gloo on the loopback device, where the user says nothing else."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def save(args: argparse.Namespace, rows: Sequence[dict], *, unsaved: Sequence[str] = (), **others: object) -> None:
    """Write the flags, but for `unsaved`, the rows and what else there is to --json, where that is given."""
    settings = {name: value for name, value in vars(args).items() if name not in ("json", *unsaved)}
    write(args.json, {"settings": settings, "rows": rows, **others})


def write(path: Path | None, content: object) -> None:
    """Write what was found as JSON, where the user named a file."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1, default=str) + "\n")


def status_of(rows: Sequence[dict], named: Callable[[dict], str]) -> int:
    """The exit status: 1 where processes executed something else than their program, with a line for each such row."""
    different = [row for row in rows if not row.get("executed_is_program", True)]
    for row in different:
        print(f"executed something else than the program: {named(row)}", file=sys.stderr)
    return 1 if different else 0
