"""A script's code as the process's main module.

Problem: what runs is the launcher's, but scripts look at `__main__`: for their own functions when they pickle them, and
for what processes that they spawn import again.

Solution: a module of its own, which is `__main__`, as `python SCRIPT` has it. Its spec is that of `spawned.py`, which
children import in the script's stead.
"""

import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

SPAWNED = "megatron.pipeline.dropin.spawned"
SCRIPT_VARIABLE = "MEGATRON_PIPELINE_DROPIN_SCRIPT"
"""Tells children which script it is."""


def run(script: Path) -> None:
    """Run the script's code as this process's main module."""
    module = ModuleType("__main__")
    module.__file__ = os.path.abspath(script)
    module.__loader__ = SourceFileLoader("__main__", module.__file__)
    module.__spec__ = importlib.util.find_spec(SPAWNED)
    os.environ[SCRIPT_VARIABLE] = module.__file__
    sys.modules["__main__"] = module
    sys.modules["__mp_main__"] = module  # what children call it when they send something of it back
    execute(script, vars(module))


def execute(script: Path, namespace: dict) -> None:
    """Run the script's code in `namespace`. Not by runpy: it takes the module away again that children would import."""
    code = compile(script.read_bytes(), os.path.abspath(script), "exec", dont_inherit=True)
    exec(code, namespace)
