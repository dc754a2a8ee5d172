"""The freezing of outputs that must not change: a JSON file for each group, equal for two freezes of one revision.

Programs come from the library, everything else from commands, each in a process of its own with the same environment.
The paths of the checkout, of scratch files and of Python are written as `<root>`, `<scratch>` and `<environment>`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from benchmarks.house import programs
from benchmarks.house.command_lines import COMBINATIONS, HELP, LOOKS, SCRIPTS, SEARCHES, dry_run_of, recorded

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = sorted((ROOT / "benchmarks" / "published").glob("*.json"))
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NO_COLOR", "FORCE_COLOR")


class Commands:
    """Runs commands of the checkout, and returns their output as lines without paths of this machine."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER} | {
            "PYTHONPATH": str(ROOT), "COLUMNS": "120", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip

    def python(self, argv: Sequence[str]) -> dict[str, Any]:
        """Run Python. Returns exit status, output and errors; with --json the output is a list of JSON objects."""
        done = subprocess.run(
            [sys.executable, *argv], cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return {
            "status": done.returncode,
            "output": _objects(done.stdout) if "--json" in argv else self.lines(done.stdout),
            "errors": self.lines(done.stderr),
        }

    def lines(self, text: str) -> list[str]:
        return self.portable(text).splitlines()

    def portable(self, text: str) -> str:
        for path, name in ((self.scratch, "<scratch>"), (ROOT, "<root>"), (sys.prefix, "<environment>")):
            text = text.replace(str(path), name)
        return text


def _objects(text: str) -> list[Any]:
    """The JSON objects of a text, which holds a single one, or one on each line."""
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


def _looks(commands: Commands, _: Sequence[Path]) -> dict[str, Any]:
    return {" ".join(argv): commands.python(argv) for argv in LOOKS}


def _searches(commands: Commands, _: Sequence[Path]) -> dict[str, Any]:
    cluster = commands.scratch / "hosts.yaml"
    text = (ROOT / "megatron" / "planner" / "job" / "clusters" / "A100-80.yaml").read_text(encoding="utf-8")
    cluster.write_text(f"{text}\nhost_memory_gib: 1900\n", encoding="utf-8")
    found = {}
    for line in SEARCHES:
        argv = ["tools/grid_search.py", *line.replace("HOSTS", str(cluster)).split()]
        result = commands.python(argv)
        for each in result["output"]:
            each.pop("seconds", None)  # how long the search took
        found[line] = result
    return found


def _published(commands: Commands, entries: Sequence[Path]) -> dict[str, Any]:
    found = {}
    for path in entries:
        given = ["--entries", str(path)]
        estimated = commands.python(["tools/grid_search.py", "estimate", *given, "--json"])
        estimated["output"] = {each.pop("id"): each for each in estimated["output"]}
        found[f"estimate {path.name}"] = estimated
        found[f"validate {path.name}"] = commands.python(["tools/grid_search.py", "validate", *given, "--json"])
        found[f"rows {path.name}"] = commands.python(["tools/grid_search.py", "validate", *given, "--rows"])
    return found


def _dry_runs(commands: Commands, _: Sequence[Path]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, script in SCRIPTS.items():
        lines = recorded(script, ROOT, commands.scratch, commands.environment)
        found[name] = [_dry(commands, line) for line in lines]
    for line in COMBINATIONS:
        found[line] = _dry(commands, line.split())
    return found


def _dry(commands: Commands, line: list[str]) -> dict[str, Any]:
    """The command line, and the output of its dry run, if its program has one."""
    found: dict[str, Any] = {"line": [commands.portable(word) for word in line]}
    if (argv := dry_run_of(line)) is not None:
        for word in argv:
            if word.endswith(".npz"):
                _write_images(Path(word))
        file = commands.scratch / "dry_run.json"
        file.unlink(missing_ok=True)
        found["dry run"] = commands.python([*argv, "--dry-run-json", str(file)])
        found["written"] = json.loads(commands.portable(file.read_text())) if file.exists() else None
    return found


def _write_images(path: Path) -> None:
    """Write as many images as examples/digits.py has for training, with the same size and its five classes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = numpy.linspace(-1, 1, 583 * 64, dtype=numpy.float32).reshape(583, 8, 8, 1)
    numpy.savez(path, images=images, labels=numpy.arange(583) % 5)


def _help(commands: Commands, _: Sequence[Path]) -> dict[str, Any]:
    return {" ".join(argv): commands.python([*argv, "--help"]) for argv in HELP}


def _flags(commands: Commands, _: Sequence[Path]) -> dict[str, Any]:
    pages = (
        "from megatron.trainer.arguments.reference import PAGES; print(*(page() for page in PAGES.values()), sep='')"
    )
    return commands.python(["-c", pages])


def _library(make: Callable[[], dict[str, Any]]) -> Callable[[Commands, Sequence[Path]], dict[str, Any]]:
    return lambda _, __: make()


GROUPS: dict[str, Callable[[Commands, Sequence[Path]], dict[str, Any]]] = {
    "programs": _library(programs.programs),
    "choices": _library(programs.choices),
    "wrong_programs": _library(programs.wrong_programs),
    "simulated": _library(programs.simulated),
    "looks": _looks,
    "searches": _searches,
    "published": _published,
    "dry_runs": _dry_runs,
    "help": _help,
    "flags": _flags,
}
"""Name of a group, and of its file -> the function that makes its content."""


def freeze(folder: Path, groups: Sequence[str], entries: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Write groups. Yields each group with its file.

    Raises:
        ValueError: the folder has JSON files of an earlier freeze that would not be overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left = {path.stem for path in folder.glob("*.json")} - set(groups)
    if left:
        raise ValueError(f"{folder} holds {', '.join(sorted(left))} of another freeze; give an empty folder")
    with tempfile.TemporaryDirectory() as scratch:
        for group in groups:
            found = GROUPS[group](Commands(Path(scratch).resolve()), entries)
            path = folder / f"{group}.json"
            path.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
            yield group, path
