"""The version of megatron.core with which this project's own programs train, read from sources without an import.

The schedules in a user's own Megatron-LM require less of megatron.core (`megatron.pipeline.dropin.origin`).
"""

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Core(NamedTuple):
    """The names and numbers that differ between versions of megatron.core."""

    null_tokenizer: tuple[str, int] = ("null-text", 1)
    """The library of a tokenizer of numbers, and whether its size has to count the end of a document."""

    whole_sequences: Mapping[str, bool] = {"is_hybrid_cp": False}
    """The arguments of `get_batch_on_this_cp_rank` for ranks that share whole sequences."""
    has_hybrid_model: bool = True
    has_common_file: bool = False
    """Whether checkpoints have a file for the state that all ranks share, beside the tensors."""
    weighs_further_tokens: bool = True
    """Whether losses of multi-token prediction are weighted by a rank's own tokens if the loss is per token."""


TRAINED = {
    (0, 16): Core(("null", 0), {}, has_hybrid_model=False, has_common_file=True, weighs_further_tokens=False),
    (0, 17): Core(("null-text", 0), {}, has_hybrid_model=False, has_common_file=True),
    (0, 18): Core(has_common_file=True),
    (0, 19): Core(),
    (0, 20): Core(),
}
"""The versions that the trainer has been run with, and how they differ."""


def require_trained_core() -> None:
    """Raise ValueError if the trainer cannot run with the megatron.core on Python's path."""
    version = installed_core_version()
    if version and version[:2] not in TRAINED:
        raise ValueError(
            f"megatron.core {dotted(version)} of {_folder().parents[1]} is not supported by this project's own "
            f"programs, which are for {dotted(min(TRAINED))} to {dotted(max(TRAINED))}; pip install '.[core]' and take "
            "that folder from PYTHONPATH, or train in a Megatron-LM checkout of that version through "
            "python -m megatron.pipeline.dropin"
        )


@cache
def installed_core() -> Core:
    """The `Core` of the megatron.core on Python's path; that of the newest known version if its version is unknown."""
    version = installed_core_version()
    return TRAINED[version[:2]] if version and version[:2] in TRAINED else TRAINED[max(TRAINED)]


def installed_core_version() -> tuple[int, ...] | None:
    """The version of the megatron.core on Python's path; None if there is none, or its sources do not state one."""
    folder = _folder()
    return core_version(folder) if folder else None


def _folder() -> Path | None:
    spec = find_spec("megatron.core")
    return Path(next(iter(spec.submodule_search_locations or ()), "")) if spec else None


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
    """The version as text, such as 0.17.1."""
    return ".".join(map(str, version)) if version else "of unknown version"
