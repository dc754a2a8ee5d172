"""The launcher of a user's script with the schedules in place: `-m megatron.pipeline.dropin SCRIPT [its arguments]`.

Problem: `python -m` puts the working directory first on the path and not the script's folder, so Python may silently
find another Megatron-LM than `python SCRIPT` would find. And scripts rely on the module `__main__`: pickled functions
of the script refer to that module, and spawned processes import it again.

Solution: the script's folder takes the working directory's place on the path, the schedules are installed, and then the
script runs as a module `__main__`, as under `python SCRIPT`. The module has the spec of `spawned.py`, which child
processes import instead of the script.
"""

import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from megatron.pipeline import dropin
from megatron.pipeline.dropin.sentences import errors_end_the_job

USAGE = """\
usage: torchrun ... -m megatron.pipeline.dropin SCRIPT [arguments of the script]

Runs SCRIPT, a program of a Megatron-LM checkout such as pretrain_gpt.py, as `python SCRIPT` would, with the
pipeline schedules of this project among its arguments:

  --pipeline-schedule NAME   without it, training is Megatron-LM's own

`SCRIPT --help` in place of SCRIPT shows all arguments.
"""
OUR_ROOT = Path(__file__).resolve().parents[3]


def main() -> None:
    """Run the command line of this process.

    If the script cannot start, the process ends with status 2 and one sentence.
    """
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    with errors_end_the_job():
        script = script_of(arguments)
        sys.argv = arguments
        sys.path[:] = path_for(script, sys.path, Path.cwd())
        dropin.install()
    run(script)


def script_of(arguments: list[str]) -> Path:
    """The script that the launcher's arguments begin with. Raises ValueError if the first argument is no script."""
    if not arguments:
        raise ValueError(
            "no script is named; name one behind -m megatron.pipeline.dropin, such as pretrain_gpt.py of your "
            "Megatron-LM checkout, and its arguments behind it"
        )
    if arguments[0].startswith("-"):
        raise ValueError(
            f"{arguments[0]} stands before the script; name the script first, such as pretrain_gpt.py, and all "
            "arguments behind it"
        )
    script = Path(arguments[0])
    if not script.is_file():
        raise ValueError(f"there is no file {script} in {Path.cwd()}; name a script of your Megatron-LM checkout")
    return script


def path_for(script: Path, path: list[str], working_directory: Path) -> list[str]:
    """Return `path` as under `python SCRIPT`: the script's folder comes first, and not the working directory.

    `-m` puts the working directory first. If this project was found only through the working directory, the project's
    folder comes last.
    """
    rest = path[1:] if path and path[0] in ("", str(working_directory)) else list(path)
    if OUR_ROOT not in (Path(entry).resolve() for entry in rest if entry):
        rest.append(str(OUR_ROOT))
    return [str(script.resolve().parent), *rest]


SPAWNED = "megatron.pipeline.dropin.spawned"
SCRIPT_VARIABLE = "MEGATRON_PIPELINE_DROPIN_SCRIPT"
"""The environment variable that tells child processes the script's path."""


def run(script: Path) -> None:
    """Run the script's code as this process's main module."""
    module = ModuleType("__main__")
    module.__file__ = os.path.abspath(script)
    module.__loader__ = SourceFileLoader("__main__", module.__file__)
    module.__spec__ = importlib.util.find_spec(SPAWNED)
    os.environ[SCRIPT_VARIABLE] = module.__file__
    sys.modules["__main__"] = module
    sys.modules["__mp_main__"] = module  # the name of the script in objects that child processes send back
    execute(script, vars(module))


def execute(script: Path, namespace: dict) -> None:
    """Run the script's code in `namespace`.

    runpy would not do: it removes the module that child processes import.
    """
    code = compile(script.read_bytes(), os.path.abspath(script), "exec", dont_inherit=True)
    exec(code, namespace)
