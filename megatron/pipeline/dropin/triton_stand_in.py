"""What Megatron-LM needs of triton while it is imported, where there is none.

Problem: some modules that their training always imports, import triton outright (one in 0.16.1, more in newer
versions). On a CPU there is none, and none of their kernels runs.

Solution: a module in which every name exists, and decorates a kernel or describes one. Whoever launches a kernel is
told. torch has made up its mind before, and goes on without triton.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from torch.utils._triton import has_triton_package

MODULES = ("triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice", "triton.runtime")


def install() -> None:
    """Put the stand-in in place, unless there is a triton."""
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    assert not has_triton_package()  # which torch remembers: the stand-in would not do for its compiler
    for name in MODULES:
        module = sys.modules[name] = StandIn(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


class StandIn(ModuleType):
    """A module of triton in name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__ = []
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(f"{self.__name__}.{name}")


class Named:
    """What stands for a function, a type or a decorator of triton."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> "Named":
        """As a decorator, with or without arguments, or as a description: another that may be called again."""
        return Named(self._name)

    def __getattr__(self, name: str) -> "Named":
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(f"{self._name}.{name}")

    def __getitem__(self, grid: object) -> object:
        """A kernel's launch."""
        raise RuntimeError(f"{self._name}: a kernel of triton is launched, and this machine has no triton")
