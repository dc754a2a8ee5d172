"""Tools are scripts and no modules: load one, and run it in this process."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_tool(name: str) -> ModuleType:
    """tools/NAME.py."""
    specification = importlib.util.spec_from_file_location(f"{name}_tool", ROOT / "tools" / f"{name}.py")
    tool = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tool)
    return tool


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
