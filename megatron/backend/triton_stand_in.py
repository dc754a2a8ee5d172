"""A stand-in for triton, which modules of megatron.core (from 0.18 on) and of Megatron-LM's training always import.

On a machine without CUDA there may be no triton. In the stand-in every name exists and can decorate or describe a
kernel, and launching a kernel raises an error. torch decides before the stand-in is set up whether triton exists, and
works without it.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from torch.utils._triton import has_triton_package

_TRITON = ("triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice", "triton.runtime")


def stand_in_for_triton() -> Sequence[str]:
    """Put a stand-in module, in which every name exists, in the place of triton, unless triton is installed.

    Returns the names of the modules that are put there.
    """
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return ()
    assert not has_triton_package()  # torch caches the answer: its compiler must not use the stand-in
    for name in _TRITON:
        module = sys.modules[name] = TritonStandIn(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    return _TRITON


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
