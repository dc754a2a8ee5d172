"""Run a command in this process, or in one of its own that may not import what is slow."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def runner(tool: ModuleType, capsys):
    """`run(*arguments)` returns the tool's exit status, standard output and standard error."""

    def run(*arguments):
        try:
            status = tool.main([str(each) for each in arguments])
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


STARTED_ALONE = """
import runpy, sys
slow = set(sys.argv.pop(1).split(","))
sys.argv.pop(0)
try: runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end: assert not end.code, end.code
assert not slow & set(sys.modules), slow & set(sys.modules)
"""


def without(slow: str, tool: Path, *arguments: object, cwd: Path) -> str:
    """What a tool prints that is started elsewhere, not installed, and imports none of these modules."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", STARTED_ALONE, f"{slow},torch,megatron.core", str(tool), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
