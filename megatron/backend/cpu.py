"""Stand-ins for the parts of torch.cuda that megatron.core needs on a machine without CUDA, and optimizers on the host.

Each stand-in was left out in turn to see what breaks; the reason is written beside each stand-in. The factories are
wrapped one by one instead of through a TorchFunctionMode: a mode is thread-local (the reduction chain runs on a thread
of its own) and costs a fifth of a small model's step.

`optimizers_on_host`: on a GPU megatron.core steps with the kernels of Apex or Transformer Engine if these are
installed, and such kernels cannot run on the host. It also decides by the name of a weight's type whether the weight
gets a master copy, and knows only the names of types on CUDA. So while an optimizer for the host is made, torch's Adam
and SGD are used, and types have their names on CUDA.
"""

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
from torch.utils import _device as torch_device

from megatron.backend.triton_stand_in import stand_in_for_triton

_CPU = torch.device("cpu")

# Functions that make a tensor on the device of their keyword `device`: megatron.core passes "cuda" or
# torch.cuda.current_device() to all of them.
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)


def install_stand_ins() -> None:
    """Replace, for the rest of the process, the functions of torch.cuda that megatron.core needs at run time."""
    # megatron.core passes it to factories as `device=`, and uses it as the index of default_generators.
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.set_device = lambda device: None
    # Called after transfers and around timers. A CPU operation has ended when its call returns.
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.empty_cache = lambda: None
    # No-ops, since all tensors are on the device already.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, device=None: self
    # `with torch.device(...)` reads a list of factories that torch makes once; the list must hold torch's originals.
    torch_device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _replace_random()
    _replace_autocast()
    # The optimizers choose masters by the *name* of a parameter's type.
    torch.Tensor.type = type_with_cuda_names(torch.Tensor.type)
    # Modules that overlap copies on CUDA make streams and events, and do not use them here.
    torch.cuda.Stream = _Stream
    torch.cuda.Event = _Event
    torch.cuda.current_stream = lambda device=None: _Stream()
    torch.cuda.default_stream = lambda device=None: _Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    # One generator serves as the CPU's and the device's, so at every fork the tracker warns that the CPU's changed.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _says_more_than_no_cuda(record: logging.LogRecord) -> bool:
    return "No CUDA runtime is found" not in record.getMessage()


@contextlib.contextmanager
def import_stand_ins():
    """A block with the replacements that megatron.core needs only while it is imported."""
    compile_function = torch.compile
    added = stand_in_for_triton() if _core_imports_triton() else ()
    # megatron.core imports this module. If CUDA's compiler is installed, the module looks for a GPU and warns.
    logging.getLogger("torch.utils.cpp_extension").addFilter(_says_more_than_no_cuda)
    # Fused functions are decorated at import; compiling each takes seconds on a CPU and gains nothing there.
    torch.compile = _identity_compile
    try:
        with warnings.catch_warnings():
            # Neither library exists for CPUs, so a warning of their absence is useless.
            warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|transformer_engine|apex).*")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            from megatron.core import jit

            if hasattr(jit, "disable_jit_fuser"):  # for modules that are imported after this block
                jit.disable_jit_fuser()  # before core 0.16 the fuser is torch.compile, here already the identity
            yield
    finally:
        torch.compile = compile_function
        for name in added:
            del sys.modules[name]


def _core_imports_triton() -> bool:
    """Whether this megatron.core cannot be imported without triton; true from 0.18 on."""
    (folder,) = find_spec("megatron.core").submodule_search_locations
    return (Path(folder) / "transformer" / "moe" / "paged_stash.py").exists()


def _identity_compile(model=None, **kwargs):
    return model if model is not None else lambda function: function


def _names_cuda(device) -> bool:
    return device is not None and not isinstance(device, int) and str(device).startswith("cuda")


def _on_cpu(factory):
    @functools.wraps(factory)
    def on_cpu(*args, **kwargs):
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # rotary positions of context parallel ranks ask for it
        return factory(*args, **kwargs)

    return on_cpu


def _replace_random() -> None:
    # The random-number tracker gives every tensor-parallel rank a state of its own through these. Without
    # manual_seed all ranks would silently draw the same numbers; without _lazy_call set states are never set.
    generator = torch.default_generator

    class _Generators:
        def __getitem__(self, device):
            return generator

    torch.cuda.default_generators = _Generators()
    torch.cuda.manual_seed = torch.cuda.random.manual_seed = lambda seed: generator.manual_seed(int(seed)) and None
    torch.cuda.manual_seed_all = torch.cuda.random.manual_seed_all = torch.cuda.manual_seed
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device="cuda": generator.get_state()
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = lambda new_state, device="cuda": (
        generator.set_state(new_state) and None
    )
    torch.cuda._lazy_call = lambda function, **kwargs: function()


def _replace_autocast() -> None:
    # megatron.core names "cuda" in autocast regions and custom functions: on a CPU they would silently not cast.
    class _Autocast(torch.autocast):
        def __init__(self, device_type, *args, **kwargs):
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast = torch.amp.autocast = _Autocast
    torch.amp.custom_fwd = _with_cpu_device_type(torch.amp.custom_fwd)
    torch.amp.custom_bwd = _with_cpu_device_type(torch.amp.custom_bwd)


def _with_cpu_device_type(decorator):
    @functools.wraps(decorator)
    def for_cpu(*args, device_type, **kwargs):
        return decorator(*args, device_type="cpu" if device_type == "cuda" else device_type, **kwargs)

    return for_cpu


def _nothing(*args, **kwargs) -> None:
    """Do nothing."""


class _Stream:
    """A stand-in for a CUDA stream, on which all work is done when a call returns."""

    __init__ = wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event=None):
        return event or _Event()


class _Event:
    __init__ = record = wait = synchronize = _nothing

    def query(self):
        return True


@contextlib.contextmanager
def optimizers_on_host() -> Iterator[None]:
    """A block in which `get_megatron_optimizer` takes parameters on the host, and makes optimizers that step there."""
    from megatron.core import optimizer

    with (
        mock.patch.object(optimizer, "Adam", torch.optim.AdamW),
        mock.patch.object(optimizer, "SGD", torch.optim.SGD),
        mock.patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", True),
        mock.patch.object(torch.Tensor, "type", type_with_cuda_names(torch.Tensor.type)),
    ):
        yield


def type_with_cuda_names(tensor_type: Callable) -> Callable:
    """Wrap `torch.Tensor.type` so that megatron.core gets the name of the type on CUDA for a tensor on the host."""

    @functools.wraps(tensor_type)
    def named_type(self, dtype=None, *args, **kwargs):
        result = tensor_type(self, dtype, *args, **kwargs)
        asks = dtype is None and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core")
        if asks and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return named_type
