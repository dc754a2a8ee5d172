"""The Megatron-LM that a job would train with, found before any of its modules is imported.

Problem: `megatron` is a namespace package. Its parts may come from a checkout, from the wheel of megatron-core, which
packages `megatron.training` from 0.17 on, and from this project, and Python merges the parts silently. Training code of
one version on the core of another version fails late and obscurely, or trains something else.

Solution: the import system tells where `megatron.training` and `megatron.core` would come from. Their source files are
parsed, not executed, to find whether the functions that the hooks replace exist.
"""

import importlib.util
import re
import symtable
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.pipeline.dropin.hooks import NEEDED
from megatron.pipeline.start_up.core_version import core_version, dotted

OLDEST = (0, 14)
"""The first version of megatron.core that has all functions that the runtime calls."""

RUN = ((0, 14), (0, 15), (0, 16), (0, 20))
"""Versions of megatron.core that these schedules have trained on."""


@dataclass(frozen=True)
class Origin:
    """The folders and the version of a job's Megatron-LM."""

    training: Path
    """The folder of `megatron.training`."""
    core: Path
    """The folder of `megatron.core`."""
    version: tuple[int, ...] | None
    """The version of megatron.core; None if its sources do not state one."""

    @property
    def root(self) -> Path:
        """The folder that holds `megatron/training`: a checkout, or site-packages."""
        return self.training.parents[1]

    def __str__(self) -> str:
        return f"megatron.training of {self.root}, megatron.core {dotted(self.version)} of {self.core.parents[1]}"


def find() -> Origin:
    """The Megatron-LM on `sys.path`. No module of it is imported.

    Raises:
        ValueError: there is no `megatron.training`, or no `megatron.core`.
    """
    training = _package("megatron.training")
    if training is None:
        raise ValueError(
            f"there is no Megatron-LM: megatron.training is neither beside the script nor on Python's path; {_remedy()}"
        )
    core = _package("megatron.core")
    if core is None:
        raise ValueError(
            f"megatron.training is in {training}, but there is no megatron.core; take a whole checkout of Megatron-LM, "
            "or pip install megatron-core"
        )
    return Origin(training, core, core_version(core))


def check(origin: Origin) -> None:
    """Raise ValueError if the schedules cannot run in this Megatron-LM.

    This is so if functions to be replaced are missing, if megatron.core is too old, or if megatron.core and
    megatron.training do not belong together.
    """
    if origin.version is not None and origin.version[:2] < OLDEST:
        raise ValueError(
            f"megatron.core {dotted(origin.version)} of {origin.core.parents[1]} is too old: schedules call what "
            f"it has from {dotted(OLDEST)} on; use a newer Megatron-LM"
        )
    for file, names in NEEDED.items():
        missing = [name for name in names if name not in _names_at_top(origin.training / file)]
        if missing:
            raise ValueError(
                f"megatron.training in {origin.training} is not Megatron-LM's: {file} has no {', '.join(missing)}, "
                "which the schedules replace; use another Megatron-LM, or a fork that keeps these names"
            )
    its_own = origin.training.with_name("core")
    if its_own != origin.core and (its_own / "__init__.py").is_file():
        raise ValueError(
            f"megatron.training comes from {origin.root}, but megatron.core from {origin.core.parents[1]}, although "
            f"{origin.root} has one; put that folder first: PYTHONPATH={origin.root}"
        )


def notes(origin: Origin) -> Iterator[str]:
    """Yield one sentence for each unusual property of a Megatron-LM."""
    if origin.version is None or origin.version[:2] not in RUN:
        *others, last = map(dotted, RUN)
        yield (
            f"megatron.core {dotted(origin.version)} has not been run with these schedules ({', '.join(others)} and "
            f"{last} have); compare the first losses with and without --pipeline-schedule"
        )


def explain(origin: Origin, error: ImportError) -> str:
    """A sentence on why Megatron-LM could not be imported: the package to install, or the Python version to use."""
    module = (error.name or "").partition(".")[0]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if module in sys.stdlib_module_names:
        asked = f"Python {asks}" if (asks := _python_of(origin.root)) else "the Python that it asks for"
        return f"Megatron-LM in {origin.root} needs a newer Python than {version} ({error}); use {asked}"
    if isinstance(error, ModuleNotFoundError) and module not in ("", "megatron"):
        package = _PACKAGES.get(module, module)
        return f"Megatron-LM in {origin.root} imports {module}, which {sys.executable} has not; pip install {package}"
    return f"Megatron-LM in {origin.root} cannot be imported ({error}); install what its pyproject.toml lists"


_PACKAGES = {"yaml": "pyyaml"}
"""Module -> package, where the names differ."""


def _python_of(root: Path) -> str | None:
    """The checkout's requirement on Python's version, such as `>=3.12`; None if it states none."""
    try:
        found = re.search(r'^requires-python *= *"(.+)"', (root / "pyproject.toml").read_text(), flags=re.MULTILINE)
    except OSError:
        return None
    return found and found[1]


def _package(name: str) -> Path | None:
    """The folder of a package that has an `__init__.py`, found as an import finds it; None if there is none."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent


def _remedy() -> str:
    script = Path(sys.argv[0]).resolve()
    for folder in script.parents:
        if (folder / "megatron" / "training" / "__init__.py").is_file():
            return f"put the checkout that the script lies in on the path: PYTHONPATH={folder}"
    return (
        "start a script that lies in a checkout of Megatron-LM, or put one on the path: PYTHONPATH=/path/to/Megatron-LM"
    )


def _names_at_top(file: Path) -> set[str]:
    """The names that a module defines, assigns or imports at module level, also within `if`, `try` and `with`."""
    try:
        table = symtable.symtable(file.read_bytes(), str(file), "exec")
    except OSError:
        return set()
    except SyntaxError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ValueError(
            f"Python {version} cannot read {file}: {error.msg} in line {error.lineno}; use the Python that this "
            "Megatron-LM asks for"
        ) from error
    return {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}
