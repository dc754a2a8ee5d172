"""The compiled helpers of megatron.core's datasets, for a machine without CUDA.

Problem: their training compiles them into the checkout by `make` when it starts, with fused CUDA kernels behind them in
older versions. The wheel has no makefile, and a checkout may be read-only.

Solution: what is compiled already is used; else each host compiles the one source file into the user's cache.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from megatron.pipeline.dropin.sentences import errors_end_the_job
from megatron.pipeline.runtime.failure.errors import number_of

NAME = "megatron.core.datasets.helpers_cpp"


def provide() -> None:
    """Have the helpers importable on every rank. Collective. Where a host has to compile them and cannot, the job ends
    with one sentence."""
    problem = None
    if importlib.util.find_spec(NAME) is None and number_of("LOCAL_RANK", 0) == 0 and not cached().exists():
        try:
            compile_into(cached())
        except ValueError as error:
            problem = str(error)
    problems: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(problems, problem)
    with errors_end_the_job():
        for each in filter(None, problems):
            raise ValueError(each)
    if importlib.util.find_spec(NAME) is None:
        load(cached())


def source() -> Path:
    """The helpers' source file, beside megatron.core's datasets."""
    import megatron.core.datasets

    return Path(megatron.core.datasets.__file__).with_name("helpers.cpp")


def compile_into(library: Path) -> None:
    """Compile the source with the headers of pybind11 that torch brings. Raises ValueError."""
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
    os.replace(unfinished, library)  # whoever reads it meanwhile has all of it


def cached() -> Path:
    """Where this host keeps what this Python and torch have compiled of this source."""
    version = f"{sys.version} {torch.__version__}".encode()
    digest = hashlib.sha256(source().read_bytes() + version).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "megatron-pipeline" / digest / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"


def load(library: Path) -> None:
    """Import the compiled helpers under their name."""
    import megatron.core.datasets

    spec = importlib.util.spec_from_file_location(NAME, library)
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    megatron.core.datasets.helpers_cpp = module
