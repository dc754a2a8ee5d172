"""Which megatron.core this project's own programs train with, by its sources and without importing it.

The schedules in a user's own Megatron-LM ask for less (`megatron.pipeline.dropin.origin`).
"""

import ast
from importlib.util import find_spec
from pathlib import Path

TRAINED = ((0, 16),)
"""Versions whose parts the trainer has been run with."""


def require_trained_core() -> None:
    """Raise ValueError where the megatron.core on Python's path is one that the trainer cannot be run with."""
    spec = find_spec("megatron.core")
    folder = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec else None
    version = folder and core_version(folder)
    if version and version[:2] not in TRAINED:
        raise ValueError(
            f"megatron.core {dotted(version)} of {folder.parents[1]} is not supported by this project's own programs, "
            f"which are for {' and '.join(map(dotted, TRAINED))}; pip install '.[core]' and take that folder from "
            "PYTHONPATH, or train in a Megatron-LM checkout of that version through python -m megatron.pipeline.dropin"
        )


def core_version(core: Path) -> tuple[int, ...] | None:
    """The version of the megatron.core in this folder; None if its sources do not state one."""
    try:
        module = ast.parse((core / "package_info.py").read_bytes())
    except (OSError, SyntaxError):
        return None
    numbers = {
        statement.targets[0].id: statement.value.value
        for statement in module.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Constant)
    }
    parts = [numbers.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    return tuple(parts) if all(isinstance(part, int) for part in parts) else None


def dotted(version: tuple[int, ...] | None) -> str:
    """The version as it is written."""
    return ".".join(map(str, version)) if version else "of unknown version"
