"""Run a command in this process."""

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
