"""An hour of made-up parts on a made-up machine, in this process or, for a runner that is killed, in one of its own:

python -m tests.benchmarks.gpu_hour.fake_hour FOLDER [flags of the runner]
"""

import sys
from pathlib import Path
from unittest import mock

from benchmarks.gpu_hour import __main__ as hour
from benchmarks.gpu_hour.parts import Part

MACHINE = {"card": "Made-up card", "card bytes": 8 << 30, "capability": [8, 0], "torch": "2", "Python": "3"}
SOURCES = "these"
WRITE = """
import json, os, pathlib, signal, subprocess, sys, time
file = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
def write(*lines, **figures):
    file.write_text(json.dumps({"lines": lines, "figures": figures}))
def note(word):  # outlives attempts
    with open(file.parent.parent / "notes.txt", "a") as notes:
        notes.write(word + "\\n")
"""


def part(name: str, program: str, *, limit: float = 60.0, expected: float = 1.0, **needs: object) -> Part:
    return Part(name, f"What does {name} do?", ("-c", WRITE + program), limit, expected, **needs)


def run(folder: Path, parts: list[Part], *flags: str, machine: dict = MACHINE) -> int:
    """The exit status of an hour in this process, whose signals it leaves alone."""
    with mock.patch.object(hour.signal, "signal"):
        return _run(folder, parts, *flags, machine=machine)


def _run(folder: Path, parts: list[Part], *flags: str, machine: dict = MACHINE) -> int:
    with (
        mock.patch.object(hour.Hour, "_look_at_machine", lambda self: machine),
        mock.patch.object(hour, "sources", lambda: SOURCES),
    ):
        return hour.main(["--out", str(folder), *flags], parts)


class Said:
    """A stand-in for `Result`, which writes nothing."""

    def __init__(self) -> None:
        self.content: dict = {}
        self.lines: list[str] = []
        self.figures: dict = {}

    def add(self, line: str, **figures: object) -> None:
        self.lines.append(line)
        self.figures |= figures

    def write(self) -> None:
        pass


KILLED = [
    part("first", "note('first'); write('first is done', seconds=1.0)"),
    part(
        "second",
        "note(f'second {os.getpid()}')\n"
        "before = file.with_suffix('.before.json')\n"
        "if before.exists(): write('all', *json.loads(before.read_text())['lines']); sys.exit()\n"
        "write('half of it', seconds=2.0)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True)\n"
        "note(f'child {child.pid}'); time.sleep(100)",
    ),
    part("third", "note('third'); write('third is done')"),
]

if __name__ == "__main__":
    sys.exit(_run(Path(sys.argv[1]), KILLED, *sys.argv[2:]))
