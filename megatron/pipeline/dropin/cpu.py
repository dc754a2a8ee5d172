"""A user's unmodified Megatron-LM training on a machine without CUDA.

Problem: Megatron-LM's training asks for CUDA, NCCL, compiled kernels and triton. So nobody could try a job, or a
schedule, without a GPU.

Solution: `megatron.backend` makes megatron.core usable on the CPU. This module replaces what Megatron-LM's training
needs beyond megatron.core, in the process only: no file of the checkout is changed. Some modules of Megatron-LM always
import triton. A stand-in module takes triton's place: every name exists there and can decorate or describe a kernel,
and launching a kernel raises an error. torch decides before the stand-in is set up whether triton exists, and works
without it. With CUDA nothing of this file is used.

When it starts, Megatron-LM's training compiles the helpers of megatron.core's datasets into the checkout by `make`, and
older versions then compile fused CUDA kernels. The wheel has no makefile, and a checkout may be read-only. So helpers
that are compiled already are used; otherwise each host compiles their one source file into the user's cache.
"""

import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch.utils._triton import has_triton_package

from megatron import backend
from megatron.pipeline.dropin.sentences import errors_end_the_job, say
from megatron.pipeline.runtime.failure.errors import number_of

# --- the compiled helpers of datasets ---------------------------------------------------------------------------------

NAME = "megatron.core.datasets.helpers_cpp"


def provide() -> None:
    """Make the helpers importable on every rank. Collective: every rank of the job must call it.

    If a host cannot compile the helpers, the job ends with one sentence.
    """
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


# --- CUDA, NCCL and triton --------------------------------------------------------------------------------------------


def install(*, quiet: bool = False) -> None:
    """Make Megatron-LM's training usable on the CPU, with gloo, and import it. A no-op with CUDA.

    Args:
        quiet: whether rank 0 writes no line.

    Raises:
        ValueError: megatron.core was imported before.
    """
    if backend.is_cuda():
        return
    if "megatron.core" in sys.modules and not backend.is_installed():
        raise ValueError(
            "megatron.core was imported before megatron.pipeline.dropin.install(), and without CUDA it needs stand-ins "
            "at its import; call install() before the first import of Megatron"
        )
    stand_in_for_triton()
    _pretend_one_device()
    _take_gloo()
    backend.install()
    import megatron.training.initialize
    import megatron.training.training

    megatron.training.initialize._compile_dependencies = provide
    _allow_no_cuda(megatron.training.initialize.initialize_megatron)
    if not quiet:
        say("no CUDA here: the CPU layer is installed; training runs on the CPU, with gloo where nccl is asked for")


def _pretend_one_device() -> None:
    # With no device Megatron-LM sets up neither model parallelism nor random numbers.
    torch.cuda.device_count = lambda: 1
    # From generation 10 on, Megatron-LM does not demand an order of launches through CUDA_DEVICE_MAX_CONNECTIONS.
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="CPU", major=10, minor=0, total_memory=backend.device_bytes(), multi_processor_count=1
    )
    torch.cuda.get_device_capability = lambda device=None: (10, 0)
    torch.cuda.set_stream = lambda stream: None
    torch.cuda.device_memory_used = lambda device=None: 0  # a column of Megatron-LM's memory report


def _take_gloo() -> None:
    """Use gloo for process groups that ask for nccl, Megatron-LM's default, which needs CUDA."""
    form_group = torch.distributed.init_process_group

    @functools.wraps(form_group)
    def with_gloo(backend=None, *args, device_id=None, **kwargs):
        return form_group("gloo" if backend in (None, "nccl") else backend, *args, **kwargs)

    torch.distributed.init_process_group = with_gloo


def _allow_no_cuda(initialize) -> None:
    """Replace `initialize`, in every module of megatron that has imported it, by a version that allows no CUDA."""
    allowed = functools.partial(initialize, allow_no_cuda=True)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, initialize.__name__, None) is initialize:
            setattr(module, initialize.__name__, allowed)


# --- triton

_TRITON = ("triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice", "triton.runtime")


def stand_in_for_triton() -> None:
    """Put a stand-in module, in which every name exists, in the place of triton, unless triton is installed."""
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    assert not has_triton_package()  # torch caches the answer: its compiler must not use the stand-in
    for name in _TRITON:
        module = sys.modules[name] = TritonStandIn(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


class TritonStandIn(ModuleType):
    """A stand-in for a module of triton, in which every name exists."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__ = []
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(f"{self.__name__}.{name}")


class _Named:
    """A stand-in for a function, a type or a decorator of triton."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> "_Named":
        """Return another stand-in: the call may be a decorator, with or without arguments, or a description."""
        return _Named(self._name)

    def __getattr__(self, name: str) -> "_Named":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(f"{self._name}.{name}")

    def __getitem__(self, grid: object) -> object:
        """Raise RuntimeError: indexing a kernel with a grid is its launch."""
        raise RuntimeError(f"{self._name}: a kernel of triton is launched, and this machine has no triton")
