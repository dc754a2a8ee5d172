"""What a benchmark sets before its processes start, and what it leaves: a JSON file and an exit status."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence


def set_environment() -> None:
    """A thread a process, and gloo on the loopback device, where the user says nothing else."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def save(args: argparse.Namespace, rows: Sequence[dict], *, unsaved: Sequence[str] = (), **others: object) -> None:
    """Write the flags, but for `unsaved`, the rows and what else there is to --json, where that is given."""
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("json", *unsaved)}
        content = {"settings": settings, "rows": rows, **others}
        args.json.write_text(json.dumps(content, indent=1, default=str) + "\n")


def status_of(rows: Sequence[dict], named: Callable[[dict], str]) -> int:
    """The exit status: 1 where processes executed something else than their program, with a line for each such row."""
    different = [row for row in rows if not row.get("executed_is_program", True)]
    for row in different:
        print(f"executed something else than the program: {named(row)}", file=sys.stderr)
    return 1 if different else 0
