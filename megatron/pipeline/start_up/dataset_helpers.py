"""The compiled helpers of megatron.core's datasets.

The wheel has them compiled. A checkout of Megatron-LM has a makefile that writes into the checkout, which may be
read-only. So compiled helpers are used if there are any; otherwise each host compiles their one source file into the
user's cache.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from megatron.pipeline.runtime.failure.agreement import agreed
from megatron.pipeline.runtime.failure.errors import number_of

NAME = "megatron.core.datasets.helpers_cpp"


def provide() -> None:
    """Make the helpers importable on every rank. Collective: every rank of the job must call it.

    Raises ValueError on every rank if a host cannot compile the helpers.
    """
    is_missing = importlib.util.find_spec(NAME) is None
    with agreed():
        if is_missing and number_of("LOCAL_RANK", 0) == 0 and not cached().exists():
            compile_into(cached())
    if is_missing:
        if not cached().exists():  # the host's first rank is lost
            compile_into(cached())
        load(cached())


def source() -> Path:
    """The helpers' source file, beside megatron.core's datasets."""
    import megatron.core.datasets

    return Path(megatron.core.datasets.__file__).with_name("helpers.cpp")


def compile_into(library: Path) -> None:
    """Compile the helpers' source into `library`, with the headers of pybind11 that torch brings.

    Raises ValueError if the compiler fails or is missing.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_name(f"{library.name}.{os.getpid()}")
    includes = (Path(torch.__file__).with_name("include"), sysconfig.get_paths()["include"])
    command = [os.environ.get("CXX", "c++"), "-O3", "-shared", "-std=c++17", "-fPIC"]
    command += [*(f"-I{folder}" for folder in includes), str(source()), "-o", str(unfinished)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        problem = done.stderr.strip().partition("\n")[0] if done.returncode else None
    except OSError as error:
        problem = str(error)
    if problem is not None:
        raise ValueError(
            f"the dataset helpers of {source()} could not be compiled ({problem}); install a C++ compiler and Python's "
            "headers, or run `make` in that folder"
        )
    os.replace(unfinished, library)  # atomic, so that another process never reads a part of the library


def cached() -> Path:
    """The path of the compiled helpers in this host's cache, for this Python and torch."""
    version = f"{sys.version} {torch.__version__}".encode()
    digest = hashlib.sha256(source().read_bytes() + version).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "megatron-pipeline" / digest / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"


def load(library: Path) -> None:
    """Import the compiled helpers `library` under the name of megatron.core's module."""
    import megatron.core.datasets

    spec = importlib.util.spec_from_file_location(NAME, library)
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    megatron.core.datasets.helpers_cpp = module
