"""A part of the hour as the runner starts it, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def rehearsed(name: str, folder: Path) -> dict:
    """The results of a part's rehearsal, which ends well."""
    file = folder / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.gpu_hour.{name}", "--json", str(file), "--rehearse"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["rehearsal"] is True and found["lines"] == done.stdout.splitlines()
    return found


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
